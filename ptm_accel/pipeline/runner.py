"""A step of a token pipeline over processes: each has a stage, and hands slices on while it computes the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ptm_accel.errors import ConfigError
from ptm_accel.pipeline.stage import Stage, shifted


class Pipeline:
    """The stage of this process, between those of the ranks before and after it.

    Args:
        stage: of this process; all processes of `group` have one, in the order of their ranks.
        width: of the hidden states.
        dtype: of the hidden states.
        device: where they are computed.
        group: the processes; None for all.
    """

    def __init__(
        self,
        stage: Stage,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.stage = stage
        self._width, self._dtype, self._device = width, dtype, device
        self._group = group
        self._rank, self._stages = dist.get_rank(group), dist.get_world_size(group)

    def step(self, batch: dict[str, torch.Tensor], slices: Sequence[int]) -> torch.Tensor:
        """Forward and backward of a batch, which all processes are given; gradients are left in the parameters.

        Args:
            batch: `input_ids`, `labels` and perhaps `attention_mask`, (rows, length) each.
            slices: tokens of each, in order.

        Returns:
            the loss, the same in all processes.

        Raises:
            ConfigError: slices that are not of the batch's length.
        """
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if sum(slices) != ids.shape[1]:
            raise ConfigError(
                f"slices: {len(slices)} of {sum(slices)} tokens together, and the batch has {ids.shape[1]}; give "
                "slices of as many."
            )
        following, predicted = shifted(batch["labels"])
        edges = list(pairwise([0, *_sums(slices)]))
        # What is sent must stay as it is until it has arrived.
        sent: list[tuple[Any, torch.Tensor]] = []
        self.stage.begin()
        loss = torch.zeros((), dtype=torch.float64)
        coming = iter(()) if self.stage.first else self._receive(ids.shape[0], edges, self._rank - 1)
        for begin, end in edges:
            given = ids[:, begin:end] if self.stage.first else next(coming)
            made = self.stage.forward(
                given,
                begin,
                mask=mask,
                labels=following[:, begin:end],
                predicted=max(predicted, 1),
                alone=len(edges) == 1,
            )
            if self.stage.last:
                loss += made.double().cpu()
            else:
                sent.append(self._send(made, self._rank + 1))
        coming = iter(()) if self.stage.last else self._receive(ids.shape[0], edges[::-1], self._rank + 1)
        for _ in edges:
            gradient = self.stage.backward(None if self.stage.last else next(coming))
            if gradient is not None:
                sent.append(self._send(gradient, self._rank - 1))
        for work, _ in sent:
            work.wait()
        dist.broadcast(loss, self._global(self._stages - 1), group=self._group)
        return loss

    def total_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The 2-norm over all stages.

        Args:
            norm: of this stage's gradients.
        """
        square = norm.double().cpu().square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def _receive(self, rows: int, edges: Sequence[tuple[int, int]], source: int) -> Iterator[torch.Tensor]:
        """What another stage sends, in order; asked for all at once, so that it comes while others are used."""
        asked: list[tuple[Any, torch.Tensor]] = []
        for begin, end in edges:
            into = torch.empty(rows, end - begin, self._width, dtype=self._dtype, device=self._device)
            asked.append((dist.irecv(into, self._global(source), group=self._group), into))
        for work, into in asked:
            work.wait()
            yield into

    def _send(self, tensor: torch.Tensor, target: int) -> tuple[Any, torch.Tensor]:
        kept = tensor.contiguous()
        return dist.isend(kept, self._global(target), group=self._group), kept

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _sums(slices: Sequence[int]) -> list[int]:
    found = []
    total = 0
    for tokens in slices:
        total += tokens
        found.append(total)
    return found
