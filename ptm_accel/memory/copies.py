"""Transfers made of others, and their errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from ptm_accel.memory.transfer import Transfer

logger = logging.getLogger(__name__)


def raise_first(kept: list[BaseException]) -> None:
    """Raises the first of some errors, if there is any, and empties the list.

    The error refers to the frames that it passes: a list or a name there that refers to the error would be a cycle, and
    keep tensors in memory until the garbage collector runs.
    """
    if kept:
        error = kept[0]
        kept.clear()
        try:
            raise error
        finally:
            del error


def close_all(steps: Iterable[Callable[[], object]]) -> None:
    """Does all steps in order, whatever one of them raises.

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


def order_behind(transfers: Iterable[Transfer]) -> None:
    """Makes later compute come after transfers that use its memory; their errors are those of their own tensors."""
    for transfer in transfers:
        try:
            transfer.order()
        except Exception as error:
            logger.debug("a transfer has failed, as whoever waits for it is told", exc_info=error)


def parts_of(transfer: Transfer) -> tuple[Transfer, ...]:
    """Returns the transfers that `joined` has joined, or the transfer itself."""
    return transfer.parts if isinstance(transfer, _Joined) else (transfer,)


def moves_of(transfer: Transfer) -> tuple[Transfer, ...]:
    """Returns what `parts_of` does, each without what it keeps."""
    return tuple(part.transfer if isinstance(part, Keeping) else part for part in parts_of(transfer))


def joined(parts: Sequence[Transfer]) -> Transfer:
    """Returns the parts as one transfer, which ends with the last of them."""
    return parts[0] if len(parts) == 1 else _Joined(parts)


def _error_of(transfer: Transfer) -> Exception | None:
    try:
        transfer.wait()
    except Exception as error:
        # See `raise_first`.
        return error.with_traceback(None)
    return None


class _Joined:
    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self.parts = tuple(part for each in parts for part in parts_of(each))

    def done(self) -> bool:
        # All are asked: `Chained.done` starts copies.
        ended = [part.done() for part in self.parts]
        return all(ended)

    def wait(self) -> None:
        finish(self.parts)

    def order(self) -> None:
        errors: list[BaseException] = []
        for part in self.parts:
            # All of them, since their memory is let go of after this.
            try:
                part.order()
            except Exception as error:
                errors.append(error)
        raise_first(errors)


class Keeping:
    """A transfer that keeps its source alive.

    Attributes:
        transfer: it, without the source.
    """

    __slots__ = ("_source", "transfer")

    def __init__(self, transfer: Transfer, source: torch.Tensor) -> None:
        self.transfer = transfer
        self._source: torch.Tensor | None = source

    def done(self) -> bool:
        """Returns whether it has ended, well or not."""
        ended = self.transfer.done()
        if ended:
            self._source = None
        return ended

    def wait(self) -> None:
        """Blocks until it has ended; raises its error."""
        try:
            self.transfer.wait()
        finally:
            self._source = None

    def order(self) -> None:
        """See `Transfer.order`."""
        self.transfer.order()


class Chained:
    """A copy that may start only when others have ended: it starts at the next call of `done`, `wait` or `order`.

    Args:
        before: what must have ended, well.
        start: starts the copy.
    """

    __slots__ = ("_before", "_copy", "_error", "_lock", "_start")

    def __init__(self, before: Sequence[Transfer], start: Callable[[], Transfer]) -> None:
        self._before: Sequence[Transfer] = before
        self._start: Callable[[], Transfer] | None = start
        self._copy: Transfer | None = None
        self._error: BaseException | None = None
        self._lock = threading.RLock()

    @property
    def begun(self) -> Transfer:
        """The copy, once it has started; until then this."""
        return self if self._copy is None else self._copy

    def done(self) -> bool:
        """Returns whether it has ended, well or not; starts the copy if it can start now."""
        if not self._lock.acquire(blocking=False):
            # Another thread waits in `_begin`.
            return False
        try:
            if self._start is not None and all(transfer.done() for transfer in self._before):
                self._begin()
            return self._error is not None or (self._copy is not None and self._copy.done())
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
            if self._error is not None:
                raise self._error.with_traceback(None)
            assert self._copy is not None
            return self._copy

    def _begin(self) -> None:
        start, before = self._start, self._before
        assert start is not None
        # Ctrl-C may break this off; then nothing has begun.
        error = settle(before)
        # Dropped together with the tensors that it holds.
        self._start, self._before, self._error = None, (), error
        if error is None:
            try:
                self._copy = start()
            except Exception as error:
                self._error = error
