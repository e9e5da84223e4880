"""Jobs for a thread that does arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ptm_accel.memory.copies import raise_first
from ptm_accel.optim.units import Unit


class UpdateJob:
    """The arithmetic of one window, in another thread.

    Args:
        unit: the window.
        prepare: waits for what it needs; nothing has been changed as long as that has not ended.
        update: does it; what it returns is `after`.

    Attributes:
        unit: see above.
        after: what the optimizer has left in the state of each parameter.
        cancelled: it is not to begin any more.
        touched: it has begun to change what is in the window.
    """

    def __init__(
        self, unit: Unit, prepare: Callable[[Unit], object], update: Callable[[Unit], list[dict[str, Any]]]
    ) -> None:
        self.unit = unit
        self.after: list[dict[str, Any]] = []
        self.cancelled = self.touched = False
        self._prepare = prepare
        self._update = update
        self._errors: list[BaseException] = []
        self._ended = threading.Event()

    def run(self) -> None:
        """Does the arithmetic; called by the worker only."""
        try:
            if not self.cancelled:
                self._prepare(self.unit)
                self.touched = True
                self.after = self._update(self.unit)
        except BaseException as error:
            # Whatever it is belongs to the thread that trains, which asks for it.
            self._errors.append(error)
        finally:
            self._ended.set()

    def done(self) -> bool:
        """Returns whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Blocks until it has ended, well or not; it may wait for a disk itself."""
        self._ended.wait()

    def result(self) -> list[dict[str, Any]]:
        """Returns what it left, once it has ended; raises its error, once, with the worker's traceback."""
        raise_first(self._errors)
        return self.after
