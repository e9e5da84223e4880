"""Transfers made of others: several as one, one that keeps its source, and one that starts when others have ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from ptm_accel.memory.transfer import Transfer

logger = logging.getLogger(__name__)


def raise_first(kept: list[BaseException]) -> None:
    """Raises the first of some errors, if there is any, and empties the list, known to nobody else.

    What is raised refers to the frames that it passes: were it in a list or a name there, that would be a cycle, and
    the memory of what they hold in use until the collector comes by.
    """
    if kept:
        error = kept[0]
        kept.clear()
        try:
            raise error
        finally:
            del error


def close_all(steps: Iterable[Callable[[], object]]) -> None:
    """Does all steps in order: threads, files and memory would stay for good where an error kept one from being done.

    Raises:
        BaseException: the first error of a step; later ones are logged.
    """
    errors: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            if errors:
                logger.error("closing failed a further time", exc_info=error)
            errors.append(error)
    raise_first(errors)


def finish(transfers: Sequence[Transfer]) -> None:
    """Waits until all have ended.

    Raises:
        BaseException: the first error.
    """
    raise_first([error for error in map(_error_of, transfers) if error is not None])


def settle(transfers: Sequence[Transfer]) -> BaseException | None:
    """Waits until all have ended, and returns the first error instead of raising it."""
    errors = [error for error in map(_error_of, transfers) if error is not None]
    return errors[0] if errors else None


def joined(parts: Sequence[Transfer]) -> Transfer:
    """The parts as one transfer, which ends with the last of them."""
    return parts[0] if len(parts) == 1 else _Joined(parts)


def _error_of(transfer: Transfer) -> Exception | None:
    try:
        transfer.wait()
    except Exception as error:
        # Without the frames that it has passed, which hold what their callers have, and are held by it (`raise_first`).
        return error.with_traceback(None)
    return None


class _Joined:
    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self._parts = tuple(parts)

    def done(self) -> bool:
        # All are asked: some move on only when asked.
        states = [part.done() for part in self._parts]
        return all(states)

    def wait(self) -> None:
        finish(self._parts)

    def order(self) -> None:
        errors: list[BaseException] = []
        for part in self._parts:
            # All of them, whatever one has: what they move to, or from, is let go of after this.
            try:
                part.order()
            except Exception as error:
                errors.append(error)
        raise_first(errors)


class Keeping:
    """A transfer that keeps the tensor it reads, which nobody else has a use for.

    Args:
        transfer: the transfer.
        source: what it reads.
    """

    __slots__ = ("_source", "_transfer")

    def __init__(self, transfer: Transfer, source: torch.Tensor) -> None:
        self._transfer = transfer
        self._source: torch.Tensor | None = source

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ended = self._transfer.done()
        if ended:
            self._source = None
        return ended

    def wait(self) -> None:
        """Blocks until it has ended; raises its error."""
        try:
            self._transfer.wait()
        finally:
            self._source = None

    def order(self) -> None:
        """As `Transfer.order`."""
        self._transfer.order()


class Chained:
    """A copy that may start only when others have ended.

    There is no thread behind it: the copy starts as soon as somebody asks (`done`, `wait`, `order`) after the others
    have ended. So what is started early (a read from disk) runs beside compute, and the short copy follows.

    Args:
        before: what must have ended, well.
        start: starts the copy.
    """

    __slots__ = ("_before", "_copy", "_error", "_failed", "_lock", "_start")

    def __init__(self, before: Sequence[Transfer], start: Callable[[], Transfer]) -> None:
        self._before: Sequence[Transfer] = before
        self._start: Callable[[], Transfer] | None = start
        self._copy: Transfer | None = None
        # Those before, if one of them has failed: asked again, each has an error of its own for whoever asks.
        self._failed: Sequence[Transfer] = ()
        self._error: BaseException | None = None
        self._lock = threading.RLock()

    def done(self) -> bool:
        """Whether it has ended, well or not; starts the copy if it can start now."""
        if not self._lock.acquire(blocking=False):
            # Somebody is waiting for what comes before.
            return False
        try:
            if self._start is not None and all(transfer.done() for transfer in self._before):
                self._begin()
            return bool(self._failed) or self._error is not None or (self._copy is not None and self._copy.done())
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Blocks until the copy has ended; raises its error or that of what came before."""
        self._started().wait()

    def order(self) -> None:
        """Blocks until the copy has started, then makes compute wait for it; raises as `wait` does."""
        self._started().order()

    def _started(self) -> Transfer:
        with self._lock:
            if self._start is not None:
                self._begin()
            finish(self._failed)
            if self._error is not None:
                raise self._error
            assert self._copy is not None
            return self._copy

    def _begin(self) -> None:
        start, before = self._start, self._before
        assert start is not None
        # Ctrl-C may break this off; then nothing has begun.
        failed = settle(before) is not None
        # Dropped together with the tensors that it holds.
        self._start, self._before = None, ()
        if failed:
            self._failed = before
        else:
            try:
                self._copy = start()
            except Exception as error:
                self._error = error
