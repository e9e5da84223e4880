"""How a batch is cut, into rows and slices of tokens, for a pipeline of stages: TeraPipe's dynamic program.

Eq. 5 of arXiv 2102.07988: with times t_1 .. t_m of what a stage computes one after the other, K stages take
`sum(t) + (K - 1) * max(t)`. Under a bound on the largest time the least sum is found, by tokens and then by rows. The
paper tries all bounds from below. Here each bound is what comes below the largest time of the sum found last: between
the two no sum is less, so nothing is missed, and hundreds of bounds are tried instead of tens of thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Seconds = Callable[[int, int, int], float]
"""What a stage takes for a slice: rows, tokens, and the tokens before it; forward and backward together."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A batch in parts, each of some rows, whose tokens are in slices.

    Attributes:
        parts: for each, its rows and the tokens of each slice, in order.
        seconds: what the pipeline takes, by Eq. 5.
    """

    parts: tuple[tuple[int, tuple[int, ...]], ...]
    seconds: float


def pipeline_seconds(times: Sequence[float], stages: int) -> float:
    """Eq. 5: the time of a pipeline whose stages compute the same parts, which take `times`."""
    return sum(times) + (stages - 1) * max(times)


def times_of(parts: Sequence[tuple[int, Sequence[int]]], seconds: Seconds) -> list[float]:
    """Returns what a stage takes for each slice of each part."""
    found = []
    for rows, slices in parts:
        context = 0
        for tokens in slices:
            found.append(seconds(rows, tokens, context))
            context += tokens
    return found


def best_scheme(seconds: Seconds, *, rows: int, length: int, stages: int, grain: int = 8) -> Scheme:
    """Returns the scheme of least time.

    Args:
        seconds: what a stage takes.
        rows: of the batch. Parts have a number of rows that is a power of two, or all of them.
        length: tokens of a row.
        stages: of the pipeline.
        grain: slices are multiples of so many tokens, but for what is left of the length.
    """
    sizes = sorted({*(1 << power for power in range(rows.bit_length()) if 1 << power <= rows), rows})
    edges = [*range(0, length, grain), length]
    tables = {size: _times(seconds, size, edges) for size in sizes}
    bound, best = math.inf, None
    # The last token is in some slice.
    least = min(float(table[-1].min()) for table in tables.values())
    while (cut := _cut(tables, rows, bound)) is not None:
        # Whatever comes has a sum that is no less.
        if best is not None and cut[0] + (stages - 1) * least >= best.seconds:
            break
        scheme = _scheme(cut, edges)
        times = times_of(scheme, seconds)
        total = pipeline_seconds(times, stages)
        if best is None or total < best.seconds:
            best = Scheme(scheme, total)
        if stages == 1:
            break
        bound = math.nextafter(max(times), 0.0)
    assert best is not None
    return best


Cut = tuple[float, list[tuple[int, list[int]]]]
"""The sum of all times, and the parts: their rows, and the edges at which slices end."""


def _times(seconds: Seconds, rows: int, edges: list[int]) -> torch.Tensor:
    """What a slice from edge i to edge j takes, as [j, i]; infinite where it would be empty."""
    count = len(edges)
    table = torch.full((count, count), math.inf, dtype=torch.float64)
    for end in range(1, count):
        for begin in range(end):
            table[end, begin] = seconds(rows, edges[end] - edges[begin], edges[begin])
    return table


def _cut(tables: dict[int, torch.Tensor], rows: int, bound: float) -> Cut | None:
    """Returns the cut of the least sum in which nothing takes longer than `bound`; None if there is none."""
    found = {size: _cut_tokens(table, bound) for size, table in tables.items()}
    sums = [0.0] + [math.inf] * rows
    chosen = [0] * (rows + 1)
    for held in range(1, rows + 1):
        for size, (total, _) in found.items():
            if size <= held and sums[held - size] + total < sums[held]:
                sums[held], chosen[held] = sums[held - size] + total, size
    if math.isinf(sums[rows]):
        return None
    parts = []
    held = rows
    while held:
        parts.append((chosen[held], found[chosen[held]][1]))
        held -= chosen[held]
    return sums[rows], parts


def _cut_tokens(table: torch.Tensor, bound: float) -> tuple[float, list[int]]:
    """The least sum over the slices of a row, and the edges at which they end (Algorithm 1); infinite if none fits."""
    count = len(table)
    allowed = torch.where(table <= bound, table, math.inf)
    sums = torch.full((count,), math.inf, dtype=torch.float64)
    sums[0] = 0.0
    before = [0] * count
    for end in range(1, count):
        least = torch.min(sums[:end] + allowed[end, :end], dim=0)
        sums[end], before[end] = least.values, int(least.indices)
    ends = []
    end = count - 1
    if math.isfinite(float(sums[end])):
        while end:
            ends.append(end)
            end = before[end]
    return float(sums[-1]), ends[::-1]


def _scheme(cut: Cut, edges: list[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    parts = []
    for rows, ends in cut[1]:
        begins = [0, *ends[:-1]]
        parts.append((rows, tuple(edges[end] - edges[begin] for begin, end in zip(begins, ends, strict=True))))
    return tuple(parts)
