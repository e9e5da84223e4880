"""The heap beside the budget: what it keeps is taken off, or given back."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.glibc import Glibc, HeapUse, Trimmer
from ptm_accel.memory.heap import Freed, HeapTide
from tests.tiers import open_memory

MIB = 1 << 20


@dataclass
class Played:
    """A heap that holds what it is told to; of that, all takes memory but what was given back, until it is used."""

    held: int = 10 * MIB
    live: int = 10 * MIB
    mapped: int = 0
    looks: int = 0
    given_back: int = 0
    others: int = 0
    sticks: bool = False
    asked: int = 0
    tells_resident: bool = True
    calls: list[str] = field(default_factory=list)

    def use(self) -> HeapUse:
        self.looks += 1
        return HeapUse(self.held, self.live)

    def end(self) -> int:
        return self.held - self.mapped

    def resident(self) -> int:
        self.asked += 1
        return self.held - self.given_back

    def anonymous(self) -> int:
        return self.held - self.given_back + self.others

    def give_back(self) -> None:
        self.calls.append("give back")

    def keep(self, *, large: bool) -> None:
        self.calls.append("keep all" if large else "keep")

    def let_be(self) -> None:
        self.calls.append("let be")

    def trim(self) -> None:
        self.calls.append("trim")
        if not self.sticks:
            self.given_back = self.held - self.live


def make(least: int = 100 * MIB) -> tuple[Budget, Played, HeapTide]:
    budget, heap = Budget(Tier.HOST, 1000 * MIB), Played()
    return budget, heap, HeapTide(budget, least, heap)


def first_step(heap: Played, tide: HeapTide, live: int) -> None:
    heap.live += live
    heap.held += live
    tide.sample()
    heap.live -= live
    heap.held -= live
    tide.end_step()


def test_the_first_step_is_watched_and_then_blocks_are_kept() -> None:
    budget, heap, tide = make()
    assert (heap.calls, tide.freed) == (["give back"], Freed.WATCHED)
    first_step(heap, tide, 300 * MIB)
    assert (heap.calls, tide.freed) == (["give back", "keep"], Freed.KEPT)
    assert budget.capacity_bytes == 843.75 * MIB, "half of what lived is expected in holes"
    heap.held += 340 * MIB
    steps(tide, 4)
    assert budget.capacity_bytes == 843.75 * MIB, "40 MiB of holes were seen, but the heap may still grow"
    steps(tide, 1)
    assert budget.capacity_bytes == 953.125 * MIB, "rounded up: three 64ths"
    heap.held += 5 * MIB
    steps(tide, 9)
    assert budget.capacity_bytes == 953.125 * MIB, "not worth a new plan"
    assert tide.total_bytes == 1000 * MIB


def steps(tide: HeapTide, count: int) -> None:
    for _ in range(count):
        tide.end_step()


def test_holes_are_taken_off_as_soon_as_they_are_there() -> None:
    budget, heap, tide = make()
    first_step(heap, tide, 300 * MIB)
    heap.held += 500 * MIB
    tide.sample()
    assert budget.capacity_bytes == 796.875 * MIB, "in the middle of a step, with the charge that follows"
    heap.held += 8 * MIB
    heap.mapped += 8 * MIB
    tide.sample()
    assert budget.capacity_bytes == 796.875 * MIB, "what is mapped is looked at now and then"


def test_a_heap_that_is_steady_is_looked_at_less_often() -> None:
    _, heap, tide = make()
    first_step(heap, tide, 300 * MIB)

    def looks_in(charges: int) -> int:
        before = heap.looks
        for _ in range(charges):
            tide.sample()
        return heap.looks - before

    assert looks_in(256) == 32
    steps(tide, 5)
    assert looks_in(256) == 2
    heap.held += 2 * MIB
    assert looks_in(1) == 1, "its end has moved"
    heap.held += 400 * MIB
    steps(tide, 1)
    assert looks_in(256) == 32, "it has grown: it is no longer steady"


def test_of_holes_that_grow_too_large_in_a_step_less_is_kept_from_there_on() -> None:
    budget, heap, tide = make()
    first_step(heap, tide, 300 * MIB)
    heap.held += 700 * MIB
    tide.sample()
    assert (heap.calls[-1], tide.freed, budget.capacity_bytes) == ("trim", Freed.TRIMMED, 875 * MIB)


def test_a_charge_moves_away_what_holes_have_taken(tmp_path: Path) -> None:
    memory = open_memory("host+disk", 8 * MIB, tmp_path)
    heap = Played()
    tide = memory.pool.room.tide = HeapTide(memory.pool.budget, MIB, heap)
    first_step(heap, tide, 4 * MIB)
    assert memory.pool.budget.capacity_bytes == 6 * MIB
    tensors = [memory.pool.create(f"w{i}", Tag.PARAM, torch.Size([MIB // 4]), torch.float32) for i in range(6)]
    for tensor in tensors[:5]:
        memory.pool.fault(tensor)
    # Two of holes: of the four of the first step, the heap holds what it held then and two more.
    heap.held += int(6.5 * MIB)
    memory.pool.fault(tensors[5])
    memory.pool.room.collect()
    assert memory.pool.budget.capacity_bytes == 5.5 * MIB
    assert memory.pool.budget.used_bytes <= memory.pool.budget.capacity_bytes
    memory.check_integrity()
    memory.close()


def test_more_that_lives_is_no_hole() -> None:
    budget, heap, tide = make()
    first_step(heap, tide, 200 * MIB)
    heap.live += 500 * MIB
    heap.held += 500 * MIB
    for _ in range(8):
        tide.sample()
    steps(tide, 5)
    assert budget.capacity_bytes == 1000 * MIB


@pytest.mark.parametrize("least", [990 * MIB, 1100 * MIB])
def test_where_holes_would_take_too_much_blocks_go_on_being_given_back(least: int) -> None:
    budget, heap, tide = make(least)
    first_step(heap, tide, 700 * MIB)
    assert (heap.calls, tide.freed) == (["give back", "give back"], Freed.GIVEN_BACK)
    tide.end_step()
    assert heap.calls == ["give back", "give back"], "that is settled"
    assert budget.capacity_bytes == 1000 * MIB


def test_where_it_is_not_told_what_takes_memory_blocks_go_on_being_given_back() -> None:
    budget, heap, tide = make()
    heap.tells_resident = False
    first_step(heap, tide, 700 * MIB)
    assert (heap.calls[-1], tide.freed, budget.capacity_bytes) == ("give back", Freed.GIVEN_BACK, 1000 * MIB)


@pytest.mark.parametrize(
    ("live", "least", "left"), [(700 * MIB, 100 * MIB, 875 * MIB), (300 * MIB, 900 * MIB, 900 * MIB)]
)
def test_where_holes_would_take_too_much_they_are_given_back_when_they_are_many(
    live: int, least: int, left: int
) -> None:
    budget, heap, tide = make(least)
    first_step(heap, tide, live)
    assert (heap.calls, tide.freed, budget.capacity_bytes) == (["give back", "keep"], Freed.TRIMMED, left)
    steps(tide, 9)
    assert (heap.calls, budget.capacity_bytes) == (["give back", "keep"], left), "that is settled"


def trimmed(least: int = 100 * MIB) -> tuple[Budget, Played, HeapTide]:
    """Of 1000 MiB 125 are taken off; 700 MiB are what lives at the peak."""
    budget, heap, tide = make(least)
    first_step(heap, tide, 700 * MIB)
    assert tide.freed is Freed.TRIMMED
    return budget, heap, tide


def use(tide: HeapTide, times: int) -> None:
    for _ in range(times):
        tide.sample()
        assert not tide.glance()


def test_the_heap_stays_within_what_lives_at_its_peak_and_what_is_off_the_budget() -> None:
    budget, heap, tide = trimmed()
    heap.live += 100 * MIB
    heap.held += 820 * MIB
    use(tide, 8)
    assert heap.calls[-1] == "keep", "720 MiB of holes, and yet no more than the peak and a part of the 125"
    heap.held += 10 * MIB
    use(tide, 8)
    assert (heap.calls[-1], heap.calls.count("trim")) == ("trim", 1)
    heap.given_back -= 720 * MIB
    use(tide, 8)
    assert heap.calls.count("trim") == 1, "what was given back is used again, and it is not yet too much"
    heap.given_back = 0
    use(tide, 8)
    assert heap.calls.count("trim") == 2
    assert (tide.freed, budget.capacity_bytes) == (Freed.TRIMMED, 875 * MIB), "no new plan for any of it"


def test_what_takes_memory_is_asked_for_when_the_process_has_grown_beside_pages() -> None:
    budget, heap, tide = trimmed()
    asked = heap.asked
    use(tide, 50)
    assert heap.asked == asked
    heap.others += 870 * MIB
    with budget.reserve(870 * MIB, Tag.PARAM, "w"):
        use(tide, 50)
    assert heap.asked == asked, "that was pages"
    use(tide, 50)
    assert heap.asked == asked + 1, "somebody else's: looked for in the heap once"
    assert heap.calls[-1] == "keep"


def test_a_peak_that_is_higher_than_the_first_is_no_reason_to_give_back() -> None:
    _, heap, tide = trimmed()
    heap.live += 900 * MIB
    heap.held += 900 * MIB
    use(tide, 8)
    heap.live -= 900 * MIB
    heap.held += 100 * MIB
    use(tide, 8)
    assert heap.calls[-1] == "keep"
    heap.held += 50 * MIB
    use(tide, 8)
    assert heap.calls[-1] == "trim"


def test_what_cannot_be_given_back_is_not_looked_for_each_time() -> None:
    _, heap, tide = trimmed()
    heap.sticks = True
    heap.held += 900 * MIB
    use(tide, 100)
    assert heap.calls.count("trim") == 1
    heap.held += 40 * MIB
    use(tide, 100)
    assert heap.calls.count("trim") == 2


def test_pages_that_need_more_get_it_from_what_is_off_the_budget() -> None:
    budget, heap, tide = trimmed()
    tide.need(950 * MIB)
    assert (tide.freed, budget.capacity_bytes) == (Freed.TRIMMED, 950 * MIB)
    tide.resize(2000 * MIB)
    assert (tide.freed, budget.capacity_bytes) == (Freed.TRIMMED, 1750 * MIB)
    tide.resize(1000 * MIB)
    tide.need(990 * MIB)
    assert (heap.calls[-1], tide.freed, budget.capacity_bytes) == ("give back", Freed.GIVEN_BACK, 1000 * MIB)
    tide.need(1100 * MIB)
    tide.resize(900 * MIB)
    assert (tide.freed, budget.capacity_bytes) == (Freed.GIVEN_BACK, 900 * MIB)


@pytest.mark.parametrize(("live", "least"), [(700 * MIB, 990 * MIB), (300 * MIB, 990 * MIB)])
def test_what_is_settled_in_the_first_step_is_not_looked_for(live: int, least: int) -> None:
    """A look goes through all holes: one is for what lives, then one in 16 charges is for holes to give back."""
    budget, heap, tide = make(least)
    heap.live += live
    heap.held += live
    begin = heap.looks
    for _ in range(64):
        tide.sample()
    assert heap.looks - begin == 1 + 64 // 16
    tide.end_step()
    assert (heap.calls[-1], tide.freed, budget.capacity_bytes) == ("give back", Freed.GIVEN_BACK, 1000 * MIB)


def test_one_look_in_the_first_step_is_for_what_lives_and_for_holes() -> None:
    _, heap, tide = make()
    begin = heap.looks
    for _ in range(32):
        tide.sample()
    assert heap.looks - begin == 32
    heap.held += 20 * MIB
    for _ in range(16):
        tide.sample()
    assert heap.calls == ["give back", "give back"]


def test_holes_that_grow_too_large_end_it() -> None:
    budget, heap, tide = make()
    first_step(heap, tide, 300 * MIB)
    heap.held += 700 * MIB
    tide.end_step()
    assert (heap.calls[-1], tide.freed, budget.capacity_bytes) == ("trim", Freed.TRIMMED, 875 * MIB)


def test_an_optimizer_that_needs_the_room_ends_it() -> None:
    budget, heap, tide = make()
    first_step(heap, tide, 300 * MIB)
    tide.need(800 * MIB)
    assert tide.freed is Freed.KEPT
    tide.need(900 * MIB)
    assert (tide.freed, budget.capacity_bytes) == (Freed.TRIMMED, 900 * MIB)
    tide.need(995 * MIB)
    assert (heap.calls[-1], tide.freed, budget.capacity_bytes) == ("give back", Freed.GIVEN_BACK, 1000 * MIB)


def test_pages_that_have_no_room_left_get_that_of_the_holes(tmp_path: Path) -> None:
    memory = open_memory("host+disk", 4 * MIB, tmp_path)
    heap = Played()
    tide = memory.pool.room.tide = HeapTide(memory.pool.budget, MIB, heap)
    first_step(heap, tide, MIB)
    assert memory.pool.budget.capacity_bytes == 7 * MIB // 2
    with memory.pool.room.reserve(3 * MIB, Tag.PARAM, "a region"):
        with memory.pool.room.reserve(MIB - 8192, Tag.PARAM, "its end"):
            assert (heap.calls[-1], tide.freed) == ("give back", Freed.GIVEN_BACK)
        with pytest.raises(BudgetError, match=r"3.01 MiB of 4.00 MiB are in use"):
            memory.pool.room.reserve(2 * MIB, Tag.PARAM, "too much")
    memory.close()


def test_charges_are_no_business_of_it() -> None:
    budget, heap, tide = make()
    with budget.reserve(500 * MIB, Tag.PARAM, "w"):
        first_step(heap, tide, 300 * MIB)
        assert budget.used_bytes == 500 * MIB


RESIDENT = """
import psutil, torch
from ptm_accel.memory.glibc import Glibc
heap, process = Glibc(), psutil.Process()
def work():
    kept = [torch.ones(1 << 18) for _ in range(100)]
    most = heap.use()
    return most
