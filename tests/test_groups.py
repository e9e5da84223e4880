"""Groups of several parameters give the numbers of the plain Trainer, bit for bit, with every model and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plain_loop import assert_same
from tests.test_equality import plain_run, sizes
from tests.tiers import MEMORIES, in_groups, members, on_pages
from tests.trainer_runs import Job, run_trainer
from tests.zoo import ENTRIES

ROWS = [
    (
        model,
        memory,
        (1, 3)[(number + kind) % 2],
        ENTRIES[model].checkpointing[(number + kind) % len(ENTRIES[model].checkpointing)],
    )
    for number, model in enumerate(ENTRIES)
    for kind, memory in enumerate(MEMORIES)
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.mark.parametrize(("model", "memory", "accumulation", "checkpointing"), ROWS)
@pytest.mark.parametrize("clip", [0.1, 0.0])
def test_same_numbers_in_groups(
    model: str, memory: str, accumulation: int, checkpointing: str, clip: float, scratch: Path, tmp_path: Path
) -> None:
    job, entry = Job(accumulation=accumulation, clip=clip, checkpointing=checkpointing), ENTRIES[model]
    plain = plain_run(model, job, scratch)
    floor, need = sizes(model, memory, scratch)
    ours = entry.build()
    with in_groups(), on_pages(ours, memory, max(need // 2, floor), tmp_path) as engine:
        paged = run_trainer(ours, entry, job, tmp_path, paged=True)
        assert members(engine) > 1
        assert engine.pool.stats.evictions > 0
    assert_same(paged, plain)
