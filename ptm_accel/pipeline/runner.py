"""A step of a token pipeline over processes: each has a stage, and hands slices on while it computes the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ptm_accel.errors import ConfigError
from ptm_accel.pipeline.stage import Slice, Stage, shifted

Parts = Sequence[tuple[int, Sequence[int]]]
"""How a batch is cut: for each part its rows, and the tokens of its slices (`ptm_accel.pipeline.scheme.Scheme`)."""


@dataclass(frozen=True, slots=True)
class _TokenSlice:
    """Tokens that are computed at a time: some tokens of some rows.

    Attributes:
        rows: of the batch.
        begin, end: its tokens.
        alone: they are all tokens of the rows.
    """

    rows: slice
    begin: int
    end: int
    alone: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor of (rows, length)."""
        return tensor[self.rows, self.begin : self.end]


Under = tuple[list[_TokenSlice], list[Slice]]
"""Parts of a forward that its backward needs."""


class Pipeline:
    """The stage of this process, between those of the ranks before and after it.

    Args:
        stage: of this process; all processes of `group` have one, in the order of their ranks.
        width: of the hidden states.
        dtype: of the hidden states.
        device: where they are computed.
        group: the processes; None for all.
        told: the same processes, for tensors in host memory; None where `group` serves for them as well.
    """

    def __init__(
        self,
        stage: Stage,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        told: dist.ProcessGroup | None = None,
    ) -> None:
        self.stage = stage
        self._width, self._dtype, self._device = width, dtype, device
        self._group, self._told = group, told or group
        self._rank, self._stages = dist.get_rank(group), dist.get_world_size(group)

    def step(self, batch: dict[str, torch.Tensor], parts: Parts) -> torch.Tensor:
        """Forward and backward of a batch; gradients are left in the parameters.

        Args:
            batch: as for `forward`.
            parts: as for `forward`.

        Returns:
            the loss, the same in all processes.
        """
        loss, under = self.forward(batch, parts)
        self.backward(under)
        return loss

    def forward(
        self, batch: dict[str, torch.Tensor], parts: Parts, predicted: float | torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Under]:
        """Runs the forward of a batch, which all processes are given.

        Args:
            batch: `input_ids`, `labels` and perhaps `attention_mask`, (rows, length) each.
            parts: how it is cut.
            predicted: by which the sum of all tokens' losses is divided; None for how many of them are predicted.

        Returns:
            the loss, float64 in host memory, the same in all processes; and what its backward needs.

        Raises:
            ConfigError: parts that are not of the batch's shape.
        """
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        following, count = shifted(batch["labels"])
        units = _units(parts, *ids.shape)
        # Read once, at the end: until then the device computes ahead of this thread.
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        slices = self.stage.begin()
        coming = iter(()) if self.stage.first else self._receive(units, self._rank - 1)
        # What is sent must stay as it is until it has arrived.
        sent: list[tuple[Any, torch.Tensor]] = []
        for unit in units:
            made = self.stage.forward(
                unit.of(ids) if self.stage.first else next(coming),
                unit.begin,
                mask=None if mask is None else mask[unit.rows],
                labels=unit.of(following),
                predicted=count if predicted is None else predicted,
                alone=unit.alone,
            )
            if self.stage.last:
                loss += made.double()
            else:
                sent.append(self._send(made, self._rank + 1))
        for work, _ in sent:
            work.wait()
        if not torch.is_grad_enabled():
            slices.clear()
        told = loss.cpu()
        dist.broadcast(told, group=self._told, group_src=self._stages - 1)
        return told, (units, slices)

    def backward(self, under: Under, scale: torch.Tensor | None = None) -> None:
        """Runs the backward of a batch; gradients are left in the parameters.

        Args:
            under: what its forward has returned.
            scale: the gradient of the loss; None for 1.
        """
        units, slices = under[0][::-1], under[1]
        coming = iter(()) if self.stage.last else self._receive(units, self._rank + 1)
        sent: list[tuple[Any, torch.Tensor]] = []
        for _ in units:
            gradient = self.stage.backward(slices, scale if self.stage.last else next(coming))
            if gradient is not None:
                sent.append(self._send(gradient, self._rank - 1))
        for work, _ in sent:
            work.wait()

    def norms(self, norm: torch.Tensor) -> list[torch.Tensor]:
        """Gathers every pipeline stage's norm.

        Args:
            norm: of this stage's.
        """
        own = norm.double().cpu()
        found = [torch.zeros_like(own) for _ in range(self._stages)]
        dist.all_gather(found, own, group=self._told)
        return found

    def _receive(self, units: Sequence[_TokenSlice], source: int) -> Iterator[torch.Tensor]:
        """What another stage sends, in order; asked for all at once, so that it comes while others are used."""
        asked: list[tuple[Any, torch.Tensor]] = []
        for unit in units:
            rows = unit.rows.stop - unit.rows.start
            into = torch.empty(rows, unit.end - unit.begin, self._width, dtype=self._dtype, device=self._device)
            asked.append((dist.irecv(into, group=self._group, group_src=source), into))
        for work, into in asked:
            work.wait()
            yield into

    def _send(self, tensor: torch.Tensor, target: int) -> tuple[Any, torch.Tensor]:
        kept = tensor.to(self._dtype).contiguous()
        return dist.isend(kept, group=self._group, group_dst=target), kept


def _units(parts: Parts, rows: int, length: int) -> list[_TokenSlice]:
    """Returns the units of a batch, in order.

    Raises:
        ConfigError: parts that are not of its shape.
    """
    found, row = [], 0
    for count, slices in parts:
        begin = 0
        for tokens in slices:
            found.append(_TokenSlice(slice(row, row + count), begin, begin + tokens, tokens == length))
            begin += tokens
        if begin != length:
            raise ConfigError(
                f"slices: {len(slices)} of {begin} tokens together, and the batch has {length}; give slices of as many."
            )
        row += count
    if row != rows:
        raise ConfigError(f"parts: {len(parts)} of {row} rows together, and the batch has {rows}; give as many.")
    return found
