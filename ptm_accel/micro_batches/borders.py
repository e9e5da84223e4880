"""Borders: what goes into each layer and what the last one returns, kept for all micro-batches that run together.

On a CPU they are activations, beside the budget. On a device they are a part of `device_memory`, as all memory that
torch holds beside pages is (`ptm_accel.memory.activation_reserve`); there a step whose borders do not fit beside the
least that pages work with is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from ptm_accel.memory.activation_reserve import MARGIN, Shapes, size_of
from ptm_accel.memory.calls import Call
from ptm_accel.memory.pool import Pool


def border_bytes(
    layers: int, *, batch: int, length: int, width: int, element_bytes: int, micro_batches: int = 1
) -> int:
    """Returns the bytes of the borders of micro-batches.

    Args:
        layers: how many.
        batch: rows of a micro-batch.
        length: tokens of a row.
        width: elements of a hidden state.
        element_bytes: of one of them.
        micro_batches: how many.
    """
    return (layers + 1) * micro_batches * batch * length * width * element_bytes


def most_together(room_bytes: int, one_bytes: int, beside_bytes: int) -> int:
    """Returns how many micro-batches fit a device together; one always runs.

    Args:
        room_bytes: what pages leave.
        one_bytes: borders of one micro-batch.
        beside_bytes: what one takes beside them while it runs.
    """
    return max((int(room_bytes / MARGIN) - beside_bytes) // max(one_bytes, 1), 1)


class Chunks:
    """Cuts the micro-batches of a step into the fewest equal chunks whose borders a device has room for.

    The first micro-batch of a run goes alone, and so does one that is larger than all before it: so it is seen what it
    takes beside its borders. On a CPU nothing is cut.

    Args:
        pool: of the model; None where it is in ordinary memory.
    """

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        # Of the largest micro-batch so far: its size, its borders, and what it takes beside them.
        self._largest: Sequence[float] = (-1.0, -1.0, -1.0)
        self._border_bytes = self._beside_bytes = 0
        self._mark_bytes = 0

    def next(self, shapes: Sequence[Shapes]) -> int:
        """Returns how many micro-batches run together now, and has pages leave their borders free.

        Args:
            shapes: of the tensors of each micro-batch that is left.
        """
        count = self._fitting(shapes)
        if self._pool is not None and (reserve := self._pool.admission.activation_reserve) is not None:
            if count > 1:
                with self._pool.calls.during(Call.ACCESS, self._pool):
                    self._pool.admission.expect(self._beside_bytes + count * self._border_bytes)
            self._mark_bytes = reserve.trained_bytes
        return count

    def cut(self, shapes: Sequence[Shapes]) -> list[int]:
        """Returns how many micro-batches each chunk of a step has, by what is known now."""
        counts: list[int] = []
        while (done := sum(counts)) < len(shapes):
            counts.append(self._fitting(shapes[done:]))
        return counts

    def _fitting(self, shapes: Sequence[Shapes]) -> int:
        reserve = None if self._pool is None else self._pool.admission.activation_reserve
        if reserve is None:
            return len(shapes)
        known = next((number for number, each in enumerate(shapes) if self._growth(each) > 1), len(shapes))
        fit = most_together(reserve.total_bytes - reserve.least_bytes, self._border_bytes, self._beside_bytes)
        return ceil(known / ceil(known / fit)) if known else 1

    def ran(self, shapes: Sequence[Shapes], kept_bytes: int) -> None:
        """A chunk has run.

        Args:
            shapes: of its micro-batches.
            kept_bytes: its borders.
        """
        if self._pool is None or (reserve := self._pool.admission.activation_reserve) is None:
            return
        with self._pool.calls.during(Call.ACCESS, self._pool):
            self._pool.admission.sample()
        beside = reserve.trained_bytes - kept_bytes
        if reserve.trained_bytes == self._mark_bytes and self._border_bytes:
            # As much was taken before, or expected: by more borders, or by something else.
            beside = min(beside, int(self._beside_bytes * max(map(self._growth, shapes))))
        self._beside_bytes = max(self._beside_bytes, beside)
        self._border_bytes = max(self._border_bytes, ceil(kept_bytes / len(shapes)))
        self._largest = [max(sizes) for sizes in zip(self._largest, *map(size_of, shapes), strict=True)]

    def _growth(self, shapes: Shapes) -> float:
        """Returns how many times as large as all before it a micro-batch is, by the measure that tells most."""
        pairs = zip(size_of(shapes), self._largest, strict=True)
        return max(one / most if most > 0 else 1.0 + (one > most) for one, most in pairs)
