"""Decides when linked blocks are delinked by themselves: where the loss has begun to fall slowly."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 5
"""So many logged losses are averaged: each of them is the mean over the steps since the one before it."""
LEAST_FALL = 0.01
OF_TRAINING = 0.1
"""At the present pace, the loss has to fall by this part (`LEAST_FALL`) within so much of the training."""
LATEST = 0.5
"""The real model is trained for this part of the steps at least."""


def reason_to_delink(losses: Sequence[tuple[int, float]], step: int, steps: int) -> str | None:
    """Says why blocks should be delinked now; None if they should not.

    The mean of the last `WINDOW` losses is compared with that of as many before them.

    Args:
        losses: what was logged so far, as (step, loss).
        step: how many steps have been done.
        steps: how many there will be.
    """
    if step >= LATEST * steps:
        return f"{LATEST:.0%} of the {steps} steps are done"
    if len(losses) < 2 * WINDOW:
        return None
    before, now = losses[-2 * WINDOW : -WINDOW], losses[-WINDOW:]
    (began, first), (ended, last) = (
        [sum(column) / WINDOW for column in zip(*part, strict=True)] for part in (before, now)
    )
    fall = (first - last) / abs(first) if first else 0.0
    expected = fall * OF_TRAINING * steps / (ended - began) if ended > began else 0.0
    if expected >= LEAST_FALL:
        return None
    return (
        f"the loss went from {first:.4g} to {last:.4g} within {ended - began:.0f} steps, at which pace "
        f"{OF_TRAINING:.0%} of the training would lower it by {expected:.2%}, less than {LEAST_FALL:.0%}"
    )


def _mean(losses: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Returns the mean step and the mean loss."""
    return sum(step for step, _ in losses) / len(losses), sum(loss for _, loss in losses) / len(losses)
