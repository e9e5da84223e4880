"""A model that is cut into a pipeline, and called as ever: its forward and its loss's backward go through all stages.

Each process has its own stage, and the parameters of no other. `model(input_ids=..., labels=...)` returns the loss, in
all of them alike; `loss.backward()` leaves the gradients of the stage's parameters.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ptm_accel.errors import UnsupportedError
from ptm_accel.pipeline.cutting import Cutting
from ptm_accel.pipeline.ranks import Ranks
from ptm_accel.pipeline.refusals import TAKEN, refuse_batch, refuse_pipeline, refuse_slicing
from ptm_accel.pipeline.runner import Parts, Pipeline, Under
from ptm_accel.pipeline.stage import Stage

_MARK = "_ptm_stage"


class LossOnly(OrderedDict[Any, torch.Tensor]):
    """Output of a model in stages: the loss, and nothing that only its last stage has."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __missing__(self, name: object) -> torch.Tensor:
        if name == 0:
            return self["loss"]
        raise UnsupportedError(
            f"a model in a pipeline returns its loss alone, and {name} was asked for, which only the last stage has. "
            "Use the loss that the model makes of labels, or leave pipeline out."
        )


class StagedModel:
    """The stage of this process, in the place of a model's forward.

    Args:
        model: the whole model; its stage is what is left of it.
        ranks: of the processes.
        device: where this one computes.

    Attributes:
        ranks: see above.

    Raises:
        UnsupportedError: a model that cannot be cut.
        ConfigError: more stages than layers.
    """

    def __init__(self, model: Any, ranks: Ranks, device: torch.device) -> None:
        refuse_slicing(model, "pipeline")
        refuse_pipeline(model)
        self.ranks = ranks
        embedding, stock = model.get_input_embeddings(), inspect.signature(model.forward)
        width, dtype = embedding.embedding_dim, embedding.weight.dtype
        stage = Stage(model, ranks.stage, ranks.stages)
        self._device = device
        self._pipeline = Pipeline(stage, width, dtype, device, ranks.pipeline, ranks.told)
        self._cutting = Cutting(stage, width, dtype, ranks.told)

        def forward(*args: Any, **kwargs: Any) -> LossOnly:
            return self._forward(stock.bind(*args, **kwargs).arguments)

        # Trainers look there for what a model takes.
        forward.__signature__ = stock  # type: ignore[attr-defined]
        vars(model).update({"forward": forward, "save_pretrained": self._saving(model.save_pretrained), _MARK: self})

    def measure_first(
        self,
        model: nn.Module,
        has_gradients: Callable[[], bool],
        drop: Callable[[], object],
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Measures the stage before the first forward of a step whose batch can be cut.

        Args:
            model: on its pages.
            has_gradients: tells whether it has any, as after the first of several batches of a step.
            drop: forgets them.
            autocast: that under which its forward will run.
        """

        def measure(module: nn.Module, args: Any, kwargs: Any) -> None:
            ids = kwargs.get("input_ids")
            if torch.is_grad_enabled() and isinstance(ids, torch.Tensor) and not has_gradients():
                with autocast():
                    measured = self._cutting.measure(ids)
                if measured:
                    hook.remove()
                    drop()

        # Before the hook that begins a pass, of which this is no part.
        hook = model.register_forward_pre_hook(measure, prepend=True, with_kwargs=True)

    def norms(self, norm: torch.Tensor) -> list[torch.Tensor]:
        """Gathers every pipeline stage's norm, given this one's."""
        return self._pipeline.norms(norm)

    def _saving(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("state_dict") != {}:
                raise UnsupportedError(
                    f"this process has stage {self.ranks.stage} of {self.ranks.stages}, which is not the whole model; "
                    "call trainer.save_model() in all processes."
                )
            return stock(*args, **kwargs)

        return save_pretrained

    def _forward(self, given: Mapping[str, Any]) -> LossOnly:
        more = given.get("kwargs", {})
        refuse_batch({**given, **more})
        batch = {name: given[name] for name in TAKEN if given.get(name) is not None}
        self._check_alike(batch)
        parts, predicted = self._cutting.parts(batch["input_ids"]), more.get("num_items_in_batch")
        if torch.is_grad_enabled():
            # A loss that depends on something has a backward.
            begin = torch.zeros((), device=self._device, requires_grad=True)
            loss = _Loss.apply(begin, self._pipeline, batch, parts, predicted)  # type: ignore[no-untyped-call]
        else:
            loss = self._pipeline.forward(batch, parts, predicted)[0].to(self._device, torch.float32)
        return LossOnly(loss=loss)

    def _check_alike(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Compares the batches of all stages.

        Raises:
            UnsupportedError: they differ.
        """
        if not self.ranks.agree("compute a batch", [part for tensor in batch.values() for part in _summary(tensor)]):
            raise UnsupportedError(
                f"the {self.ranks.stages} processes of a pipeline have different batches (that of stage "
                f"{self.ranks.stage} is {tuple(batch['input_ids'].shape)}). All need the same: no sampler or "
                "collator that knows of ranks, or that draws from torch's own generator, as dropout does "
                "(group_by_length, use_seedable_sampler=False)."
            )


def _summary(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Sizes, and a sum that depends on values and their places."""
    values = tensor.long().flatten()
    places = torch.arange(1, values.numel() + 1, device=values.device)
    return [*(torch.tensor(size, device=values.device) for size in tensor.shape), (values * places).sum()]


def staged(model: nn.Module) -> StagedModel | None:
    """What a model has become a stage by; None for a model that is whole."""
    found: StagedModel | None = vars(model).get(_MARK)
    return found


class _Loss(torch.autograd.Function):
    """The loss of a batch, whose backward is that of the pipeline."""

    @staticmethod
    def forward(
        ctx: Any,
        begin: torch.Tensor,
        pipeline: Pipeline,
        batch: dict[str, torch.Tensor],
        parts: Parts,
        predicted: float | torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.pipeline = pipeline
        with torch.enable_grad():
            loss, ctx.under = pipeline.forward(batch, parts, predicted)
        return loss.to(begin.device, torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        under: Under | None
        under, ctx.under = ctx.under, None
        if under is None:
            raise UnsupportedError(
                "a second backward through the same forward of a model in a pipeline, whose saved tensors are freed. "
                "Add the losses up, or call the model again."
            )
        ctx.pipeline.backward(under, gradients[0])
        return (None,) * 5
