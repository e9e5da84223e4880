"""Whether the loop is the Trainer's own, so that it is known what comes between a gradient and its update."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import transformers
import transformers.trainer
from transformers import TrainerCallback

_STOCK = ("_inner_training_loop", "_run_epoch", "training_step", "_get_grad_norm", "_clip_grad_norm")
"""The methods of the Trainer between the forward of a step and its update. Whoever replaces one may do anything there.
(`compute_loss` may be replaced: it comes before backward.)"""


def step_follows(trainer: transformers.Trainer) -> Callable[[], bool]:
    """Tells, before a step, whether its update comes right after its backward, on the gradients as they are then.

    Args:
        trainer: whose loop it is; it is not kept alive.
    """
    known = weakref.ref(trainer)

    def follows() -> bool:
        alive = known()
        return alive is not None and _follows(alive)

    return follows


def _follows(trainer: transformers.Trainer) -> bool:
    args, accelerator = trainer.args, trainer.accelerator
    once = args.gradient_accumulation_steps == 1 and accelerator.gradient_accumulation_steps == 1
    # With auto_find_batch_size an exception in the middle of a step is no end of the training.
    unchanged = not args.max_grad_norm and accelerator.scaler is None and not args.auto_find_batch_size
    return once and unchanged and _is_stock(trainer) and not any(map(_looks_before_step, _callbacks(trainer)))


def _is_stock(trainer: transformers.Trainer) -> bool:
    replaced = vars(trainer.accelerator).keys() & {"backward", "clip_grad_norm_"}
    # A scheduler made over an optimizer counts its steps by such a replacement.
    step = getattr(trainer.optimizer, "__dict__", {}).get("step")
    replaced_step = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    return not replaced and not replaced_step and all(map(_comes_with, _found(trainer)))


def _found(trainer: transformers.Trainer) -> list[tuple[str, object]]:
    known = [name for name in _STOCK if hasattr(transformers.Trainer, name)]
    return [(name, getattr(trainer, name, None)) for name in known]


def _comes_with(found: tuple[str, object]) -> bool:
    """Whether a method is the one that the library came with; the class itself may have been changed as well."""
    name, method = found
    function = getattr(method, "__func__", None)
    written = getattr(getattr(function, "__code__", None), "co_filename", None)
    return function is getattr(transformers.Trainer, name) and written == transformers.trainer.__file__


def _callbacks(trainer: transformers.Trainer) -> list[TrainerCallback]:
    return list(trainer.callback_handler.callbacks)


def _looks_before_step(callback: TrainerCallback) -> bool:
    method = getattr(callback.on_pre_optimizer_step, "__func__", None)
    return method is not TrainerCallback.on_pre_optimizer_step
