"""How one parameter is cut into ranges of elements, one for each of several processes."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        count: how many ranges there are.
        rank: whose range it is.
        span: elements that a range has room for.
        padded: elements that all ranges together have room for.
        start: the first element of the range.
        stop: the element behind the last.
        length: elements of the range.
    """

    numel: int
    count: int
    rank: int
    # Kept, since each step asks for them several times for each parameter.
    span: int = field(init=False, compare=False)
    padded: int = field(init=False, compare=False)
    start: int = field(init=False, compare=False)
    stop: int = field(init=False, compare=False)
    length: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Checks what callers are to know, and computes the rest."""
        assert self.numel >= 0, f"a parameter of {self.numel} elements"
        assert 0 <= self.rank < self.count, f"rank {self.rank} of {self.count}"
        span = round_up(-(-self.numel // self.count), _ALIGN)
        start = min(self.rank * span, self.numel)
        stop = min(start + span, self.numel)
        found = {"span": span, "padded": self.count * span, "start": start, "stop": stop, "length": stop - start}
        for name, value in found.items():
            object.__setattr__(self, name, value)


def can_be_cut(numel: int, count: int) -> bool:
    """Returns whether each of `count` ranks has at least one element of a parameter."""
    return Cut(numel, count, count - 1).length > 0
