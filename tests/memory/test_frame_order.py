"""Which page leaves host frames: the one whose next use is farthest, once a step has been seen."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest

from ptm_accel.memory.frame_order import FrameOrder
from ptm_accel.memory.frame_pages import FrameHandle, Page
from tests.memory.test_host_store import PAGE, Setup


def steps_of(order: Sequence[int], frames: int, steps: int, *, learns: bool = True) -> list[int]:
    """The reads from disk of each step that loads and then stores pages in an order, with so many frames."""
    s = Setup(pages=frames, slots=2 * len(set(order)))
    handles = [s.new(1, f"p{number}") for number in range(max(order) + 1)]
    for number, handle in enumerate(handles):
        s.store(handle, number)
    reads = []
    for _ in range(steps):
        before = s.disk.reads
        for number in order:
            assert (s.load(handles[number]) == number).all()
            s.store(handles[number], number)
        reads.append(s.disk.reads - before)
        if learns:
            s.backing.end_step(s)
    s.close()
    return reads


def least_reads(order: Sequence[int], frames: int, steps: int) -> float:
    """Reads of a step by Belady's rule, which knows the future: the plainest twin."""
    uses, framed, reads = [*order] * steps, set(order[:frames]), 0
    for at, page in enumerate(uses):
        if page in framed:
            continue
        reads += 1
        if len(framed) == frames:
            ahead = uses[at + 1 :]
            framed.remove(max(framed, key=lambda each: ahead.index(each) if each in ahead else len(uses)))
        framed.add(page)
    return reads / steps


def test_a_cyclic_pass_reads_what_there_is_no_frame_for() -> None:
    order = range(12)
    assert steps_of(order, 10, 6, learns=False)[-1] == 12
    # In each step two pages have no frame, and one changes place with the page that is used last.
    assert sum(steps_of(order, 10, 12)[2:]) <= 10 * 3


@pytest.mark.parametrize("seed", range(6))
def test_it_comes_close_to_belady(seed: int) -> None:
    rng = random.Random(seed)
    # Parameters are used in both directions, and optimizer state once.
    parameters = [*range(8), *reversed(range(8))]
    order = [*parameters, *(number for number in range(8, 20))]
    rng.shuffle(order)
    reads = steps_of(order, 12, 12)
    best = least_reads(order, 12, 12)
    assert sum(reads[2:]) / len(reads[2:]) <= best * 1.15 + 0.5


def test_a_step_that_differs_costs_reads_and_nothing_else() -> None:
    rng = random.Random(1)
    s = Setup(pages=6, slots=24)
    handles = [s.new(1, f"p{number}") for number in range(12)]
    values = dict.fromkeys(handles, 0)
    for handle in handles:
        s.store(handle, 0)
    for _ in range(8):
        for handle in rng.choices(handles, k=20):
            assert (s.load(handle) == values[handle]).all()
            if rng.random() < 0.5:
                values[handle] = rng.randrange(200)
                s.store(handle, values[handle])
        s.backing.end_step(s)
        s.backing.check_integrity()
    s.close()


def test_a_gradient_is_known_by_its_name() -> None:
    s = Setup(pages=3, slots=8)
    weights = [s.new(1, f"w{number}") for number in range(3)]
    for handle in weights:
        s.store(handle, 1)

    def step() -> None:
        for number, handle in enumerate(weights):
            s.load(handle)
            gradient = s.new(1, f"w{number}.grad")
            s.store(gradient, 2)
            s.load(gradient)
            s.backing.free(gradient)
        s.backing.end_step(s)

    for _ in range(3):
        step()
    before = s.disk.reads
    step()
    # A gradient's frame is the only one that changes hands; no page of a gradient is ever on the disk.
    assert s.disk.reads - before <= 2
    s.close()


