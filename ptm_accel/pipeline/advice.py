"""The scheme of a pipeline for a model on this machine, by what a stage is measured to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ptm_accel.errors import ConfigError
from ptm_accel.pipeline.cost import Cost, measure
from ptm_accel.pipeline.scheme import Scheme, best_scheme, pipeline_seconds, times_of
from ptm_accel.pipeline.stage import Stage, shifted

_LEAST_TOKENS = 32
_LENGTHS = 5
"""How many lengths of slices are measured, each half of the one above it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Forecast of a pipeline's step, by eq. 5 of TeraPipe.

    Attributes:
        scheme: the best, in rows and slices of tokens.
        rows_s: of the best scheme of whole sequences.
        whole_s: of the whole batch in one piece.
        bound_s: if no stage ever waited: no scheme takes less.
    """

    scheme: Scheme
    rows_s: float
    whole_s: float
    bound_s: float


def advise(stage: Stage, *, rows: int, length: int, stages: int, vocabulary: int, grain: int = 8) -> Advice:
    """Measures a stage, and finds how a batch is best cut for a pipeline of such stages.

    Args:
        stage: a stage with as many layers as the others; the only one, so that it takes tokens and makes a loss.
        rows: of the batch.
        length: tokens of a row.
        stages: of the pipeline.
        vocabulary: how many tokens there are.
        grain: slices are multiples of so many tokens.

    Raises:
        ConfigError: a sequence that is too short to be cut.
    """
    if length < 2 * _LEAST_TOKENS:
        raise ConfigError(f"length: {length} tokens are too few to be cut; give {2 * _LEAST_TOKENS} at least.")
    costs = {size: _measured(stage, size, length, vocabulary) for size in _sizes(rows)}

    def seconds(part: int, tokens: int, before: int) -> float:
        return costs[part].seconds(tokens, before)

    scheme = best_scheme(seconds, rows=rows, length=length, stages=stages, grain=grain)
    by_rows = best_scheme(seconds, rows=rows, length=length, stages=stages, grain=length)
    whole = pipeline_seconds([seconds(rows, length, 0)], stages)
    least = min(sum(times_of(each.parts, seconds)) for each in (scheme, by_rows))
    return Advice(scheme, by_rows.seconds, whole, min(least, whole / stages))


def _sizes(rows: int) -> Iterable[int]:
    """Returns the parts of a batch that `best_scheme` tries."""
    return sorted({*(1 << power for power in range(rows.bit_length())), rows})


def _measured(stage: Stage, rows: int, length: int, vocabulary: int) -> Cost:
    device = next(stage.model.parameters()).device
    ids = torch.randint(0, vocabulary, (rows, length), device=device)
    lengths = [length >> power for power in range(_LENGTHS) if length >> power >= _LEAST_TOKENS]
    cost = measure(stage, ids, shifted(ids)[0], lengths)
    stage.model.zero_grad()
    return cost
