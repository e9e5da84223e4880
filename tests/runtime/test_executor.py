"""What happens at an access: the pending update, the plan of the pass, the block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.runtime.executor import Executor
from tests.tiers import evict_and_wait, memory_of

ELEMENTS = 1024


class Told:
    """A plan and pending updates that keep what they are told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, Place]] = []

    def _note(self, what: str, block: Block) -> None:
        self.told.append((what, block.name, block.place))

    def accessed(self, block: Block, *, write: bool) -> None:
        self._note("write" if write else "read", block)

    def awaited(self, block: Block) -> None:
        self._note("awaited", block)

    def created(self, block: Block) -> None:
        self._note("created", block)

    def before_use(self, block: Block) -> None:
        self._note("update", block)

    def elsewhere(self, block: Block) -> bool:
        return False

    def finish(self) -> None:
        self.told.append(("finish", "", Place.BLANK))

    def give_way(self) -> bool:
        self.told.append(("give way", "", Place.BLANK))
        return False

    def give_up(self) -> None:
        self.told.append(("give up", "", Place.BLANK))


def block(executor: Executor, name: str) -> Block:
    return executor.pool.create(name, Tag.PARAM, torch.Size([ELEMENTS]), torch.float32)


def test_own_work_within_own_work_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_of(2, tmp_path) as memory:
        executor, stats = Executor(memory.pool), memory.pool.stats
        now = iter([0.0, 1.0, 3.0, 3.0, 8.0, 10.0])
        monkeypatch.setattr("time.perf_counter", lambda: next(now))
        with executor.own_work():
            with executor.own_work():
                pass
            with memory.pool.traffic.stalled():
                pass
        assert (stats.own_s, stats.stall_s, stats.elsewhere_s) == (5.0, 5.0, 10.0)


def test_the_plan_is_told_of_accesses_but_for_those_of_updates(tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        executor = Executor(memory.pool)
        a, b, c = (block(executor, name) for name in "abc")
        for each in (a, b):
            executor.fault(each, write=True).fill_(1.0)
        plan = executor.plan = Told()
        executor.fault(c, write=True)
        assert (a.place, b.place) == (Place.AWAY, Place.DIRTY)
        executor.adopt(block(executor, "d"), torch.ones(ELEMENTS))
        executor.make(block(executor, "e"))
        with executor.aside():
            executor.fault(a)
        executor.pin(a).release()
        assert plan.told == [
            ("write", "c", Place.BLANK),
            ("created", "d", Place.BLANK),
            ("created", "e", Place.BLANK),
            ("read", "a", Place.CLEAN),
        ]


def test_who_waits_for_a_load_has_the_plan_told_once_it_has_begun(tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        executor = Executor(memory.pool)
        a = block(executor, "a")
        executor.fault(a, write=True).fill_(1.0)
        evict_and_wait(memory.pool, a)
        plan = executor.plan = Told()
        executor.pin(a).release()
        assert plan.told == [("read", "a", Place.AWAY), ("awaited", "a", Place.ARRIVING)]
        assert a.place is Place.CLEAN


def test_pending_updates_come_before_all_uses(tmp_path: Path) -> None:
    with memory_of(3, tmp_path) as memory:
        executor = Executor(memory.pool)
        a = block(executor, "a")
        executor.fault(a, write=True).fill_(2.0)
        pending = executor.pending_updates = executor.plan = Told()
        executor.fault(a)
        assert [what for what, *_ in pending.told] == ["update", "read"]
        pending.told.clear()
        executor.update_first(a)
        executor.snapshot(a)
        executor.adopt(block(executor, "b"), torch.ones(ELEMENTS))
        assert [what for what, *_ in pending.told] == ["update", "finish", "update", "created"]
        pending.told.clear()
        memory.pool.fault(a)
        assert not pending.told, "updates use the pool itself"
        executor.forget(a)
        assert [what for what, *_ in pending.told] == ["update"]


def test_pending_updates_give_way_where_nothing_else_can_leave_and_end_with_the_pool(tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        executor = Executor(memory.pool)
        pending = executor.pending_updates = Told()
        assert not memory.pool.admission.evict_one()
        memory.pool.close()
        assert [what for what, *_ in pending.told] == ["give way", "give up"]
        assert executor.pending_updates is None
