"""The section of a model card that says how the model was trained on pages."""

from __future__ import annotations

from pathlib import Path

from ptm_accel import __version__
from ptm_accel.engine import Engine
from ptm_accel.units import format_bytes

HEADING = "## Memory"


def add_section(card: Path, engine: Engine) -> None:
    """Adds it to a card that has just been written.

    Args:
        card: a README.md.
        engine: the model's.
    """
    peaks = engine.metrics.peaks()
    rows = "\n".join(
        f"| {tier.value} | {format_bytes(engine.metrics.limit_bytes(tier))} | {format_bytes(peaks.get(tier, 0))} |"
        for tier in engine.memory.budgets
    )
    text = (
        f"\n{HEADING}\n\n"
        f"Trained with ptm_accel {__version__}: parameters, gradients and optimizer state on pages, which changes no "
        f"number. All in memory would have taken {format_bytes(engine.floor.whole_bytes)}.\n\n"
        f"| tier | allowed | used at most |\n| --- | --- | --- |\n{rows}\n"
    )
    card.write_text(card.read_text(encoding="utf-8").rstrip() + "\n" + text, encoding="utf-8")
