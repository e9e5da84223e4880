"""Forecasts against the engine's own records of the same passes, and what they must not touch."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ptm_accel.engine import Engine
from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.transfer import round_up
from ptm_accel.model.forecast import ShapeSpec, forecast
from ptm_accel.model.gradients import Sums
from ptm_accel.model.route import Route
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.trace import Trace, Use
from ptm_accel.schedule.updates import Updates
from tests.tiers import PAGE, at_floor, config, needs, on_pages
from tests.zoo import CHECKPOINTING, ENTRIES, use_checkpointing

PRECISIONS = {
    "fp32": (torch.float32, None),
    "autocast": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, None),
}

_ASKED_FOR = ("bert", "t5", "gpt2", "mixtral")
ALL = [(name, kind, precision) for name in ENTRIES for kind in ENTRIES[name].checkpointing for precision in PRECISIONS]
# Llama in every way; of the others each kind of checkpointing and each precision once.
SOME = [("llama", kind, precision) for kind in CHECKPOINTING for precision in PRECISIONS] + [
    (name, kind, list(PRECISIONS)[(shift + turn) % 3])
    for shift, name in enumerate(_ASKED_FOR)
    for turn, kind in enumerate(CHECKPOINTING)
]
REST = [row for row in ALL if row not in SOME]


def build(
    name: str, kind: str = "off", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = ENTRIES[name].build().to(dtype)
    use_checkpointing(model, kind)
    batch = ENTRIES[name].batch_at(0)
    return model, {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def record(
    model: nn.Module, batch: dict[str, torch.Tensor], cast: torch.dtype | None, folder: Path, **dials: Any
) -> Trace:
    """What the engine writes down of one pass under the least budget."""
    with at_floor(model, folder, **dials) as engine:
        with torch.autocast("cpu", cast, enabled=cast is not None):
            output = model(**batch)
        output.loss.backward()
        engine.run_ahead.end()
        (route,) = engine.run_ahead.routes.values()
    return route.trace


def uses(trace: Trace) -> list[tuple[str, Use, bool]]:
    return [(trace.items[access.item].name, access.use, access.backward) for access in trace.accesses]


def check_against_record(name: str, kind: str, precision: str, folder: Path) -> None:
    dtype, cast = PRECISIONS[precision]
    model, batch = build(name, kind, dtype)
    ours = forecast(model, batch, autocast_dtype=cast, page_bytes=PAGE)
    seen = record(model, batch, cast, folder)
    assert ours.key == seen.key
    assert ours.items == seen.items
    assert uses(ours) == uses(seen)
    assert {use for _, use, _ in uses(ours)} >= {Use.READ, Use.CREATE}


@pytest.mark.thinned(10)
@pytest.mark.parametrize(("name", "kind", "precision"), SOME)
def test_the_engine_records_what_was_forecast(name: str, kind: str, precision: str, tmp_path: Path) -> None:
    check_against_record(name, kind, precision, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "kind", "precision"), REST)
def test_the_engine_records_what_was_forecast_everywhere(name: str, kind: str, precision: str, tmp_path: Path) -> None:
    check_against_record(name, kind, precision, tmp_path)


def test_an_evaluation_reads_and_creates_nothing() -> None:
    model, batch = build("llama")
    model.eval()
    trace = forecast(model, batch, backward=False, page_bytes=PAGE)
    assert trace.key == ((False, False, ((2, 12), (2, 12))), Sums.NONE, Updates.APART)
    assert {(use, backward) for _, use, backward in uses(trace)} == {(Use.READ, False)}


def test_a_meta_model_and_specs_give_the_same() -> None:
    model, batch = build("llama")
    with torch.device("meta"):
        bare = ENTRIES["llama"].make().train()
    specs = {name: ShapeSpec(tuple(tensor.shape)) for name, tensor in batch.items()}
    rates = {"flops_s": 1e9, "bytes_s": 1e8}
    assert forecast(bare, specs, page_bytes=PAGE, **rates) == forecast(model, batch, page_bytes=PAGE, **rates)
    assert all(param.device.type == "meta" for param in bare.parameters())


def test_tensors_that_are_small_for_the_page_are_no_items() -> None:
    model, batch = build("llama")
    names = {item.name for item in forecast(model, batch, page_bytes=PAGE).items}
    assert "model.norm.weight" in names
    assert not forecast(model, batch).items, "all of it is less than a 64th of 4 MiB"


def test_frozen_parameters_have_no_gradients() -> None:
    model, batch = build("lora")
    created = {name for name, use, _ in uses(forecast(model, batch, page_bytes=PAGE)) if use is Use.CREATE}
    assert created == {f"{name}.grad" for name, param in model.named_parameters() if param.requires_grad}


def test_a_plan_can_be_there_before_the_first_pass(tmp_path: Path) -> None:
    model, batch = build("llama")
    trace = forecast(model, batch, page_bytes=PAGE)
    floor, need = needs(ENTRIES["llama"].build(), tmp_path, "host+disk")
    capacity = floor + (need - floor) // 3
    with on_pages(model, "host+disk", capacity, tmp_path) as engine:
        plan = plan_pass(trace, capacity_bytes=capacity, ahead_bytes=capacity // 4)
        engine.run_ahead.routes[trace.key] = Route(trace, plan, capacity, trace)
        model(**batch).loss.backward()
        engine.run_ahead.end()
        assert engine.pool.stats.hits > 0
        assert engine.run_ahead.departures == 0
        assert engine.run_ahead.routes[trace.key].trace is trace


# ---- what is reckoned ------------------------------------------------------------------------------------------------

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


def activations(trace: Trace) -> list[int]:
    """What is held at each access, in activations; the loss and its gradient, of 4 bytes each, are lost in rounding."""
    scale_bytes = 4 * PAGE
    return [(access.held_bytes - scale_bytes) // ACTIVATION for access in trace.accesses]


X = {"x": ShapeSpec((ROWS, WIDTH), torch.float32)}


def test_what_is_held_in_an_evaluation() -> None:
    # The batch, what a layer makes and its tanh; from the second on also what came in.
    assert activations(forecast(Row(), X, page_bytes=PAGE, backward=False)) == [3, 4, 4, 4]


def test_what_is_held_in_training() -> None:
    forward = [3, 4, 5, 6]
    # A gradient of a weight takes two; from its arrival on it is an item. A read is followed by both products.
    backward = [9, 7, 8, 6, 7, 5, 2]
    trace = forecast(Row(), X, page_bytes=PAGE)
    assert WEIGHT == 2 * ACTIVATION
    assert activations(trace) == forward + backward
    assert [access.use for access in trace.accesses][LAYERS:] == [Use.READ, Use.CREATE] * 3 + [Use.CREATE]
    assert sum(item.nbytes for item in trace.items) == 2 * LAYERS * round_up(WEIGHT)


def test_checkpointing_holds_less() -> None:
    held = {}
    for kind in CHECKPOINTING:
        model, batch = build("llama", kind)
        held[kind] = max(access.held_bytes for access in forecast(model, batch, page_bytes=PAGE).accesses)
    assert held["non-reentrant"] < held["off"] * 2 // 3
    assert held["reentrant"] < held["off"] * 2 // 3


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_arithmetic_is_counted_as_torch_counts_it(kind: str) -> None:
    # Of eager attention torch knows all formulas, on every device.
    model, batch = build("llama", kind)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    trace = forecast(model, batch, page_bytes=PAGE, flops_s=1.0)
    assert trace.compute_s == counter.get_total_flops() > 0


def test_fused_operations_of_the_cpu_are_counted_too() -> None:
    model, batch = build("llama")
    fused = forecast(model, batch, page_bytes=PAGE, flops_s=1.0).compute_s
    model.set_attn_implementation("eager")  # type: ignore[operator]
    eager = forecast(model, batch, page_bytes=PAGE, flops_s=1.0).compute_s
    # The fused backward makes the scores once more.
    assert eager < fused < 1.1 * eager


def test_experts_are_counted_by_the_rows_they_get() -> None:
    hidden, inner, tokens, chosen = 64, 96, 24, 2
    model, batch = build("mixtral")
    trace = forecast(model, batch, page_bytes=PAGE, backward=False, flops_s=1.0)
    experts = [a for a in trace.accesses if "down_proj" in trace.items[a.item].name]
    matrices = 3
    assert [access.compute_s for access in experts[:2]] == [2 * tokens * chosen * hidden * inner * matrices] * 2


def test_bytes_are_those_of_inputs_and_outputs() -> None:
    trace = forecast(Row(), X, page_bytes=PAGE, backward=False, bytes_s=1.0)
    # A product reads the weight and an activation and writes one; tanh reads one and writes one.
    assert [access.compute_s for access in trace.accesses] == [WEIGHT + 4 * ACTIVATION] * LAYERS
    slower = forecast(Row(), X, page_bytes=PAGE, backward=False, bytes_s=1.0, flops_s=1.0)
    arithmetic = 2 * ROWS * WIDTH * WIDTH
    assert arithmetic > WEIGHT + 2 * ACTIVATION
    assert [access.compute_s for access in slower.accesses] == [arithmetic + 2 * ACTIVATION] * LAYERS


def test_an_embedding_reads_the_rows_it_gives() -> None:
    model = nn.Embedding(1 << 16, 16)
    trace = forecast(model, {"input": ShapeSpec((4, 8))}, page_bytes=PAGE, backward=False, bytes_s=1.0)
    ids, rows = 4 * 8 * 8, 4 * 8 * 16 * 4
    assert trace.compute_s == ids + 2 * rows


def test_without_rates_there_are_no_times() -> None:
    assert forecast(Row(), X, page_bytes=PAGE).compute_s == 0.0


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
            forecast(model, X, page_bytes=PAGE)
    else:
        assert forecast(model, X, page_bytes=PAGE).accesses
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
    trace = forecast(model, {"input_ids": ids, "labels": ids}, flops_s=4e14, bytes_s=3e12)
    grown = process.memory_info().rss - before
    assert grown < 256 << 20
    # Parameters and their gradients, less the norms, which are too small to move.
    large = sum(param.nbytes for param in model.parameters() if param.dim() > 1)
    assert trace.item_bytes == 2 * large > 20e9
    assert max(access.held_bytes for access in trace.accesses) > 4e9
    assert math.isclose(trace.compute_s, 6 * large / 2 * 2048 / 4e14, rel_tol=1.0)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_routing_by_values_is_refused() -> None:
    model, batch = build("mixtral")
    model.set_experts_implementation("eager")  # type: ignore[operator]
    with pytest.raises(
        UnsupportedError, match=r"cannot be forecast: the result of aten\.nonzero\S* does not"
    ) as caught:
        forecast(model, batch, page_bytes=PAGE)
    text = str(caught.value)
    assert re.search(r"after \d+ accesses, the last to model\.layers\.0\.\S+; batch: input_ids \(2, 12\)", text)
    assert "experts_implementation='grouped_mm'" in text


def test_a_model_on_pages_is_refused(tmp_path: Path) -> None:
    model = Row()
    engine = Engine.attach(model, config(host_memory="64MiB", disk=str(tmp_path)))
    with pytest.raises(UnsupportedError, match=r"layers.0 and 3 more .* on pages already.*before the model is attach"):
        forecast(model, X)
    engine.detach()
    assert forecast(model, X, page_bytes=PAGE).accesses


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
    with pytest.raises(UnsupportedError, match=r"no loss .* returned \['logits'\].*`labels`.*loss=.*backward=False"):
        forecast(model, batch, page_bytes=PAGE)
    trace = forecast(model, batch, page_bytes=PAGE, loss=lambda output: output.logits.float().mean())
    assert trace.accesses[-1].backward


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match=r"pass on cuda cannot .* finds 0 CUDA devices.*Leave `device` out"):
        forecast(Row(), X, device=torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_card_is_asked_for_the_same(precision: str) -> None:
    dtype, cast = PRECISIONS[precision]
    model, batch = build("llama", dtype=dtype)
    here = forecast(model, batch, autocast_dtype=cast, page_bytes=PAGE)
    free = torch.cuda.memory_allocated()
    there = forecast(model, batch, autocast_dtype=cast, page_bytes=PAGE, device=torch.device("cuda"))
    assert torch.cuda.memory_allocated() == free
    assert uses(there) == uses(here)
