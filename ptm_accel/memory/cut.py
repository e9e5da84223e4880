"""How one parameter is cut into ranges of elements, of which each rank owns one (ZeRO)."""

from __future__ import annotations

from dataclasses import dataclass

from ptm_accel.memory.transfer import round_up

CUT_ALIGN = 64
"""Ranges begin at multiples of this many elements: kernels compute the same bits from there on."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The range of one rank.

    Attributes:
        numel: elements of the parameter.
        count: number of ranks.
        rank: whose range it is.
    """

    numel: int
    count: int
    rank: int

    @property
    def span(self) -> int:
        """Elements of a range, but for the last one, which may be shorter."""
        return round_up(-(-self.numel // self.count), CUT_ALIGN)

    @property
    def start(self) -> int:
        """The first element."""
        return min(self.rank * self.span, self.numel)

    @property
    def stop(self) -> int:
        """The element after the last."""
        return min(self.start + self.span, self.numel)

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def padded(self) -> int:
        """Elements of the whole parameter, with what is missing of the last range."""
        return self.count * self.span


def can_be_cut(numel: int, count: int) -> bool:
    """Returns whether every one of `count` ranks owns at least one element."""
    return Cut(numel, count, count - 1).length > 0
