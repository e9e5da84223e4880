"""The `Accelerator` of a Trainer whose model is cut into stages: each pipeline counts as one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import nn

from ptm_accel.config import PipelineConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import UnsupportedError
from ptm_accel.pipeline.ranks import Ranks
from ptm_accel.pipeline.staged import StagedModel, staged

from .accelerator import PTMAccelerator


class PipelineAccelerator(PTMAccelerator):
    """Cuts models into stages, and gives all stages of a pipeline the same batches.

    Args:
        *args, **kwargs: as for `PTMAccelerator`, whose `ptm_config` has a pipeline.

    Attributes:
        ranks: of the processes.

    Raises:
        ConfigError: there are not as many processes as stages x replicas.
        UnsupportedError: fp16, whose loss scale would have to be agreed on.
    """

    pipelines = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scaler is not None:
            raise UnsupportedError(
                "a pipeline trains in fp32 or bf16: with fp16 each stage would skip other steps. Set bf16=True in the "
                "place of fp16=True."
            )
        assert self.ptm_config.pipeline is not None
        stages = PipelineConfig.load(self.ptm_config.pipeline).stages
        assert isinstance(stages, int)
        self.ranks = Ranks(stages, self.device)
        self.alike = self.ranks.alike
        # Otherwise one process would read for all, and send each another part.
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """How many get batches of their own."""
        return self.ranks.replicas

    @property
    def process_index(self) -> int:
        """Which of these this is."""
        return self.ranks.replica

    def attach(self, model: nn.Module, *, evaluates: bool = False) -> Engine:
        """As `PTMAccelerator.attach`; of the model its stage is left.

        Raises:
            ConfigError, UnsupportedError, BudgetError: as there, and as `StagedModel`.
        """
        known = staged(model)
        cut = known or StagedModel(model, self.ranks, self.device)
        engine = super().attach(model, evaluates=evaluates)
        # Its engine may be another one than before.
        engine.training.norms = cut.norms
        if known is None:
            cut.measure_first(model, partial(_has_gradients, engine), engine.zero_grad, self.autocast)
        return engine

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As `PTMAccelerator.prepare_optimizer`.

        Raises:
            UnsupportedError: as there; or this stage has nothing to train.
        """
        if not any(group["params"] for group in optimizer.param_groups):
            raise UnsupportedError(
                f"stage {self.ranks.stage} of {self.ranks.stages} has nothing to train: all its parameters are frozen. "
                "Set pipeline.stages lower."
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def gather(self, tensor: Any) -> Any:
        """As `Accelerator.gather`; what all stages of a pipeline have alike comes once."""
        ranks = self.ranks

        def one_of_each(gathered: torch.Tensor) -> torch.Tensor:
            return torch.cat(gathered.chunk(ranks.stages * ranks.replicas)[:: ranks.stages])

        return recursively_apply(one_of_each, super().gather(tensor))


def _has_gradients(engine: Engine) -> bool:
    training = engine.training
    if training.plain.active:
        return any(slot.param.grad is not None for slot in engine.slots)
    return training.gradients is not None and bool(training.gradients.arrived())
