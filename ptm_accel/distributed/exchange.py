"""What ranks that a model is sharded over send one another, by formula, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ptm_accel.model.floor import FUSED_ADAMW
from ptm_accel.model.grouping import Sharding
from ptm_accel.model.kept import kept_bytes
from ptm_accel.model.slots import ParamSlot
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)

GATHERS = 2
"""How often a pass gathers a parameter: in its forward and in its backward. One that stays between the two is gathered
once; a tied embedding once more, and so is a parameter that is a group of its own in a checkpointed layer."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes of one micro-batch, its forward and its backward, padding included.

    Attributes:
        ranks: how many there are.
        whole_bytes: of all sharded parameters, which are gathered `GATHERS` times.
        reduced_bytes: of the gradients of those that are trained, which are reduced once.
    """

    ranks: int
    whole_bytes: int
    reduced_bytes: int

    @property
    def network_bytes(self) -> int:
        """What a rank receives of that: all but its own ranges."""
        return (GATHERS * self.whole_bytes + self.reduced_bytes) * (self.ranks - 1) // self.ranks


def exchange_of(slots: Iterable[ParamSlot], ranks: int) -> Exchange:
    """Works out what ranks send one another.

    Args:
        slots: the parameters.
        ranks: how many there are.
    """
    whole = reduced = 0
    for slot in slots:
        if slot.sharded:
            nbytes = slot.group.pieces[slot.member].cut.padded * slot.own.dtype.itemsize
            whole += nbytes
            reduced += nbytes if slot.param.requires_grad else 0
    return Exchange(ranks, whole, reduced)


def tell_of_ranks(slots: Iterable[ParamSlot], sharding: Sharding, *, masters: bool) -> None:
    """Says, on the first rank, what each keeps and what a micro-batch moves between them.

    Args:
        slots: the parameters.
        sharding: which rank this is.
        masters: whether narrower ones get fp32 masters.
    """
    if sharding.rank:
        return
    slots = list(slots)
    kept = kept_bytes(slots, FUSED_ADAMW, masters=masters)
    moved = exchange_of(slots, sharding.count)
    logger.info(
        "shard: full over %d ranks: each keeps %s of %s of parameters, and %s with gradients and AdamW's state; a "
        "micro-batch gathers %d x %s and reduces %s, of which each rank receives %s.",
        sharding.count,
        format_bytes(kept.parameters_bytes),
        format_bytes(sum(slot.value.nbytes for slot in slots)),
        format_bytes(kept.total_bytes),
        GATHERS,
        format_bytes(moved.whole_bytes),
        format_bytes(moved.reduced_bytes),
        format_bytes(moved.network_bytes),
    )
