"""What goes along with training on pages: the summary at the end, giving back what is not needed."""

from __future__ import annotations

import gc
import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ptm_accel.engine import Engine, engine_of
from ptm_accel.memory.budget import Tier

logger = logging.getLogger(__name__)


class PTMCallback(TrainerCallback):
    """Added by the Trainer on pages by itself; does nothing for a model that is not on pages."""

    _frozen = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What was between two trainings is no part of a step's time."""
        self.thaw()
        _rest(kwargs.get("model"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the first step beside a device: what there is now is no garbage until training ends.

        Python's collector goes through all objects of a program every few steps: 0.2 s without a kernel launched.
        """
        engine = _engine(kwargs.get("model"))
        if self._frozen or engine is None or engine.pool.budget.tier is not Tier.DEVICE or gc.get_freeze_count():
            return
        gc.freeze()
        self._frozen = True

    def thaw(self) -> None:
        """Lets the collector look at everything again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Nor is an evaluation."""
        _rest(kwargs.get("model"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Nor is a checkpoint."""
        _rest(kwargs.get("model"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the last step and logs the summary; optimizer state stays, for a next train()."""
        self.thaw()
        engine = _engine(kwargs.get("model"))
        if engine is not None:
            engine.settle()
            logger.info("%s", engine.metrics.summary())


def _rest(model: nn.Module | None) -> None:
    engine = _engine(model)
    if engine is not None:
        engine.metrics.rest()


def _engine(model: nn.Module | None) -> Engine | None:
    return engine_of(model) if model is not None else None
