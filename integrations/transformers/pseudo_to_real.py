"""Pseudo-to-Real training in a Trainer: a callback that links the blocks of a model, and delinks them later."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ptm_accel.config import AUTO, PseudoToRealConfig
from ptm_accel.errors import CheckpointError, ConfigError, UnsupportedError
from ptm_accel.recipes.delinking import delink
from ptm_accel.recipes.linking import counts, is_linked, link, places_of
from ptm_accel.recipes.slowing import reason_to_delink

logger = logging.getLogger(__name__)


class PseudoToReal(TrainerCallback, ExportableState):
    """Trains with shared blocks at first (M6-10T, arXiv 2110.03888), and later with the real model.

    For a plain Trainer, `callbacks=[PseudoToReal(delink=0.3)]`; the model is linked when the Trainer is made. A Trainer
    on pages adds the callback if `ptm_config` has `pseudo_to_real`, and links when `train()` begins.

    Args:
        delink: `"auto"`, a number of steps, or a fraction of the training.
        moments: the optimizer state of delinked blocks: `"copy"`, `"scale"` or `"reset"`.
        resume_from_checkpoint: for a plain Trainer, the checkpoint that `train()` will be given; training continues in
            its stage. A Trainer on pages does not need it.

    Attributes:
        stage: `"new"`, `"linked"` or `"real"`.
        losses: the losses logged while linked, as (step, loss).
        delinks_at: the number of steps after which blocks are delinked; None while that is not known.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        delink: str | float = AUTO,
        moments: str = "scale",
        resume_from_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = PseudoToRealConfig(delink=delink, moments=moments)
        self.stage = "new"
        self.losses: list[tuple[int, float]] = []
        self.delinks_at: int | None = None
        if resume_from_checkpoint is not None:
            self.resume(Path(resume_from_checkpoint))

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of it, in `trainer_state.json`."""
        attributes = {"stage": self.stage, "losses": self.losses, "delinks_at": self.delinks_at}
        return {"args": {"delink": self.config.delink, "moments": self.config.moments}, "attributes": attributes}

    def resume(self, checkpoint: Path) -> None:
        """Takes up the stage that a checkpoint was saved in.

        Raises:
            CheckpointError: it was saved by another kind of training.
        """
        file = checkpoint / TRAINER_STATE_NAME
        try:
            known = json.loads(file.read_text(encoding="utf-8")).get("stateful_callbacks", {})
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); resume from another checkpoint.") from error
        saved = known.get(type(self).__name__)
        if saved is None:
            raise CheckpointError(
                f"{checkpoint} was saved by a training without Pseudo-to-Real, so its blocks have weights of their "
                "own. Leave pseudo_to_real out to go on with it."
            )
        for name, value in saved["attributes"].items():
            setattr(self, name, value)

    def begin(self, model: nn.Module, checkpoint: str | os.PathLike[str] | None = None) -> None:
        """Links the model, unless the stage is over.

        Args:
            model: the model.
            checkpoint: what training resumes from.

        Raises:
            CheckpointError: it was saved by another kind of training.
            UnsupportedError: the model has no repeated blocks.
        """
        if checkpoint:
            self.resume(Path(checkpoint))
        if self.stage == "real" or is_linked(model):
            return
        link(model)
        self.stage = "linked"
        places = places_of(model)
        total = sum(param.numel() for param in model.parameters())
        spared = sum(model.get_parameter(place.source).numel() for place in places)
        logger.info(
            "Pseudo-to-Real: up to %d blocks share their weights: %.1fM parameters in the place of %.1fM.",
            max(counts(places).values()),
            total / 1e6,
            (total + spared) / 1e6,
        )

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Links the model of a plain Trainer.

        Raises:
            UnsupportedError: it has no repeated blocks; several processes, or DeepSpeed or FSDP, have copies of it.
        """
        refuse_others(args, kwargs.get("model"))
        if args.world_size > 1:
            raise UnsupportedError(
                f"Pseudo-to-Real without pages works in one process, and there are {args.world_size}. Give the Trainer "
                "ptm_config={'pseudo_to_real': ...}."
            )
        self.begin(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Works out when blocks are delinked.

        Raises:
            ConfigError: after the last step.
        """
        asked = self.config.last_linked(state.max_steps)
        if self.stage == "linked" and asked is not None:
            if asked >= state.max_steps:
                raise ConfigError(
                    f"pseudo_to_real.delink: {self.config.delink} steps, but the training has {state.max_steps}, so "
                    f"the real model would never be trained; set it to at most {state.max_steps - 1}, or to a "
                    "fraction such as 0.3."
                )
            self.delinks_at = asked

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Looks whether the loss still falls."""
        if self.stage != "linked" or self.config.delink != AUTO or self.delinks_at is not None:
            return
        if logs is not None and "loss" in logs:
            self.losses.append((state.global_step, float(logs["loss"])))
        self._look(state)

    def _look(self, state: TrainerState) -> None:
        reason = reason_to_delink(self.losses, state.global_step, state.max_steps)
        if reason is not None:
            self.delinks_at = state.global_step
            logger.info("Pseudo-to-Real: blocks are delinked after step %d: %s.", self.delinks_at, reason)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Delinks, between two steps, once it is time.

        Raises:
            BudgetError: there is no room for the real model.
        """
        if self.stage != "linked":
            return
        if self.config.delink == AUTO and self.delinks_at is None:
            self._look(state)
        if self.delinks_at is None or state.global_step < self.delinks_at:
            return
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        assert isinstance(optimizer, torch.optim.Optimizer)
        more = delink(model, optimizer, moments=self.config.moments)
        self.stage = "real"
        logger.info(
            "Pseudo-to-Real: after %d of %d steps %d parameters have become blocks' own; optimizer state: %s.",
            state.global_step,
            state.max_steps,
            more,
            self.config.moments,
        )


def refuse_others(args: TrainingArguments, model: nn.Module | None) -> None:
    """Refuses what Pseudo-to-Real cannot work with.

    Raises:
        UnsupportedError: DeepSpeed or FSDP place the parameters; the model is made anew for each training.
    """
    for name, title in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        if getattr(args, name, None):
            raise UnsupportedError(
                f"{title} places parameters by their names, which Pseudo-to-Real shares among blocks; leave one of "
                "them out."
            )
    if model is None:
        raise UnsupportedError(
            "Pseudo-to-Real cannot work with model_init, which makes another model as train() begins; pass model=."
        )


def recipe_of(trainer: Any) -> PseudoToReal | None:
    """The callback of a Trainer, if it has one."""
    found = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, PseudoToReal))
    return next(found, None)
