"""One of several processes: compares what ranks need and keep with what was estimated.

Started by torchrun with one argument: a folder for pages.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from ptm_accel.config import PTMConfig
from ptm_accel.distributed.exchange import exchange_of
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError
from ptm_accel.estimate import Estimate, estimate
from ptm_accel.memory.block import Part
from ptm_accel.memory.budget import Tag, Tier
from ptm_accel.memory.disk import bounce_bytes
from ptm_accel.model.kept import Kept
from ptm_accel.units import format_bytes, format_least, parse_bytes
from tests.distributed.cases import PAGE, Case

CASES = [Case(), Case("llama-tied", dtype="bf16", masters=True), Case("lora")]
PASSES = 4


class Said(logging.Handler):
    """Keeps what is logged of ranks."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "ptm_accel.distributed.exchange":
            self.texts.append(record.getMessage())


@contextmanager
def prepared(case: Case, host_bytes: int, disk: Path | None) -> Iterator[Engine]:
    """The model of a case on pages of so much memory, with its optimizer."""
    model = case.build()
    asked = PTMConfig(
        host_memory=host_bytes,
        page_size=PAGE,
        disk=None if disk is None else str(disk),
        master_weights="fp32" if case.masters else None,
        shard="full",
    )
    engine = Engine.attach(model, asked, device=torch.device("cpu"))
    try:
        engine.training.replicate()
        trained = [param for param in model.parameters() if param.requires_grad]
        engine.bind_optimizer(torch.optim.AdamW(trained, fused=True))
        yield engine
    finally:
        engine.close()


def train(case: Case, engine: Engine) -> Kept:
    """Trains for a step; gives what is kept after two more micro-batches, before theirs."""
    optimizer = engine.optimizer
    assert optimizer is not None
    for number in range(PASSES):
        engine.model(**case.batch(number, dist.get_rank())).loss.backward()
        if number == 1:
            optimizer.step()
            optimizer.zero_grad()
    engine.settle()
    states = list(optimizer.states)
    return Kept(
        parameters_bytes=taken(slot.own for slot in engine.slots),
        gradients_bytes=taken(engine.training.sums()),
        masters_bytes=taken(state.master for state in states if state.master is not None),
        optimizer_bytes=taken(part for state in states for part in state.paged.values()),
    )


def taken(parts: Iterable[Part]) -> int:
    """Bytes of their blocks, each once."""
    return sum(block.slot_bytes for block in {part.block for part in parts})


def check_least(case: Case, found: Estimate, folder: Path) -> None:
    """Ranks train with the least budget, and are refused with less by its figure."""
    rank = dist.get_rank()
    with prepared(case, found.least_bytes, folder) as engine:
        # A file system that refuses direct transfers needs no bounce buffers.
        staging = engine.memory.budgets[Tier.HOST].used_by_tag().get(Tag.STAGING, 0)
        least = found.least_bytes - bounce_bytes(1, parse_bytes(PAGE)) + staging
        floor = engine.needs.floor
        kept = train(case, engine)
        stats, moved = engine.training.shards.stats, exchange_of(engine.slots, dist.get_world_size())
        assert moved.network_bytes == found.network_bytes
        assert stats.reduced_bytes == PASSES * moved.reduced_bytes
        assert stats.gathered_bytes <= PASSES * 2 * moved.whole_bytes, "nothing is gathered more than twice"
        assert PASSES * moved.whole_bytes <= stats.gathered_bytes
        assert stats.received_bytes <= PASSES * found.network_bytes
        if rank == 0:
            assert (floor.total_bytes, floor.states_bytes - staging) == (least, found.states_bytes)
            assert (floor.away_bytes, floor.gathered_bytes) == (found.below_bytes, found.gathered_bytes)
            assert kept == found.kept, f"{kept}, and {found.kept} was estimated"
        else:
            assert floor.total_bytes <= least
            assert kept.total_bytes <= found.kept.total_bytes
    with pytest.raises(BudgetError, match=f"at least {format_least(least)}[.]"), prepared(case, least - 1, folder):
        pass


def check_whole(case: Case, found: Estimate) -> None:
    """With the budget for all, and no disk, nothing moves; with less, ranks are refused."""
    with prepared(case, found.whole_bytes, None) as engine:
        assert engine.needs.all_fits
        if dist.get_rank() == 0:
            assert engine.needs.floor.whole_bytes == found.whole_bytes
        train(case, engine)
        assert engine.pool.stats.stored_bytes == 0
    with pytest.raises(BudgetError, match="with no tier below"), prepared(case, found.whole_bytes - 1, None):
        pass


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    said = Said()
    logging.getLogger("ptm_accel").addHandler(said)
    logging.getLogger("ptm_accel").setLevel(logging.INFO)
    for case in CASES:
        sys.stderr.write(f"case {case}\n")
        model = case.build()
        found = estimate(model, master_weights=case.masters, page_size=PAGE, processes=dist.get_world_size())
        check_least(case, found, folder)
        check_whole(case, found)
        every = sum(param.nbytes for param in model.parameters())
        ranks, kept = dist.get_world_size(), found.kept
        begin = (
            f"shard: full over {ranks} ranks: each keeps {format_bytes(kept.parameters_bytes)} of "
            f"{format_bytes(every)} of parameters, and {format_bytes(kept.total_bytes)} with gradients and AdamW's "
            "state; a micro-batch gathers 2 x "
        )
        end = f"of which each rank receives {format_bytes(found.network_bytes)}."
        assert all(text.startswith(begin) and text.endswith(end) for text in said.texts[:1]), said.texts
        # Each model that has come onto pages, refused by its optimizer or not.
        assert (len(said.texts) > 0) == (dist.get_rank() == 0), said.texts
        said.texts.clear()
    sys.stdout.write(f"{len(CASES)} agree\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
