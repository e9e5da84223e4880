"""What is moved in the background for the files of a disk tier.

A C library that carries transfers out does so in order for each descriptor, one after the other. So each descriptor is
a *channel*, and a file has several, for as many transfers at a time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ptm_accel.memory.background import NEVER_STARTED, Background
from ptm_accel.memory.disk_transfer import Piece
from ptm_accel.memory.scratch import Direction


class _Channel:
    """A descriptor of a file, and what is under way on it, in order."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = 0
        self.pieces: deque[tuple[Piece, Any]] = deque()


class Channels:
    """What is moved in the background, for all files of a tier. Called with the lanes' lock held.

    Args:
        background: carries transfers out.
        fds: of the files; -1 for one that is not to be used in this way.
        per_file: how many transfers are carried out at the same time for each.

    Raises:
        OSError: there are no more descriptors.

    Attributes:
        looked_s: when somebody looked last, or what is under way began.
    """

    def __init__(self, background: Background, fds: Sequence[int], per_file: int) -> None:
        self._background = background
        self._files: list[list[_Channel]] = []
        self._channels: list[_Channel] = []
        self.looked_s = 0.0
        try:
            for fd in fds:
                self._files.append([])
                for _ in range(per_file if fd >= 0 else 0):
                    self._channels.append(_Channel(os.dup(fd)))
                    self._files[-1].append(self._channels[-1])
        except OSError:
            self.close()
            raise

    def start(self, piece: Piece) -> bool:
        """Starts a piece, if it can be moved in this way.

        Returns:
            whether it was started.
        """
        channels = self._files[piece.path]
        if not channels or not piece.aligned:
            return False
        channel = channels[0]
        for other in channels:
            channel = other if other.nbytes < channel.nbytes else channel
        writes = piece.transfer.direction is Direction.WRITE
        request = self._background.prepared(
            channel.fd, writes=writes, address=piece.address, offset=piece.offset, nbytes=piece.nbytes
        )
        if self.idle:
            self.looked_s = time.perf_counter()
        # Held before it is started, whatever comes in between: the library writes to it.
        channel.pieces.append((piece, request))
        channel.nbytes += piece.nbytes
        try:
            self._background.start(request)
        except OSError:
            # Whoever moves it in another way says what is wrong.
            channel.pieces.pop()
            channel.nbytes -= piece.nbytes
            return False
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and all that was has been seen to end: a look that asks nobody."""
        return all(not channel.pieces for channel in self._channels)

    @property
    def under_way(self) -> bool:
        """Whether anything is, or has ended and nobody has seen that."""
        return any(channel.pieces and self._moves(channel) for channel in self._channels)

    def _moves(self, channel: _Channel) -> bool:
        # What is alone and was never started: Ctrl-C has come right before that, and its transfer counts as lost.
        return len(channel.pieces) > 1 or self._background.result(channel.pieces[0][1]) != NEVER_STARTED

    def ended(self) -> list[tuple[Piece, bool]]:
        """The pieces that have ended since this was last asked, each with whether all of it was moved."""
        found: list[tuple[Piece, bool]] = []
        for channel in self._channels:
            while channel.pieces:
                piece, request = channel.pieces[0]
                result = self._background.result(request)
                if result is None or (result == NEVER_STARTED and len(channel.pieces) == 1):
                    # The latter may be about to start, where a handler of signals has come to look.
                    break
                if channel.pieces[0][1] is not request:
                    # Such a handler has looked in between.
                    continue
                channel.pieces.popleft()
                channel.nbytes -= piece.nbytes
                if result != NEVER_STARTED:
                    found.append((piece, result == piece.nbytes))
        return found

    def cancel(self) -> None:
        """What has not begun ends without being moved."""
        for channel in self._channels:
            if channel.pieces:
                self._background.cancel(channel.fd)

    def first(self) -> list[Any]:
        """What is being moved now, for `wait`."""
        return [channel.pieces[0][1] for channel in self._channels if channel.pieces and self._moves(channel)]

    def wait(self, first: Sequence[Any]) -> None:
        """Blocks until one of some transfers has ended, and a moment at the most; without the lock."""
        self._background.wait(first)

    def close(self) -> None:
        """Closes the descriptors. Idempotent; nothing is under way."""
        channels, self._channels = self._channels, []
        for channel in channels:
            os.close(channel.fd)
