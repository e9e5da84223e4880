"""`from_config` on pages against construction without initialisation and `initialize_weights()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers.loading import from_config
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    initialization,
)

from ptm_accel.errors import BudgetError, UnsupportedError
from tests.integrations.saved_models import (
    ARCHITECTURES,
    Save,
    assert_same_model,
    close,
    options,
)
from tests.zoo import ENTRIES


def reference(auto_cls: Any, configuration: Any) -> Any:
    torch.manual_seed(11)
    with initialization.no_init_weights():
        model = auto_cls.from_config(configuration)
    model.initialize_weights()
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_is_built_on_pages(name: str, saved: Save, tmp_path: Path) -> None:
    configuration = transformers.AutoConfig.from_pretrained(saved(name))
    plain = reference(ARCHITECTURES[name], configuration)
    after = torch.rand(1)
    torch.manual_seed(11)
    ours = from_config(ARCHITECTURES[name], configuration, options(tmp_path, name=name))
    assert torch.rand(1) == after
    assert_same_model(ours, plain)
    assert not any(value.isnan().any() for value in ours.state_dict().values())
    loss = ours(**ENTRIES[name].batch_at(0)).loss
    loss.backward()
    close(ours)


def test_a_model_is_built_in_the_dtype_that_is_asked_for(saved: Save, tmp_path: Path) -> None:
    configuration = transformers.AutoConfig.from_pretrained(saved("llama"))
    ours = from_config(AutoModelForCausalLM, configuration, options(tmp_path), dtype=torch.bfloat16)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    close(ours)


def test_a_model_class_can_be_built(saved: Save, tmp_path: Path) -> None:
    configuration = transformers.AutoConfig.from_pretrained(saved("gpt2"))
    plain = reference(AutoModelForCausalLM, configuration)
    torch.manual_seed(11)
    ours = from_config(transformers.GPT2LMHeadModel, configuration, options(tmp_path))
    assert_same_model(ours, plain)
    close(ours)


class Forgetful(transformers.PreTrainedModel):
    config_class = transformers.LlamaConfig

    def __init__(self, configuration: Any) -> None:
        super().__init__(configuration)
        self.known = nn.Linear(64, 64)
        self.table = nn.Parameter(torch.ones(64, 64))
        self.post_init()


def test_a_parameter_that_nobody_initialises_is_named(tmp_path: Path) -> None:
    message = r"1 parameters of Forgetful are not set by its _init_weights \(first: table\), so they have no initial"
    with pytest.raises(UnsupportedError, match=message):
        from_config(Forgetful, transformers.LlamaConfig(), options(tmp_path))


class Direct(transformers.PreTrainedModel):
    """Initialises in ways that do not read attributes."""

    config_class = transformers.LlamaConfig

    def __init__(self, configuration: Any) -> None:
        super().__init__(configuration)
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.LSTM(32, 32)
        self.shared = nn.Linear(64, 64)
        self.shared.weight = self.b.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            for name, param in self.named_parameters():
                if name.startswith("a."):
                    param.data.normal_(0.0, 0.5)
                elif not name.startswith("c."):
                    param.copy_(torch.randn(param.shape))
        elif isinstance(module, nn.LSTM):
            super()._init_weights(module)


def test_any_way_to_initialise_finds_its_pages(tmp_path: Path) -> None:
    plain = Direct(transformers.LlamaConfig())
    torch.manual_seed(11)
    with initialization.no_init_weights():
        plain = Direct(transformers.LlamaConfig())
    plain.initialize_weights()
    torch.manual_seed(11)
    ours = from_config(Direct, transformers.LlamaConfig(), options(tmp_path, 230_000))
    assert_same_model(ours, plain)
    close(ours)


def test_a_budget_too_small_to_build_under(saved: Save, tmp_path: Path) -> None:
    configuration = transformers.AutoConfig.from_pretrained(saved("llama"))
    with pytest.raises(BudgetError, match="this model cannot train under less than"):
        from_config(AutoModelForCausalLM, configuration, options(tmp_path, 100_000))
