"""Options just above the least budget that the engine names: there, the pages of a model move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ptm_accel.integrations.transformers.loading import from_pretrained
from transformers import AutoModelForCausalLM

from ptm_accel.engine import engine_of
from ptm_accel.errors import BudgetError
from tests.figures import FIGURE, named_bytes
from tests.tiers import PAGE

_NAMED = f"Set host_memory to at least {FIGURE}"


def least_options(
    directory: Path, scratch: Path, auto_cls: Any = AutoModelForCausalLM, **options: Any
) -> dict[str, Any]:
    """Options under which a saved model can just be read and trained by AdamW, in full.

    Args:
        directory: where the model was saved.
        scratch: the folder for the pages.
        auto_cls: what reads it.
        **options: for `from_pretrained`.
    """
    ptm_options: dict[str, Any] = {"host_memory": 17 * PAGE, "page_size": PAGE, "disk": str(scratch)}
    with pytest.raises(BudgetError, match=_NAMED) as refusal:
        from_pretrained(auto_cls, directory, ptm_options, **options)
    ptm_options["host_memory"] = named_bytes(_NAMED, refusal.value)
    engine = engine_of(from_pretrained(auto_cls, directory, ptm_options, **options))
    assert engine is not None
    engine.close()
    return ptm_options
