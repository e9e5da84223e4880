"""When blocks are delinked by themselves."""

from __future__ import annotations

import math

from ptm_accel.recipes.slowing import reason_to_delink


def logged(steps: int, halves_in: float, every: int = 10) -> list[tuple[int, float]]:
    """An exponential fall towards 2."""
    return [(step, 2 + 3 * math.exp(-step / halves_in)) for step in range(every, steps + 1, every)]


def test_a_loss_that_falls_is_left_to_fall() -> None:
    assert reason_to_delink(logged(300, 500.0), 300, 1000) is None


def test_a_loss_that_falls_slowly_is_a_reason() -> None:
    reason = reason_to_delink(logged(400, 50.0), 400, 1000)
    assert reason is not None
    assert "less than 1%" in reason


def test_too_few_losses_are_no_reason() -> None:
    assert reason_to_delink(logged(90, 5.0), 90, 1000) is None


def test_a_loss_that_rises_is_a_reason() -> None:
    assert reason_to_delink([(step, float(step)) for step in range(1, 11)], 10, 1000) is not None


def test_half_of_the_training_is_the_latest() -> None:
    assert reason_to_delink([], 499, 1000) is None
    assert reason_to_delink([], 500, 1000) == "50% of the 1000 steps are done"
