"""Sums in host memory below a device: the CPU adds there what has been copied out, and nothing is brought in for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ptm_accel.memory.copies import finish, settle
from ptm_accel.memory.transfer import Transfer


class HostSum:
    """Additions that one thread carries out after each other; to others it is a transfer that writes the sum.

    Args:
        pieces: sums, each with what is added to it; both 1-D on the CPU.
        written: what must have ended well before: transfers that write either.
        read: what must have ended, well or not: transfers that read the sums.
    """

    __slots__ = ("_ended", "_error", "_pieces", "_read", "_written")

    def __init__(
        self,
        pieces: list[tuple[torch.Tensor, torch.Tensor]],
        written: Sequence[Transfer],
        read: Sequence[Transfer],
    ) -> None:
        self._pieces = pieces
        self._written = written
        self._read = read
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Adds; called by the thread that adds."""
        try:
            settle(self._read)
            finish(self._written)
            with torch.no_grad():
                for total, more in self._pieces:
                    total.add_(more)
        except BaseException as error:
            # Whatever it is belongs to whoever waits.
            self._error = error.with_traceback(None)
        finally:
            self._pieces, self._written, self._read = [], (), ()
            self._ended.set()

    def done(self) -> bool:
        """Returns whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Blocks until it has ended; raises its error, every time."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        """Waits: the host adds, so no device can be told to come after it."""
        self.wait()
