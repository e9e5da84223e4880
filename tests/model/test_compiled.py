"""Compiled with pages equals compiled without, bit for bit, and adds neither graphs, breaks nor recompilations."""

from __future__ import annotations

import functools
import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.other import compile_regions
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.model.away import AwayParameter
from tests.model.nets import Builder, Net, Pair, compile_layers, inputs
from tests.plain_loop import same_bits
from tests.tiers import PAGE, on_pages
from tests.zoo import ENTRIES, use_checkpointing

Compile = Callable[..., nn.Module]

FITS = 16 << 20


@pytest.fixture(autouse=True)
def _clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _layers(model: Any) -> nn.ModuleList:
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def _per_layer(model: nn.Module, **options: Any) -> nn.Module:
    for layer in _layers(model):
        layer.compile(**options)
    return model


def _whole_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


WAYS: dict[str, Compile] = {
    "layer.compile()": _per_layer,
    "compile_regions": compile_regions,
    "torch.compile(model)": torch.compile,
    "model.compile()": _whole_in_place,
}
WHOLE = ("torch.compile(model)", "model.compile()")


@dataclass
class Run:
    """The numbers of three steps, and what Dynamo did."""

    losses: list[float] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    graphs: tuple[int, int] = (0, 0)
    evictions: int = 0


def _steps(
    run: Run, base: nn.Module, model: nn.Module, batch: Callable[[int], Any], engine: Engine | None, autocast: bool
) -> None:
    optimizer: Any = torch.optim.AdamW(base.parameters(), 1e-3, fused=True)
    if engine is not None:
        optimizer = engine.bind_optimizer(optimizer)
    torch.manual_seed(7)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch(step))
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        run.losses.append(loss.item())
        if engine is None:
            run.grads += [p.grad.clone() for p in base.parameters() if p.grad is not None]
        else:
            assert engine.gradients is not None
            present = [g.value for g in engine.gradients.present()]
            run.grads += [engine.pages.executor.snapshot(value).clone() for value in present if value is not None]
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: value.clone() for name, value in base.state_dict().items()}
    # A recompilation is one graph more.
    run.graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _train(
    base: nn.Module,
    compiled: Callable[[nn.Module], nn.Module],
    batch: Callable[[int], Any],
    directory: Path,
    *,
    budget: int | None = None,
    before: bool = False,
    autocast: bool = False,
    kind: str = "host+disk",
) -> Run:
    torch._dynamo.reset()
    counters.clear()
    run = Run()
    if budget is None:
        _steps(run, base, compiled(base), batch, None, autocast)
        return run
    model = compiled(base) if before else base
    with on_pages(base, kind, budget, directory) as engine:
        if not before:
            model = compiled(base)
        _steps(run, base, model, batch, engine, autocast)
        run.evictions = engine.pool.stats.evictions
    return run


def _assert_same(ours: Run, plain: Run) -> None:
    assert ours.losses == plain.losses
    assert len(ours.grads) == len(plain.grads)
    assert all(map(same_bits, ours.grads, plain.grads))
    assert ours.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        assert same_bits(ours.weights[name], value), name
    assert plain.graphs[0] > 0
    assert ours.graphs == plain.graphs


def _build(name: str, checkpointing: str) -> nn.Module:
    model = ENTRIES[name].build()
    use_checkpointing(model, checkpointing)
    return model


@functools.cache
def _plain(name: str, way: str, checkpointing: str = "off", autocast: bool = False) -> Run:
    compiled = functools.partial(WAYS[way], backend="aot_eager")
    base = _build(name, checkpointing)
    return _train(base, compiled, ENTRIES[name].batch_at, Path(), autocast=autocast)


def _tight(name: str, way: str, directory: Path) -> int:
    """A budget just above what one region (or the least forward) needs."""
    base = _build(name, "off")
    with on_pages(base, "host+disk", FITS, directory) as engine:
        part = base if way in WHOLE else _layers(base)[0]
        region = sum(2 * p.nbytes for p in part.parameters())
        return engine.needs.floor.total_bytes + region + 32 * PAGE


BOTH = (False, True)
CASES = [
    *(("llama", way, "off", False, tight) for way in WAYS if way not in WHOLE for tight in BOTH),
    *(("llama", way, "off", False, True) for way in WHOLE),
    *(("gpt2", "layer.compile()", "off", False, tight) for tight in BOTH),
    ("llama-tied", "compile_regions", "off", False, True),
    ("llama", "compile_regions", "off", True, True),
    ("llama", "torch.compile(model)", "off", True, True),
    ("llama", "layer.compile()", "non-reentrant", False, True),
    ("llama", "compile_regions", "reentrant", False, True),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "way", "checkpointing", "autocast", "tight"), CASES)
def test_compiled_equals_compiled_without_pages(
    name: str, way: str, checkpointing: str, autocast: bool, tight: bool, tmp_path: Path
) -> None:
    plain = _plain(name, way, checkpointing, autocast)
    budget = _tight(name, way, tmp_path) if tight else FITS
    compiled = functools.partial(WAYS[way], backend="aot_eager")
    ours = _train(
        _build(name, checkpointing),
        compiled,
        ENTRIES[name].batch_at,
        tmp_path,
        budget=budget,
        before=way == "model.compile()",
        autocast=autocast,
    )
    _assert_same(ours, plain)
    assert (ours.evictions > 0) == tight


