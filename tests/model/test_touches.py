"""Passes on fake tensors: which parameters are used, in which order, and what is computed between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.model.forecast import Meter, ShapeSpec, forecast
from ptm_accel.model.touches import Touch, Touched, touches_of

ROWS, WIDTH, LAYERS = 8, 16, 3
PRODUCT = 2.0 * ROWS * WIDTH * WIDTH


class Row(nn.Module):
    """Matrices in a row."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def seen(model: nn.Module) -> Touched:
    batch = {"x": ShapeSpec((ROWS, WIDTH), torch.float32)}
    found = touches_of(model, batch)
    assert found.pass_bytes == forecast(model, batch)
    return found


def told(touches: list[Touch]) -> list[tuple[int, str, float]]:
    kinds = {(False, False): "forward", (True, False): "backward", (True, True): "gradient"}
    return [(each.number, kinds[each.backward, each.gradient], each.flops / PRODUCT) for each in touches]


def test_each_product_is_with_its_parameter() -> None:
    found = seen(Row())
    assert found.names == tuple(f"layers.{number}.weight" for number in range(LAYERS))
    groups = {name: number for number, name in enumerate(found.names)}
    order = told(found.by_group(groups))
    assert order[:4] == [(-1, "forward", 0), (0, "forward", 1), (1, "forward", 1), (2, "forward", 1)]
    # The gradient of a weight is computed before that of what came in, which reads the weight; the first has none.
    assert [each[0] for each in order if each[1] == "backward" and each[2]] == [2, 1]
    assert [each[0] for each in order if each[1] == "gradient"] == [2, 1, 0]
    assert sum(each[2] for each in order) == 3 * LAYERS - 1
    assert found.flops(backward=False) == LAYERS * PRODUCT
    assert found.flops(backward=True) == (2 * LAYERS - 1) * PRODUCT


def test_groups_are_used_once_for_what_follows_one_another() -> None:
    found = seen(Row())
    groups = {"layers.0.weight": 0, "layers.1.weight": 0, "layers.2.weight": 1}
    order = [(number, kind) for number, kind, _ in told(found.by_group(groups))]
    assert order[:3] == [(-1, "forward"), (0, "forward"), (1, "forward")]
    assert [each for each in order if each[1] == "gradient"] == [(1, "gradient"), (0, "gradient")], "with the last"
    total = sum(touch.flops for touch in found.by_group(groups))
    assert total == sum(touch.flops for touch in found.touches)


def test_what_is_not_followed_computes_with_its_neighbour() -> None:
    found = seen(Row())
    (first, *others) = found.by_group({"layers.1.weight": 0})
    assert (first.number, first.flops) == (-1, PRODUCT)
    assert {touch.number for touch in others} == {0}


def test_memory_that_is_made_without_products_and_gradients_count_by_themselves() -> None:
    found = seen(Row())
    activation = ROWS * WIDTH * 4
    # A hyperbolic tangent for each layer, and one gradient of each; the loss is a sum of what is there.
    made = sum(touch.made_bytes for touch in found.touches)
    assert 2 * LAYERS * activation <= made < (2 * LAYERS + 1) * activation
    assert sum(touch.gradient_bytes for touch in found.touches) == LAYERS * WIDTH * WIDTH * 4
    assert all(touch.gradient or not touch.gradient_bytes for touch in found.touches)
    together = found.by_group(dict.fromkeys(found.names, 0))
    assert sum(touch.made_bytes for touch in together) == made
    assert [touch.gradient_bytes for touch in together if touch.gradient][-1] > 0
    assert sum(touch.gradient_bytes for touch in together) == LAYERS * WIDTH * WIDTH * 4


def test_a_tied_parameter_has_one_gradient() -> None:
    found = seen(Row(tied=True))
    assert len(found.names) == LAYERS - 1
    assert [touch.number for touch in found.touches if touch.gradient].count(0) == 1


def llama(**more: int) -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "vocab_size": 512} | more
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shape)).train()


def batch_of(rows: int, length: int) -> dict[str, ShapeSpec]:
    return {name: ShapeSpec((rows, length)) for name in ("input_ids", "labels")}


@pytest.mark.parametrize(("checkpointing", "backwards"), [(False, 2), (True, 3)])
def test_operations_of_a_llama(checkpointing: bool, backwards: int) -> None:
    model = llama()
    if checkpointing:
        model.activation_checkpointing_enable()
    rows, length = 2, 32
    found = touches_of(model, batch_of(rows, length))
    layers = sum(param.numel() for param in model.model.layers.parameters() if param.dim() > 1)
    head = model.lm_head.weight.numel()
    tokens = rows * length
    # Half of attention is masked. Checkpointed, transformers makes a mask of fake tensors, and all of it counts.
    attention = 3 * (1 if checkpointing else 0.5) * 2 * 2 * rows * length * length * 64
    assert found.flops(backward=False) == 2 * tokens * (layers + head) + attention
    least = backwards * 2 * tokens * layers + 2 * 2 * tokens * head
    # A backward computes the scores of attention again: five products for two.
    assert least < found.flops(backward=True) <= least + (2.5 + checkpointing) * attention


def test_asking_for_a_device_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the calls that arrive in a pass are such; each took as long as an operation."""
    carried_out = Meter.carried_out
    followed: list[Any] = []

    def noted(self: Meter, func: Any, args: Any, kwargs: Any) -> Any:
        followed.append(func)
        return carried_out(self, func, args, kwargs)

    monkeypatch.setattr(Meter, "carried_out", noted)
    touches_of(llama(), batch_of(1, 16))
    assert followed.count(torch.ops.aten.mm.default) > 0
    assert torch.ops.prim.device.default not in followed


def test_a_copy_is_taken_for_its_parameter_while_it_lives() -> None:
    """What other tensors have its address afterwards differs from call to call."""
    model = llama()
    model.activation_checkpointing_enable()
    plain, *cast = (touches_of(model, batch_of(1, 16), autocast_dtype=dtype) for dtype in (None, *[torch.bfloat16] * 3))
    uses = [[(touch.number, touch.backward, touch.gradient) for touch in found.touches] for found in (plain, *cast)]
    assert all(each == uses[0] for each in uses)


def test_autocast_uses_parameters_through_their_copies() -> None:
    found = touches_of(llama(), batch_of(1, 16), autocast_dtype=torch.bfloat16)
    used = {touch.number for touch in found.touches if not touch.backward and touch.flops}
    assert {found.names[number] for number in used} >= {"lm_head.weight", "model.layers.2.mlp.down_proj.weight"}


def test_frozen_parameters_have_no_gradients() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    found = touches_of(model, batch_of(1, 16))
    arrived = {found.names[touch.number] for touch in found.touches if touch.gradient}
    assert len(arrived) == 2 * 3 * 7
    assert all("lora_" in name for name in arrived)
    read = {found.names[touch.number] for touch in found.touches if touch.backward and not touch.gradient}
    assert any(name.endswith("base_layer.weight") for name in read), "what comes into a layer has a gradient"
