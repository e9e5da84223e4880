"""Whether a backward is that of the Trainer's loop, so that it is known what comes between a gradient and its update.

Of the backwards that somebody begins with the same Trainer, in a callback or after training, nothing is known: there a
gradient may be looked at, added to, or dropped.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
import transformers.trainer
from transformers import TrainerCallback

if TYPE_CHECKING:
    _Host = transformers.Trainer
else:
    _Host = object

_HERE = os.path.dirname(__file__)
_STOCK = ("_inner_training_loop", "_run_epoch", "training_step", "_get_grad_norm", "_clip_grad_norm")
"""The methods of the Trainer between the forward of a step and its update. Whoever replaces one may do anything there.
(`compute_loss` may be replaced: it comes before backward.)"""
_BEFORE_STEP = ("on_substep_end", "on_pre_optimizer_step")
"""The callbacks between a backward and its update; the first one where several micro-batches have run at once."""


class KnownLoop(_Host):
    """The part of the Trainer's mixin that knows which backward is that of a step.

    Attributes:
        _steps: how many training steps are under way.
        _whole_step: whether all micro-batches of a step run now, layer by layer, and their update comes next.
    """

    _steps = 0
    _whole_step = False

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in the Trainer; updates may begin in its backward, and in no other."""
        self._steps += 1
        try:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        finally:
            self._steps -= 1
        return loss


def step_follows(trainer: transformers.Trainer) -> Callable[[], bool]:
    """Tells, in a step, whether its update comes right after its backward, on the gradients as they are then.

    Args:
        trainer: whose loop it is; it is not kept alive.
    """
    known = weakref.ref(trainer)

    def follows() -> bool:
        alive = known()
        return isinstance(alive, KnownLoop) and (alive._whole_step or alive._steps == 1) and known_loop(alive)

    return follows


def known_loop(trainer: transformers.Trainer) -> bool:
    """Whether in the Trainer's loop nothing comes between the backward of a step and its update.

    Args:
        trainer: whose loop it is.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if getattr(accelerator, "ranks", None) is not None:
        # In a pipeline each gradient arrives once for each slice.
        return False
    whole = isinstance(trainer, KnownLoop) and trainer._whole_step
    once = (args.gradient_accumulation_steps == 1 or whole) and accelerator.gradient_accumulation_steps == 1
    # With auto_find_batch_size an exception in the middle of a step is no end of the training.
    unchanged = not args.max_grad_norm and accelerator.scaler is None and not args.auto_find_batch_size
    between = _BEFORE_STEP if whole else _BEFORE_STEP[1:]
    looked_at = any(_has_one_of(between, callback) for callback in _callbacks(trainer))
    return once and unchanged and _is_stock(trainer) and not looked_at


def _is_stock(trainer: transformers.Trainer) -> bool:
    replaced = vars(trainer.accelerator).keys() & {"backward", "clip_grad_norm_"}
    # A scheduler made over an optimizer counts its steps by such a replacement.
    step = getattr(trainer.optimizer, "__dict__", {}).get("step")
    replaced_step = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    known = [name for name in _STOCK if hasattr(transformers.Trainer, name)]
    return not replaced and not replaced_step and all(comes_with(trainer, name) for name in known)


def comes_with(trainer: transformers.Trainer, name: str) -> bool:
    """Whether a method is the one that the library came with, but for what is added here.

    Args:
        trainer: whose method; the class itself may have been changed as well.
        name: of the method.
    """
    if name in vars(trainer):
        return False
    written = (_file_of(vars(cls)[name]) for cls in type(trainer).__mro__ if name in vars(cls))
    return next((file for file in written if os.path.dirname(file) != _HERE), "") == transformers.trainer.__file__


def _file_of(method: object) -> str:
    return str(getattr(getattr(method, "__code__", None), "co_filename", ""))


def _callbacks(trainer: transformers.Trainer) -> list[TrainerCallback]:
    return list(trainer.callback_handler.callbacks)


def _has_one_of(names: Sequence[str], callback: TrainerCallback) -> bool:
    methods = (getattr(getattr(callback, name), "__func__", None) for name in names)
    return any(method is not getattr(TrainerCallback, name) for name, method in zip(names, methods, strict=True))