def test_on_a_device_with_late_copies(tmp_path: Path) -> None:
    way = "layer.compile()"
    compiled = functools.partial(WAYS[way], backend="aot_eager")
    budget = _tight("llama", way, tmp_path)
    ours = _train(
        _build("llama", "off"), compiled, ENTRIES["llama"].batch_at, tmp_path, budget=budget, kind="mock+host"
    )
    _assert_same(ours, _plain("llama", way))
    assert ours.evictions > 0


# ---- small modules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_region_recomputes_it_on_pages(reentrant: bool, tmp_path: Path) -> None:
    compiled = functools.partial(compile_layers, backend="aot_eager")
    plain = _train(Net(reentrant), compiled, inputs, tmp_path)
    ours = _train(Net(reentrant), compiled, inputs, tmp_path, budget=600 << 10)
    _assert_same(ours, plain)
    assert ours.evictions > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(tmp_path: Path) -> None:
    plain = _train(Net(), compile_layers, inputs, tmp_path)
    ours = _train(Net(), compile_layers, inputs, tmp_path, budget=600 << 10)
    _assert_same(ours, plain)
    assert ours.evictions > 0


def test_fullgraph(tmp_path: Path) -> None:
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    plain = _train(Net(), compiled, inputs, tmp_path)
    _assert_same(_train(Net(), compiled, inputs, tmp_path, budget=FITS), plain)


def test_pages_leave_between_layers(tmp_path: Path) -> None:
    net = compile_layers(Net(), backend="aot_eager")
    with on_pages(net, "host+disk", 600 << 10, tmp_path) as engine:
        loss = net(**inputs(0))
        away = [s.name for s in engine.slots if not s.value.place.resident]
        assert "layers.0.up.weight" in away
        assert not engine.pool.tenants.pinned()
        faults = engine.pool.stats.faults
        loss.backward()
        assert engine.pool.stats.faults > faults


def test_other_paged_models_do_not_recompile_this_one(tmp_path: Path) -> None:
    net = Builder()
    with on_pages(net, "host+disk", FITS, tmp_path) as engine:
        compiled = torch.compile(net, backend="eager")
        compiled(**inputs(0))
        graphs = counters["stats"]["unique_graphs"]
        with on_pages(Net(), "host+disk", FITS, tmp_path):
            compiled(**inputs(0))
        compiled(**inputs(0))
        assert counters["stats"]["unique_graphs"] == graphs > 0
        assert not engine.pool.tenants.pinned()


def test_a_parameter_from_outside_the_region_comes_in(tmp_path: Path) -> None:
    x = inputs(0)["x"].detach()
    wanted = Pair()(x)
    pair = Pair()
    with on_pages(pair, "host+disk", FITS, tmp_path) as engine:
        pair.reader = torch.compile(pair.reader, backend="aot_eager")
        for _ in range(2):
            slot = engine.slots.by_name["other.weight"]
            engine.pool.admission.evict(slot.value.block)
            loss = pair(x)
            assert torch.equal(loss, wanted)
            loss.backward()
        engine.zero_grad()


def test_its_modules_called_eagerly_still_fault(tmp_path: Path) -> None:
    net = Net()
    wanted = net(**inputs(0)).item()
    with on_pages(net, "host+disk", 600 << 10, tmp_path) as engine:
        compiled = compile_layers(net, backend="eager")
        assert compiled(**inputs(0)).item() == wanted
        for layer in net.layers:
            assert type(layer.up.weight) is AwayParameter  # type: ignore[union-attr]
        x = net.layers[0].forward(inputs(0)["x"])  # type: ignore[operator]
        assert not x.isnan().any()
        assert not engine.pool.tenants.pinned()


def test_an_exception_in_a_region_leaves_nothing_behind(tmp_path: Path) -> None:
    net = compile_layers(Net(), backend="eager")
    with on_pages(net, "host+disk", FITS, tmp_path) as engine:
        with pytest.raises(Exception, match="64"):
            net(torch.randn(8, 63))
        assert not engine.pool.tenants.pinned()
        assert type(net.layers[0].up.weight) is AwayParameter  # type: ignore[union-attr]


def test_detach_gives_the_compiled_plain_model_back(tmp_path: Path) -> None:
    net = Net()
    compiled = compile_layers(net, backend="eager")
    wanted = compiled(**inputs(0)).item()
    entries = [layer._compiled_call_impl for layer in net.layers]
    engine = Engine.attach(net, PTMConfig(host_memory=FITS, page_size=PAGE))
    assert net.layers[0]._compiled_call_impl is not entries[0]
    assert net(**inputs(0)).item() == wanted
    engine.detach()
    assert [layer._compiled_call_impl for layer in net.layers] == entries
    assert type(net.layers[0].up._parameters) is dict
    assert not net.layers[0].up._forward_hooks
    assert net(**inputs(0)).item() == wanted


def test_refresh_finds_what_was_compiled_on_pages(tmp_path: Path) -> None:
    net, early = Net(), Net()
    wrapped = torch.compile(early, backend="eager")
    for module, compiled in ((net, None), (early, wrapped)):
        with on_pages(module, "host+disk", FITS, tmp_path) as engine:
            if compiled is None:
                module.compile(backend="eager")
            engine.follow(compiled)
            assert [region.name for region in engine.residency.regions.running()] == ["the model"]
            (module if compiled is None else compiled)(**inputs(0)).backward()
            engine.zero_grad()


def test_a_model_collected_while_something_is_traced_gives_its_memory_back() -> None:
    net = Net()
    engine = Engine.attach(net, PTMConfig(host_memory=FITS, page_size=PAGE))
    memory = engine.memory
    with FakeTensorMode():
        del net, engine
        gc.collect()
    assert memory.closed
    assert not list(memory.pool.tensors())
