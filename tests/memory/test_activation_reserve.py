"""The activation reserve: pages take what other memory leaves, and never more."""

from __future__ import annotations

import pytest

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory import activation_reserve as reserve_module
from ptm_accel.memory.activation_reserve import MARGIN, ActivationReserve, Shapes
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.units import MIB


@pytest.fixture(autouse=True)
def looking_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missed between two looks."""
    monkeypatch.setattr(reserve_module, "_LOOK_EVERY_S", 0.0)


class Reserved:
    """A card's memory whose use the test sets."""

    def __init__(self) -> None:
        self.beside = 0
        self.live_bytes = 0
        self.allowed = 0
        self.trims = 0

    def beside_bytes(self) -> int:
        return self.beside

    def confine(self, nbytes: int) -> None:
        self.allowed = nbytes

    def trim(self) -> None:
        self.trims += 1


def kept_free(nbytes: int) -> int:
    return int(nbytes * MARGIN)


def make(total: int = 1000 * MIB, least: int = 100 * MIB) -> tuple[ActivationReserve, Budget, Reserved]:
    budget, card = Budget(Tier.DEVICE, total), Reserved()
    return ActivationReserve(budget, total, least, card), budget, card  # type: ignore[arg-type]


def test_after_a_step_pages_get_what_was_left() -> None:
    reserve, budget, card = make()
    assert reserve.warming
    assert card.allowed == 100 * MIB
    card.beside = 400 * MIB
    reserve.sample()
    assert budget.capacity_bytes == 100 * MIB, "one step has not been seen whole yet"
    card.beside = 0
    reserve.end_step()
    assert budget.capacity_bytes == card.allowed == 1000 * MIB - kept_free(400 * MIB)
    assert not reserve.warming


def test_a_rising_activation_reserve_lowers_the_capacity_at_once_and_what_it_came_to_stays_free() -> None:
    reserve, budget, card = make()
    card.beside = 200 * MIB
    reserve.end_step()
    card.beside = 600 * MIB
    reserve.sample()
    assert budget.capacity_bytes == card.allowed == 1000 * MIB - kept_free(600 * MIB)
    card.beside = 100 * MIB
    for _ in range(3):
        # Slabs may have taken what the allocator had kept; the next step needs it all the same.
        reserve.end_step()
        assert budget.capacity_bytes == card.allowed == 1000 * MIB - kept_free(600 * MIB)


def test_what_torch_allocates_of_what_is_charged_is_left_free_and_is_no_part_of_the_mark() -> None:
    reserve, budget, card = make()
    card.beside = 400 * MIB
    reserve.end_step()
    left = 1000 * MIB - kept_free(400 * MIB)
    reserve.lend(50 * MIB)
    with budget.reserve(50 * MIB, Tag.GRAD, "gradients"):
        assert (budget.capacity_bytes, card.allowed) == (left, left - 50 * MIB)
        card.beside = 450 * MIB
        reserve.end_step()
        assert (budget.capacity_bytes, card.allowed) == (left, left - 50 * MIB)
        card.beside = 550 * MIB
        reserve.end_step()
        left = 1000 * MIB - kept_free(500 * MIB)
        assert (budget.capacity_bytes, card.allowed) == (left, left - 50 * MIB)
    reserve.lend(0)
    assert (budget.capacity_bytes, card.allowed) == (left, left)


def test_pages_get_the_least_beside_what_cannot_leave() -> None:
    budget, card, pinned = Budget(Tier.DEVICE, 1000 * MIB), Reserved(), [0]
    reserve = ActivationReserve(budget, 1000 * MIB, 100 * MIB, card, lambda: pinned[0])  # type: ignore[arg-type]
    shapes: Shapes = ((4, 128),)
    assert not reserve.knows(shapes, evaluates=False)
    pinned[0] = 300 * MIB
    reserve.begin_pass(shapes, evaluates=False)
    assert budget.capacity_bytes == card.allowed == 400 * MIB
    assert reserve.knows(shapes, evaluates=False)
    assert reserve.knows(shapes, evaluates=True)
    pinned[0] = 950 * MIB
    reserve.begin_pass(((4, 256),), evaluates=True)
    assert budget.capacity_bytes == card.allowed == 1000 * MIB
    assert not reserve.knows(((4, 256),), evaluates=False)


def test_asking_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [10.0], [0]
    monkeypatch.setattr(reserve_module.time, "perf_counter", lambda: clock[0])
    reserve, _, card = make()

    def beside() -> int:
        asked[0] += 1
        clock[0] += 1e-5
        return 0

    monkeypatch.setattr(card, "beside_bytes", beside)
    for _ in range(10000):
        clock[0] += 1e-5
        reserve.look()
    assert 90 <= asked[0] <= 100


def test_what_rises_by_little_is_met_out_of_the_margin_and_no_slab_goes_for_it() -> None:
    reserve, _, card = make()
    card.beside = 400 * MIB
    reserve.end_step()
    allowed = card.allowed
    for more in (4, 8, 12):
        card.beside = (400 + more) * MIB
        reserve.sample()
        assert card.allowed == allowed
    card.beside = 413 * MIB
    reserve.sample()
    assert card.allowed == 1000 * MIB - kept_free(413 * MIB)


def test_what_is_charged_and_is_torchs_to_allocate_is_not_counted_twice() -> None:
    """A gradient that arrives has room held for it; it is among activations, and was seen there."""
    reserve, budget, card = make()
    with budget.reserve(60 * MIB, Tag.GRAD, "the next gradient to arrive"):
        card.live_bytes, card.beside = 20 * MIB, 300 * MIB
        reserve.end_step()
    assert card.allowed == 1000 * MIB - kept_free(300 * MIB)
    assert budget.capacity_bytes == card.allowed + 40 * MIB
    reserve, budget, card = make()
    with budget.reserve(60 * MIB, Tag.GRAD, "the next gradient to arrive"):
        reserve.end_step()
    assert budget.capacity_bytes == card.allowed == 1000 * MIB, "never more than there is"


