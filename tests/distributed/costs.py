"""What sharded blocks may cost: bytes over the network, agreements between ranks, and the memory of each rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch.distributed as dist

from ptm_accel.engine import Engine
from ptm_accel.model.slots import ParamSlot
from tests.distributed.twin import span

_LARGE = 1 << 20
_WARM_UP = 2
"""Passes that find out the order of a pass, and tell it."""


@dataclass(frozen=True)
class Counters:
    """Where `engine.training.shards.stats` stands.

    Attributes:
        gathered, reduced: bytes of whole blocks.
        gathers: collectives that gathered.
        agreed: accesses that no order foretold.
    """

    gathered: int
    reduced: int
    gathers: int
    agreed: int


class Costs:
    """Watches the counters of one training; a pass is a forward and its backward.

    Args:
        engine: the model, with its optimizer.
        recomputes: its layers are checkpointed.
    """

    def __init__(self, engine: Engine, *, recomputes: bool) -> None:
        self._recomputes = recomputes
        self._engine = engine
        self._ends = [self._now()]

    def _now(self) -> Counters:
        stats = self._engine.training.shards.stats
        return Counters(stats.gathered_bytes, stats.reduced_bytes, stats.gathers, stats.agreed)

    def pass_ended(self) -> None:
        """Takes down what the pass, and the step before it, have cost."""
        self._ends.append(self._now())

    def check(self) -> None:
        """Every rank has cost as little as it may, and has done the same as the others."""
        cut = [slot for slot in self._engine.slots if slot.own is not slot.value]
        assert cut, "nothing is sharded, so this shows little"
        ranks = dist.get_world_size()
        whole = sum(padded_bytes(slot, ranks) for slot in cut)
        trained = sum(padded_bytes(slot, ranks) for slot in cut if slot.param.requires_grad)
        # An embedding that is the head as well is used by the forwards of both, and by the backward of the head.
        names = Counter(id(slot) for slot in self._engine.slots.by_name.values())
        tied = sum(padded_bytes(slot, ranks) for slot in cut if names[id(slot)] > 1)
        trained += sum(s.value.nbytes for s in self._engine.slots if s not in cut and s.param.requires_grad)
        # Parameters that are gathered one by one do not stay between their recomputation and their backward.
        grouped = 2 * len({slot.value.block for slot in cut}) <= len(cut)
        uses = 2.0 if grouped or not self._recomputes else 3.0
        for number, (before, after) in enumerate(zip(self._ends, self._ends[1:], strict=False), start=1):
            gathered, reduced = after.gathered - before.gathered, after.reduced - before.reduced
            assert 0 < gathered <= uses * whole + tied, f"pass {number} gathered {gathered} bytes; all are {whole}"
            assert reduced <= 1.0 * trained, f"pass {number} reduced {reduced} bytes; all are {trained}"
        last = self._ends[-1]
        assert last.agreed == self._ends[_WARM_UP].agreed, [end.agreed for end in self._ends]
        self._check_all_did_the_same(last)
        self._check_memory(cut, ranks)

    def _check_all_did_the_same(self, last: Counters) -> None:
        mine = (last, self._engine.training.shards.stats.sequence)
        everyone: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        assert all(other == mine for other in everyone), everyone

    def _check_memory(self, cut: list[ParamSlot], ranks: int) -> None:
        """Each rank's blocks, of groups large enough that their padding is little."""
        groups: dict[object, list[ParamSlot]] = {}
        for slot in cut:
            groups.setdefault(slot.group, []).append(slot)
        assert self._engine.optimizer is not None
        for members in groups.values():
            whole = sum(slot.param.numel() * slot.own.dtype.itemsize for slot in members)
            own = sum(block.nbytes for block in dict.fromkeys(slot.own.block for slot in members))
            assert whole < _LARGE or own <= 1.05 / ranks * whole, f"{members[0].name}: {own} of {whole} bytes"
        for state in self._engine.optimizer.states:
            if state.slot in cut:
                sizes = {key: part.numel for key, part in state.paged.items()}
                assert all(numel == state.slot.own.numel for numel in sizes.values()), (state.slot.name, sizes)


def padded_bytes(slot: ParamSlot, ranks: int) -> int:
    """The bytes of a whole parameter with room for equal ranges."""
    return ranks * span(slot.param.numel(), ranks) * slot.own.dtype.itemsize
