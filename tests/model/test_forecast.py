"""Forecasts of what a pass holds, and what they must not touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from ptm_accel.engine import Engine
from ptm_accel.errors import UnsupportedError
from ptm_accel.model.forecast import ShapeSpec, forecast
from tests.tiers import PAGE, config
from tests.zoo import CHECKPOINTING, ENTRIES, use_checkpointing


def build(
    name: str, kind: str = "off", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = ENTRIES[name].build().to(dtype)
    use_checkpointing(model, kind)
    batch = ENTRIES[name].batch_at(0)
    return model, {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
def test_a_meta_model_and_specs_give_the_same(name: str) -> None:
    model, batch = build(name)
    with torch.device("meta"):
        bare = ENTRIES[name].make().train()
    specs = {key: ShapeSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in batch.items()}
    assert forecast(bare, specs) == forecast(model, batch) > 0
    assert all(param.device.type == "meta" for param in bare.parameters())


WIDTH, ROWS, LAYERS = 64, 32, 4
ACTIVATION = ROWS * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4


class Row(nn.Module):
    """Matrices in a row. In a forward each makes two activations, and the next lets go of the first."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.register_buffer("scale", torch.ones(PAGE))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.again else layer(x))
        return x


X = {"x": ShapeSpec((ROWS, WIDTH), torch.float32)}


def test_what_is_held_in_an_evaluation() -> None:
    # The batch, what came in, what a layer makes, and its tanh.
    assert forecast(Row(), X, backward=False) == 4 * ACTIVATION


def test_what_is_held_in_training() -> None:
    # The batch, a tanh of each layer, the gradient that comes in, what tanh makes of it, and a weight's gradient.
    # The loss and its gradient, of 4 bytes each, are lost in rounding.
    assert WEIGHT == 2 * ACTIVATION
    assert forecast(Row(), X) // ACTIVATION == 1 + LAYERS + 2 + 2


def test_checkpointing_holds_less() -> None:
    held = {}
    for kind in CHECKPOINTING:
        held[kind] = forecast(*build("llama", kind))
    assert held["non-reentrant"] < held["off"] * 2 // 3
    assert held["reentrant"] < held["off"] * 2 // 3


def test_copies_of_parameters_under_autocast_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False))
    held = forecast(
        model, {"input": ShapeSpec((1, 4096), torch.float32)}, autocast_dtype=torch.bfloat16, backward=False
    )
    assert held < model[0].weight.nbytes // 8


# ---- what must not be touched ----------------------------------------------------------------------------------------


def belongings(model: nn.Module) -> list[Any]:
    """What every module has, and the values of it."""
    found: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            known = dict(value) if isinstance(value, dict) else value
            found.append((name, type(value), known if not isinstance(value, torch.Tensor) else id(value)))
    return found


class Rememberer(Row):
    """Keeps what a careless model keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(self.norm(x) * self.plain)
        self.added = nn.Identity()
        self.register_buffer("late", self.last.detach())
        if self.again:
            self.last.sum().item()
        return self.last


@pytest.mark.parametrize("refused", [False, True])
def test_the_model_is_unchanged(refused: bool) -> None:
    model = Rememberer()
    model.again = refused
    before, state = belongings(model), torch.random.get_rng_state()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if refused:
        with pytest.raises(UnsupportedError):
            forecast(model, X)
    else:
        assert forecast(model, X)
    after = belongings(model)
    assert [(name, kind) for name, kind, _ in after] == [(name, kind) for name, kind, _ in before]
    for (name, _, now), (_, _, then) in zip(after, before, strict=True):
        if isinstance(then, dict):
            assert now.keys() == then.keys(), name
            assert all(now[key] is then[key] for key in then), name
        else:
            assert now == then, name
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None and type(param) is nn.Parameter for param in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_model_of_the_shape_of_70b_takes_no_memory() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    shape = transformers.LlamaConfig(num_hidden_layers=4, vocab_size=128256, **sizes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16).train()
    ids = ShapeSpec((1, 2048))
    process = psutil.Process()
    before = process.memory_info().rss
    held = forecast(model, {"input_ids": ids, "labels": ids})
    assert process.memory_info().rss - before < 256 << 20
    assert held > 4e9


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_routing_by_values_is_refused() -> None:
    model, batch = build("mixtral")
    model.set_experts_implementation("eager")  # type: ignore[operator]
    with pytest.raises(
        UnsupportedError,
        match=r"cannot be forecast: the result of aten\.nonzero\S* does not .*batch: input_ids \(2, 12\)",
    ) as caught:
        forecast(model, batch)
    assert "experts_implementation='grouped_mm'" in str(caught.value)


def test_a_model_on_pages_is_refused(tmp_path: Path) -> None:
    model = Row()
    engine = Engine.attach(model, config(host_memory="64MiB", disk=str(tmp_path)))
    with pytest.raises(UnsupportedError, match=r"layers.0.weight and 3 more .* on pages already.*before the model is"):
        forecast(model, X)
    engine.detach()
    assert forecast(model, X)


def test_a_compiled_model_is_refused() -> None:
    model = Row()
    model.layers[1].compile()
    with pytest.raises(UnsupportedError, match=r"layers\.1 and 0 more .* compiled .*before the model is compiled"):
        forecast(model, X)
    with pytest.raises(UnsupportedError, match=r"^the model and 1 more"):
        forecast(torch.compile(model), X)  # type: ignore[arg-type]


def test_a_model_without_a_loss_is_refused() -> None:
    model, batch = build("llama")
    del batch["labels"]
    with pytest.raises(UnsupportedError, match=r"no loss .* returned \['logits'\].*`labels`.*backward=False"):
        forecast(model, batch)
    assert forecast(model, batch, backward=False)
