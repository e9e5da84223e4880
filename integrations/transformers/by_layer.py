"""Micro-batches by layer in the Trainer: the first training step of a step runs all, later ones give their losses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.training_args import OptimizerNames
from transformers.utils import output_capturing

from ptm_accel.config import BY_LAYER, BY_LAYER_INEXACT, ONE_BY_ONE, PTMConfig
from ptm_accel.engine import engine_of
from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.activation_reserve import Shapes
from ptm_accel.micro_batches.by_layer import ByLayer
from ptm_accel.units import format_bytes

from ..accelerate import PTMAccelerator
from .layers import layers_of
from .loop import comes_with

if TYPE_CHECKING:
    _Host = transformers.Trainer
else:
    _Host = object

logger = logging.getLogger(__name__)

_REPLACED = ("training_step", "_prepare_inputs", "get_batch_samples")
_KNOWN_TO_REPLACE = ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")
"""Modules whose trainers may replace these: they were compared with plain accumulation."""


class MicroBatches(_Host):
    """The part of the Trainer's mixin for the option `micro_batches`."""

    ptm_config: PTMConfig | None = None
    _by_layer: ByLayer | None = None
    _batches: Sequence[Any] = ()
    _losses: Sequence[torch.Tensor] = ()
    _whole_step = False

    @property
    def _is_by_layer(self) -> bool:
        """Whether micro-batches run by layer."""
        return self.ptm_config is not None and self.ptm_config.micro_batches != ONE_BY_ONE

    def _steps_by_layer(self, batches: Sequence[Any]) -> None:
        """The micro-batches of the next step are known."""
        self._batches, self._losses = list(batches), []

    def _step_by_layer(
        self, stock: Callable[..., torch.Tensor], model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The training step of one micro-batch; the first of a step runs all of them.

        Args:
            stock: the training step of the Trainer.
            model: as for that.
            inputs: as for that.
            num_items_in_batch: as for that.
        """
        if len(self._batches) < 2 or not (self._losses or inputs is self._batches[0]):
            return stock(model, inputs, num_items_in_batch)
        if not self._losses:
            # Whatever fails below, the same batches are not run again.
            batches, self._batches = self._batches, ()
            self._losses = self._run_all(stock, model, batches, num_items_in_batch)
            self._batches = batches
        loss, *self._losses = self._losses
        return loss

    def _run_all(
        self, stock: Callable[..., torch.Tensor], model: nn.Module, batches: Sequence[Any], num_items_in_batch: Any
    ) -> list[torch.Tensor]:
        assert self.ptm_config is not None
        bare = self.accelerator.unwrap_model(model)
        if self._by_layer is None or self._by_layer.model is not bare:
            inexact = self.ptm_config.micro_batches == BY_LAYER_INEXACT
            self._by_layer = ByLayer(bare, layers_of(bare), engine_of(bare), CaughtOutputs(), inexact=inexact)
        first = not self._by_layer.order
        state, last = self.accelerator.gradient_state, len(batches) - 1
        before = state.sync_gradients
        # As each of them does.
        model.train()

        def work(batch: Any) -> Callable[[], torch.Tensor]:
            return lambda: stock(model, batch, num_items_in_batch)

        shapes = [
            tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
            for batch in batches
        ]
        # Where a data set ends in the middle of a step, no update may follow.
        self._whole_step = len(batches) == self.args.gradient_accumulation_steps
        try:
            # The sum is complete with the last of them, in each layer.
            losses = self._by_layer.run(
                [work(batch) for batch in batches], lambda number: state._set_sync_gradients(number == last), shapes
            )
        finally:
            self._whole_step = False
            state._set_sync_gradients(before)
        if first and self.is_world_process_zero():
            _say(self._by_layer, shapes)
        return losses


def _say(by_layer: ByLayer, shapes: Sequence[Shapes]) -> None:
    """Logs what steps like the first one keep, and what they save."""
    chunks = by_layer.chunks.cut(shapes)
    logger.info(
        "micro-batches by layer: %d a step run through %d layers %s and keep up to %s of hidden states; weights "
        "come in %d times a step instead of %d.",
        len(shapes),
        len({number for number, _ in by_layer.order}),
        "together" if len(chunks) == 1 else f"in {len(chunks)} chunks",
        format_bytes(by_layer.kept_bytes * max(chunks) // len(shapes)),
        2 * len(chunks),
        2 * len(shapes),
    )


class ByLayerAccelerator(PTMAccelerator):
    """The accelerator of a Trainer, for which the option `micro_batches` is not refused."""

    by_layer = True


class CaughtOutputs:
    """What transformers' hooks catch of what happens within layers (`ptm_accel.micro_batches.layer_calls.Caught`)."""

    def counts(self) -> dict[str, int]:
        """See `Caught`."""
        lists = (output_capturing._active_collector.get() or {}).items()
        return {name: len(values) for name, values in lists if isinstance(values, list) and name != "hidden_states"}

    def since(self, counts: Mapping[str, int], change: Callable[[Any], Any]) -> list[Any]:
        """See `Caught`."""
        found: list[Any] = []
        collected = output_capturing._active_collector.get() or {}
        for name, begin in counts.items():
            values = collected[name]
            values[begin:] = [torch.utils._pytree.tree_map(change, value) for value in values[begin:]]
            found += values[begin:]
        return found

    def anew(self) -> None:
        """See `Caught`."""
        if names := self.counts():
            output_capturing._active_collector.set({name: [] for name in names})


def refuse_by_layer(trainer: transformers.Trainer, config: PTMConfig) -> None:
    """Refuses what a Trainer is to do besides, and was not shown to be the same with micro-batches by layer.

    Args:
        trainer: the Trainer.
        config: the options.

    Raises:
        UnsupportedError: names it.
    """
    if config.micro_batches == ONE_BY_ONE:
        return
    args = trainer.args
    optim = OptimizerNames(args.optim).value
    found = {
        "several processes": trainer.accelerator.num_processes > 1,
        "torch_compile": args.torch_compile,
        "fp16=True": args.fp16,
        f"optim={optim!r}": "lomo" in optim or "layerwise" in optim,
        "auto_find_batch_size": args.auto_find_batch_size,
    }
    found |= {f"{name}() of {type(trainer).__name__}": not _is_known(trainer, name) for name in _REPLACED}
    asked = [name for name, is_set in found.items() if is_set]
    if asked:
        raise UnsupportedError(
            f"micro_batches: {config.micro_batches} is not known to give the numbers of plain accumulation together "
            f"with {', '.join(asked)}. Leave that out, or micro_batches."
        )
    if trainer.model is not None and config.micro_batches == BY_LAYER:
        _refuse_tied(trainer.model)


def _is_known(trainer: transformers.Trainer, name: str) -> bool:
    """Returns whether a method is the Trainer's own, or that of a trainer of TRL that was compared."""
    if name in vars(trainer):
        return False
    ours = __name__.rpartition(".")[0]
    owners = (cls.__module__ for cls in type(trainer).__mro__ if name in vars(cls))
    return comes_with(trainer, name) or next(each for each in owners if not each.startswith(ours)) in _KNOWN_TO_REPLACE


def _refuse_tied(model: nn.Module) -> None:
    heads = (getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings"))
    first, last = (getattr(head, "weight", None) for head in heads)
    if first is last and isinstance(first, nn.Parameter) and first.requires_grad:
        raise UnsupportedError(
            "micro_batches: by_layer: input and output embeddings are one tensor (tie_word_embeddings), whose "
            "gradients are added in another order than in plain accumulation. Set micro_batches to by_layer_inexact to "
            "train with other roundings."
        )
