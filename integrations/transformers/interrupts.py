"""Ctrl-C ends training at the next safe point: between two steps, or between two batches of an evaluation.

Python raises `KeyboardInterrupt` between any two instructions, also half-way through an optimizer step. The first
Ctrl-C is therefore only noted, and raised where a step, an update or a checkpoint is whole. A second one is raised at
once. Checkpoints are written beside their place and renamed, so neither can damage one.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class SafePoints:
    """Defers the first Ctrl-C to the next call of `check`."""

    def __init__(self) -> None:
        self._pending = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Defers Ctrl-C while it lasts.

        Does nothing outside the main thread, where the process handles SIGINT in its own way, or when nested.

        Raises:
            KeyboardInterrupt: Ctrl-C came and no safe point followed it.
        """
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        self._pending = False
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            # A handler that was set meanwhile stays.
            if signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        self.check()

    def check(self) -> None:
        """Raises the Ctrl-C that was deferred.

        Raises:
            KeyboardInterrupt: one is pending.
        """
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt
        self._pending = True
        logger.warning("Ctrl-C: ends after this step. Press it again to end at once.")
