"""Adapter for PEFT. Its models need nothing of ours; what cannot work on pages is refused by name."""

from __future__ import annotations

from torch import nn

from ptm_accel.errors import UnsupportedError

__all__ = ["refuse_adapters"]

_REFUSED = {
    "ADALORA": (
        "in each forward it goes through all of its parameters at once, and it chooses ranks by `p.grad`, which is "
        "empty outside backward on pages",
        "LoRA or DoRA (LoraConfig, use_dora=True)",
    ),
}
"""Kinds of adapters: why they cannot work, and what can be used instead."""


def refuse_adapters(model: nn.Module) -> None:
    """Refuses adapters that cannot work on pages.

    Args:
        model: any model; one without adapters has nothing to refuse.

    Raises:
        UnsupportedError: names the adapter and says why.
    """
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, dict) else ():
        kind = getattr(config, "peft_type", None)
        refusal = _REFUSED.get(str(getattr(kind, "value", kind)))
        if refusal is not None:
            reason, instead = refusal
            raise UnsupportedError(
                f"the adapter {name!r} ({type(config).__name__}) cannot be trained on pages: {reason}. Use {instead}."
            )
