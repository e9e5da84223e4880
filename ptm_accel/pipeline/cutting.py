"""Cuts the batches of a pipeline: by what each stage is measured to take, the same in all its processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ptm_accel.pipeline.cost import Cost, measure
from ptm_accel.pipeline.runner import Parts
from ptm_accel.pipeline.scheme import best_scheme, pipeline_seconds
from ptm_accel.pipeline.stage import Stage, shifted

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 32
_SHAPES = 16
"""So many lengths have a scheme of their own: finding one takes a second."""
_MOST_EDGES = 128
"""In how many places a sequence may be cut: finding the scheme takes their square."""
_GRAIN = 8


class Cutting:
    """Finds the best scheme for each shape of batch, by costs that are measured once.

    Args:
        stage: of this process.
        width: of the hidden states.
        dtype: of the hidden states.
        group: the processes of the pipeline, for what is not a tensor.
    """

    def __init__(
        self,
        stage: Stage,
        width: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._stage = stage
        self._width, self._dtype = width, dtype
        self._group = group
        self._costs: dict[int, list[Cost]] = {}
        self._known: dict[tuple[int, int], Parts] = {}
        self._longest = 0

    def parts(self, ids: torch.Tensor) -> Parts:
        """How a batch is cut: in one piece, before anything has been measured.

        Args:
            ids: (rows, length).
        """
        rows, length = ids.shape
        if not self._costs:
            return [(rows, (length,))]
        grain = -(-self._longest // _SHAPES)
        rounded = -(-length // grain) * grain
        if (rows, rounded) not in self._known:
            self._known[rows, rounded] = self._best(rows, rounded)
        return [(count, _up_to(length, slices)) for count, slices in self._known[rows, rounded]]

    def measure(self, ids: torch.Tensor) -> bool:
        """Measures the stages of all processes; gradients are left in their parameters.

        Args:
            ids: (rows, length), a batch as those to come.

        Returns:
            whether anything was measured: a batch that is too short to be cut tells nothing.
        """
        rows, length = ids.shape
        if length < 2 * _LEAST_TOKENS:
            return False
        self._longest = length
        # Each half of the one before it. No slice is taken to be faster than the shortest of them.
        halves = dist.get_world_size(self._group).bit_length() + 2
        lengths = [length >> power for power in range(halves) if length >> power >= _LEAST_TOKENS]
        devices = [ids.device] if ids.device.type == "cuda" else []
        # Dropout draws in training what it draws without this.
        with torch.random.fork_rng(devices), torch.enable_grad():
            for count in sorted({1, rows}):
                given = ids[:count]
                if not self._stage.first:
                    given = torch.randn(count, length, self._width, dtype=self._dtype, device=ids.device)
                own = measure(self._stage, given, shifted(ids[:count])[0], lengths)
                found: list[Cost] = [own] * dist.get_world_size(self._group)
                dist.all_gather_object(found, own, group=self._group)
                self._costs[count] = found
        return True

    def _seconds(self, rows: int, tokens: int, before: int) -> float:
        """What the slowest stage takes, on the line through the numbers of rows that were measured."""
        least, most = min(self._costs), max(self._costs)
        ends = [max(cost.seconds(tokens, before) for cost in self._costs[count]) for count in (least, most)]
        if least == most:
            return ends[0] * rows / least
        return max(ends[0], ends[0] + (ends[1] - ends[0]) * (rows - least) / (most - least))

    def _best(self, rows: int, length: int) -> Parts:
        stages = dist.get_world_size(self._group)
        grain = max(_GRAIN, -(-length // _MOST_EDGES))
        scheme = best_scheme(self._seconds, rows=rows, length=length, stages=stages, grain=grain)
        whole = pipeline_seconds([self._seconds(rows, length, 0)], stages)
        if dist.get_rank() == 0:
            cut = ", ".join(f"{count} x {'+'.join(map(str, slices))}" for count, slices in scheme.parts)
            # With padding to the longest row, nearly each batch has a shape of its own.
            logger.log(
                logging.DEBUG if self._known else logging.INFO,
                "a pipeline of %d stages takes a batch of %d x %d tokens %s: %.3f s a pass, and %.3f s in one piece.",
                stages,
                rows,
                length,
                f"as {cut}" if len(scheme.parts) > 1 or len(scheme.parts[0][1]) > 1 else "whole, which is best",
                scheme.seconds,
                whole,
            )
        return scheme.parts


def _up_to(length: int, slices: Sequence[int]) -> tuple[int, ...]:
    """Slices of a longer sequence, cut off after so many tokens."""
    ends = [min(end, length) for end in accumulate(slices)]
    return tuple(end - begin for begin, end in pairwise([0, *ends]) if end > begin)