def test_what_is_expected_is_left_free_before_it_is_taken() -> None:
    reserve, budget, card = make()
    reserve.expect(200 * MIB)
    assert budget.capacity_bytes == 100 * MIB, "it is warming"
    card.beside = 100 * MIB
    reserve.end_step()
    assert budget.capacity_bytes == card.allowed == 1000 * MIB - kept_free(200 * MIB)
    reserve.expect(400 * MIB)
    reserve.expect(300 * MIB)
    assert reserve.trained_bytes == 400 * MIB
    assert budget.capacity_bytes == card.allowed == 1000 * MIB - kept_free(400 * MIB)


def test_an_activation_reserve_that_leaves_too_little_is_an_error_with_numbers() -> None:
    reserve, _, card = make()
    card.beside = 900 * MIB
    with pytest.raises(DeviceBudgetError, match=r" out of memory\..*took 900.00 MiB of 1000.00 MiB.*need 100.00 MiB"):
        reserve.end_step()


def test_pages_that_need_more_get_it() -> None:
    reserve, budget, card = make()
    reserve.need(300 * MIB)
    assert budget.capacity_bytes == card.allowed == 300 * MIB
    card.beside = 750 * MIB
    with pytest.raises(DeviceBudgetError, match=r"need 300\.00 MiB"):
        reserve.end_step()
    reserve.need(5000 * MIB)
    assert budget.capacity_bytes == 1000 * MIB


# ---- batches ---------------------------------------------------------------------------------------------------------


def trained(reserve: ActivationReserve, card: Reserved, shapes: Shapes, beside: int) -> bool:
    """A step with such a batch; returns whether pages had to leave for it."""
    lowered = begun(reserve, shapes)
    card.beside = beside
    reserve.end_step()
    return lowered


def begun(reserve: ActivationReserve, shapes: Shapes, *, evaluates: bool = False) -> bool:
    """Begins a pass; returns whether pages have to leave for it."""
    before = reserve._budget.capacity_bytes
    reserve.begin_pass(shapes, evaluates=evaluates)
    return reserve._budget.capacity_bytes < before


def test_a_batch_that_is_larger_than_all_before_it_has_the_room_of_a_first_step() -> None:
    reserve, budget, card = make()
    assert not trained(reserve, card, ((8, 512), (8, 512)), 200 * MIB), "pages have the least already"
    for shapes in (((8, 512), (8, 512)), ((8, 100), (8, 100)), ((3, 512), (3, 512))):
        assert not trained(reserve, card, shapes, 200 * MIB)
        assert budget.capacity_bytes == 1000 * MIB - kept_free(200 * MIB)
    for shapes in (((8, 513), (8, 513)), ((9, 512), (9, 512)), ((1, 1000),), ((100, 100),)):
        assert begun(reserve, shapes, evaluates=False), shapes
        assert budget.capacity_bytes == card.allowed == 100 * MIB
        card.beside = 300 * MIB
        reserve.sample()
        assert reserve.warming, "until the step has ended"
        reserve.end_step()
        assert budget.capacity_bytes == 1000 * MIB - kept_free(300 * MIB)
        assert not begun(reserve, shapes, evaluates=False)


def test_evaluation_needs_no_more_than_training_on_such_a_batch_but_the_reverse_is_not_true() -> None:
    reserve, budget, card = make()
    trained(reserve, card, ((8, 512),), 200 * MIB)
    assert not begun(reserve, ((8, 512),), evaluates=True)
    assert begun(reserve, ((64, 512),), evaluates=True)
    card.beside = 250 * MIB
    assert not begun(reserve, ((64, 512),), evaluates=True)
    assert budget.capacity_bytes == 1000 * MIB - kept_free(250 * MIB), "the pass before was seen whole"
    card.beside = 10 * MIB
    assert not begun(reserve, ((8, 512),))
    assert budget.capacity_bytes == 1000 * MIB - kept_free(200 * MIB), "as before the evaluation"
    assert begun(reserve, ((64, 512),), evaluates=False)


def test_a_model_that_is_only_evaluated_gets_what_its_first_pass_has_left() -> None:
    reserve, budget, card = make()
    assert not begun(reserve, ((8, 512),), evaluates=True)
    card.beside = 120 * MIB
    assert not begun(reserve, ((8, 512),), evaluates=True)
    assert budget.capacity_bytes == 1000 * MIB - kept_free(120 * MIB)


def test_an_evaluation_amid_a_first_step_is_not_the_end_of_it() -> None:
    reserve, budget, card = make()
    reserve.begin_pass(((8, 512),), evaluates=False)
    for _ in range(3):
        reserve.begin_pass(((64, 512),), evaluates=True)
        assert budget.capacity_bytes == 100 * MIB
    card.beside = 300 * MIB
    reserve.end_step()
    assert budget.capacity_bytes == 1000 * MIB - kept_free(300 * MIB)


def test_text_that_grows_a_token_at_a_time_keeps_pages_where_they_are() -> None:
    reserve, budget, card = make()
    moved_away = 0
    for length in range(100, 200):
        card.beside = length * MIB
        reserve.begin_pass(((1, 1), (1, length)), evaluates=True)
        moved_away += budget.capacity_bytes == 100 * MIB
    assert moved_away == 6, "by an eighth each time, not by a token"
