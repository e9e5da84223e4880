"""A model with adapters, to be measured and not to be run."""

from __future__ import annotations

import warnings
from typing import Any

from ptm_accel.errors import ConfigError


def with_lora(model: Any, rank: int) -> Any:
    """Adds LoRA adapters to all linear layers of a model, but for its head; all else is frozen.

    Args:
        model: on the meta device; it is changed.
        rank: of the adapters.

    Raises:
        ConfigError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("lora: adapters are made by PEFT, which is not installed; pip install peft.") from error
    task = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    with warnings.catch_warnings():
        # PEFT calls what transformers has renamed; nothing that who asks for a forecast could change.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type=task))