@pytest.mark.parametrize("together", [False, True])
def test_two_models_may_end_steps(together: bool) -> None:
    """Each step of one was taken for a step of both: what the other had used in its own was not known."""
    s = Setup(pages=16, slots=60)
    models = (FrameOrder(), FrameOrder())
    handles = [[s.new(1, f"{model}.p{number}") for number in range(12)] for model in range(2)]
    for handle in (*handles[0], *handles[1]):
        s.store(handle, 1)

    def backward(own: list[FrameHandle]) -> None:
        for handle in (*own[:6], *reversed(own[:6])):
            s.load(handle)

    def update(model: object, own: list[FrameHandle]) -> None:
        s.backing.end_step(model)
        for handle in own[6:]:
            s.load(handle)
            s.store(handle, 1)

    before = 0
    for number in range(10):
        before = s.disk.reads if number == 3 else before
        for model, own in zip(models, handles, strict=True):
            backward(own)
            if not together:
                update(model, own)
        for model, own in zip(models, handles, strict=True) if together else ():
            update(model, own)
    # Eight of 24 pages have no frame.
    assert (s.disk.reads - before) / 7 <= 8 * 1.15 + 0.5
    s.close()


def test_steps_are_those_of_another_model_when_one_trains_no_longer() -> None:
    order, (first, second) = FrameOrder(), pages_of(2)
    one, other = FrameOrder(), FrameOrder()
    order.learns = True
    for page in (first, second):
        order.add(page)
    order.use(first)
    order.end_step(one)
    for _ in range(10):
        order.use(second)
        order.use(first)
        order.end_step(other)
    assert list(order.leaving(None)) == [first, second]


@pytest.mark.parametrize("trained", [False, True])
def test_uses_without_steps_do_not_pile_up(trained: bool) -> None:
    order, pages = FrameOrder(), pages_of(4)
    order.learns = True
    for page in pages:
        order.add(page)
        order.use(page)
    if trained:
        order.end_step(order)
    expected = [*reversed(pages)] if trained else pages
    sizes = []
    for _ in range(3):
        for _ in range(1000):
            for page in pages:
                order.use(page)
        assert list(order.leaving(None)) == expected
        sizes.append(sys.getsizeof(order._farthest) + sum(map(sys.getsizeof, order._seen.values())))
    assert sizes[2] == sizes[0]
    # That was no step: what is known of one stays.
    order.end_step(order)
    assert list(order.leaving(None)) == expected
    assert not order._seen


def test_a_page_that_ctrl_c_has_left_out_may_leave() -> None:
    order, pages = FrameOrder(), pages_of(3)
    order.learns = True
    for page in pages:
        order.add(page)
        order.use(page)
    order.end_step(order)
    # Its new place was not noted any more.
    pages[1].due += 1
    assert list(order.leaving(None)) == [pages[2], pages[0], pages[1]]


def pages_of(count: int) -> list[Page]:
    pages = []
    for number in range(count):
        handle = FrameHandle(PAGE, None, f"p{number}")  # type: ignore[arg-type]
        handle.pages.append(Page(handle, PAGE, object()))  # type: ignore[arg-type]
        pages += handle.pages
    return pages


def test_nothing_is_noted_before_a_page_had_to_leave() -> None:
    order, (first, second) = FrameOrder(), pages_of(2)
    for page in (first, second):
        order.add(page)
        order.use(page)
    order.use(first)
    order.end_step(order)
    assert list(order.leaving(None)) == [second, first]
    assert first.due == second.due == 0


def test_all_that_may_leave_is_met_once_and_stays_in_order() -> None:
    order, pages = FrameOrder(), pages_of(5)
    order.learns = True
    for _ in range(3):
        for page in pages:
            if page not in list(order):
                order.add(page)
            order.use(page)
        order.end_step(order)
    order.use(pages[0])
    expected = [pages[0], *reversed(pages[1:])]
    assert list(order.leaving(None)) == expected
    assert list(order.leaving(None)) == expected
    assert list(order.leaving(pages[3].handle)) == [page for page in expected if page is not pages[3]]
    pages[4].holds = 1
    assert next(iter(order.leaving(pages[0].handle))) is pages[3]
    order.remove(pages[3])
    assert list(order.leaving(None)) == [pages[0], pages[2], pages[1]]
