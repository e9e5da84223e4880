"""The names of `TrainingArguments.optim` that cannot run on pages, known before their packages are even imported."""

from __future__ import annotations

from transformers import TrainingArguments

from ptm_accel.errors import UnsupportedError

_INSTEAD = {
    "galore": "it keeps projections that are no tensors of the optimizer's state",
    "apollo": "it keeps projections that are no tensors of the optimizer's state",
    "lomo": "it updates inside backward through hooks of its own",
    "schedule_free": "it keeps parameters of its own and swaps them with the model's",
    "xla": "it is for TPUs",
    "npu": "it is for Ascend NPUs",
    "4bit": "its state has a format of its own, which only its package can read",
    "8bit": "its state has a format of its own, which only its package can read",
    "bnb": "bitsandbytes places its state by itself",
    "paged": "bitsandbytes pages its state by itself",
    "ademamix": "bitsandbytes places its state by itself",
    "lion": "bitsandbytes places its state by itself",
}
"""Parts of names, the more telling ones first."""


def refuse_optimizer(args: TrainingArguments) -> None:
    """Refuses an optimizer by its name, so that nobody installs a package for nothing.

    Raises:
        UnsupportedError: `optim` cannot run on pages; says why and what can.
    """
    name = str(getattr(args.optim, "value", args.optim))
    for part, reason in _INSTEAD.items():
        if part in name:
            raise UnsupportedError(
                f"optim={name!r} cannot run on pages: {reason}. On pages, state in full precision need not fit the "
                "device: use optim='adamw_torch_fused', 'adamw_torch', 'sgd', 'adagrad', 'rmsprop' or 'adafactor'."
            )