heap.give_back()
work()
before, begin = process.memory_info().rss, heap.use()
live = work().live - begin.live
given_back = process.memory_info().rss - before
heap.keep(large=False)
work()
kept = process.memory_info().rss - before
held = heap.use().held - begin.held
heap.give_back()
after = process.memory_info().rss - before
heap.keep(large=False)
work()
resident, anonymous = heap.resident(), heap.anonymous()
heap.trim()
print(live, given_back, kept, held, after, resident - heap.resident(), anonymous - heap.anonymous())
"""


@pytest.mark.skipif(not Glibc.found(), reason="another C library")
def test_blocks_are_kept_and_given_back_as_the_heap_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    live, given_back, kept, held, after, trimmed, shrunk = (int(word) for word in done.stdout.split())
    assert 100 * MIB <= live < 105 * MIB
    assert given_back < 8 * MIB
    assert kept > 95 * MIB
    assert 100 * MIB < held < 110 * MIB
    assert after < 8 * MIB
    assert trimmed > 95 * MIB
    assert abs(shrunk - trimmed) < 8 * MIB


TORN = """
import sys, torch
from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.memory.glibc import Glibc
from ptm_accel.memory.heap import Freed, HeapTide
heap = Glibc()
tide = HeapTide(Budget(Tier.HOST, 256 << 20), 1 << 20, heap)
begin = heap.resident()
def ones(mib):
    tide.sample()
    return torch.ones(int(mib * 2**20) // 4)
whole = [ones(1) for _ in range(300)]
del whole
tide.end_step()
assert tide.freed is Freed.TRIMMED, tide.freed
if sys.argv[1] == "never":
    heap.trim = lambda: None
torn = [ones(0.5) for _ in range(600)]
del torn[::2]
larger = [ones(1) for _ in range(150)]
print(max(heap.resident() - begin, 0))
"""


@pytest.mark.skipif(not Glibc.found(), reason="another C library")
@pytest.mark.parametrize(("trims", "least", "most"), [("as they are many", 295, 300 + 32 + 16), ("never", 440, 480)])
def test_holes_that_nothing_fits_into_take_no_memory_beyond_the_peak(trims: str, least: int, most: int) -> None:
    """300 MiB live at the peak of the first step, and again, but between 150 MiB of holes of half a MiB each."""
    done = subprocess.run([sys.executable, "-c", TORN, trims], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert least * MIB < int(done.stdout) < most * MIB


def test_another_budget_keeps_what_holes_take_of_it() -> None:
    budget, heap, tide = make()
    first_step(heap, tide, 300 * MIB)
    taken = 1000 * MIB - budget.capacity_bytes
    tide.resize(640 * MIB)
    assert (tide.total_bytes, budget.capacity_bytes) == (640 * MIB, 640 * MIB - 150 * MIB)
    assert tide.freed is Freed.KEPT
    for _ in range(20):
        tide.resize(1000 * MIB)
    assert budget.capacity_bytes == 1000 * MIB - taken, "it does not creep"


def test_a_budget_that_holes_would_take_too_much_of_has_them_given_back() -> None:
    budget, heap, tide = make()
    first_step(heap, tide, 300 * MIB)
    tide.resize(300 * MIB)
    assert (budget.capacity_bytes, tide.freed) == (262.5 * MIB, Freed.TRIMMED)
    tide.resize(110 * MIB)
    assert (budget.capacity_bytes, tide.freed, heap.calls[-1]) == (110 * MIB, Freed.GIVEN_BACK, "give back")
    tide.resize(800 * MIB)
    assert budget.capacity_bytes == 800 * MIB


def test_a_glance_sees_what_grew_while_nothing_was_charged() -> None:
    budget, heap, tide = make()
    assert not tide.glance(), "blocks are not kept yet"
    first_step(heap, tide, 300 * MIB)
    before = budget.capacity_bytes
    heap.held += 3 * MIB
    assert not tide.glance()
    heap.held += 500 * MIB
    assert tide.glance()
    assert budget.capacity_bytes < before
    heap.held += 400 * MIB
    assert not tide.glance(), "too much is given back: there is more for pages again"
    assert (budget.capacity_bytes, tide.freed) == (875 * MIB, Freed.TRIMMED)


@pytest.mark.parametrize("begun", ["by loading", "by a step"])
def test_a_heap_full_of_holes_is_trimmed_again_and_again(begun: str) -> None:
    _, heap, tide = make()
    if begun == "by a step":
        tide.need(995 * MIB)
        first_step(heap, tide, 300 * MIB)
        assert tide.freed is Freed.GIVEN_BACK
        heap.held += 900 * MIB
    else:
        heap.held += 900 * MIB
    before = heap.calls.count("give back")
    for _ in range(20):
        tide.sample()
        assert not tide.glance()
    assert heap.calls.count("give back") == before + 2, "every 16 charges and reads"
    heap.live = heap.held - 16 * MIB
    for _ in range(20):
        tide.sample()
    assert heap.calls.count("give back") == before + 2, "few holes are not worth it"


def test_one_watch_for_the_process() -> None:
    gc.collect()
    assert not HeapTide.watching()
    _, heap, tide = make()
    assert HeapTide.watching()
    first_step(heap, tide, 300 * MIB)
    tide.close()
    assert not HeapTide.watching()
    assert (tide.freed, heap.calls[-2:]) == (Freed.GIVEN_BACK, ["give back", "let be"])


class Counted(Glibc):
    """Counts trims, and does them."""

    trims = 0

    def trim(self) -> None:
        super().trim()
        self.trims += 1


LARGE = """
import os, resource, torch
from ptm_accel.memory.glibc import Glibc
heap = Glibc()
def faults():
    for _ in range(32):
        torch.ones(8 << 18)
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.ones(8 << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin
for how in (lambda: heap.keep(large=False), lambda: heap.keep(large=True), heap.give_back, heap.let_be):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    else:
        how()
        print(faults(), flush=True)
        os._exit(0)
"""


@pytest.mark.skipif(not Glibc.found(), reason="another C library")
def test_large_blocks_that_are_kept_are_not_cleared_again() -> None:
    """Blocks of 8 MiB, 2048 pages each. Each way in a process of its own: blocks are served from the holes of another.

    The first few are of new memory each: they are aligned, what is cut off them is kept for small ones, up to seven of
    a size in each thread, and the hole that is left is too small for the next by so much (glibc before 2.38).
    """
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    small, large, back, by_itself = (int(word) for word in done.stdout.split())
    assert min(small, back) > 50 * 1000
    assert max(large, by_itself) < 50 * 100


@pytest.mark.skipif(not Glibc.found(), reason="another C library")
def test_what_passes_is_given_back_every_so_many_bytes() -> None:
    heap = Counted()
    trimmer = Trimmer(heap, 100)
    counts = []
    for nbytes in (60, 40, 1, 99, 1, 1, 500, 0):
        trimmer.passed(nbytes)
        counts.append(heap.trims)
    assert counts == [0, 0, 1, 1, 1, 2, 3, 3]
