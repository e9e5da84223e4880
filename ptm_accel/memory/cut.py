"""How one parameter is cut into ranges of elements, one for each of several processes."""

from __future__ import annotations

from dataclasses import dataclass

from ptm_accel.memory.transfer import round_up

_ALIGN = 64
"""Ranges begin at multiples of this many elements, from where kernels compute the same bits as in the whole."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The range of one rank.

    All ranges have room for as many elements, as collectives ask for; the last that has any may have fewer, and those
    behind it have none.

    Attributes:
        numel: elements of the parameter.
        count: how many ranks there are.
        rank: whose range it is.
    """

    numel: int
    count: int
    rank: int

    def __post_init__(self) -> None:
        """Checks what callers are to know."""
        assert self.numel >= 0, f"a parameter of {self.numel} elements"
        assert 0 <= self.rank < self.count, f"rank {self.rank} of {self.count}"

    @property
    def span(self) -> int:
        """Elements that a range has room for."""
        return round_up(-(-self.numel // self.count), _ALIGN)

    @property
    def start(self) -> int:
        """The first element of the range."""
        return min(self.rank * self.span, self.numel)

    @property
    def stop(self) -> int:
        """The element behind the last."""
        return min(self.start + self.span, self.numel)

    @property
    def length(self) -> int:
        """Elements of the range."""
        return self.stop - self.start

    @property
    def padded(self) -> int:
        """Elements that all ranges together have room for."""
        return self.count * self.span


def can_be_cut(numel: int, count: int) -> bool:
    """Returns whether each of `count` ranks has at least one element of a parameter."""
    return Cut(numel, count, count - 1).length > 0
