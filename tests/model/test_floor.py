"""The least budget: enough for every phase, refused one byte below, and not far from what is really needed.

That each model of the zoo trains at its floor is part of `tests/test_equality.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, DeviceBudgetError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.memory.transfer import round_up
from ptm_accel.memory.windows import window_elements
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.attach import take_parameters
from ptm_accel.model.floor import FUSED_ADAMW, NO_OPTIMIZER, Floor, OptimizerMemory, least_budget
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.pages import Pages
from ptm_accel.runtime.executor import Executor
from tests.mock_device import MockDevice
from tests.plain_loop import Recipe, adamw, assert_same, sgd, train, train_with_masters
from tests.tiers import LITTLE, PAGE, config, needs, on_pages, open_memory
from tests.zoo import ENTRIES, MORE

pytestmark = pytest.mark.usefixtures("exact_figures")
KIB = 1 << 10
ALL = ENTRIES | MORE


def floor_of(
    model: nn.Module, optimizer_memory: OptimizerMemory = FUSED_ADAMW, *, masters: bool = False, held: int = 0
) -> Floor:
    pool = build_memory(Capacities(page_bytes=PAGE, host_bytes=1 << 30), torch.device("cpu")).pool
    slots = SlotTable()
    take_parameters(model, Executor(pool), slots, ExtentTable(pool.stats), small=PAGE // 64, paged={})
    return least_budget(model, slots, optimizer_memory, masters=masters, window_bytes=PAGE, held_bytes=held)


def unfused(model: nn.Module) -> torch.optim.Optimizer:
    """The AdamW that needs the most room: what it computes with lies beside its state."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def linear(width: int, height: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(width, height, bias=bias, device="meta", dtype=dtype)


def test_windows() -> None:
    assert [window_elements(n, 4) for n in (1, 4096, 16384, 16385, 65536)] == [4096, 4096, 4096, 4096, 16384]
    assert window_elements(4 << 20, 2) == 2 << 20


def test_one_layer() -> None:
    model = linear(64, 64)
    floor = floor_of(model)
    weights = 64 * 64 * 4
    assert floor.fixed_bytes == weights  # room for its gradient
    # The first update: parameter and gradient, and the two moments that are made.
    assert floor.moving_bytes == 4 * weights
    assert floor.total_bytes == 5 * weights
    assert floor.states_bytes == 4 * weights
    assert floor.whole_bytes == 4 * weights + weights + 4 * weights
    assert floor.reason == "the update of all of weight (16384 B)"


def test_a_parameter_that_is_cut_is_updated_by_windows() -> None:
    floor = floor_of(linear(64, 1024))
    window = 4096 * 4
    # Parameter and gradient, the moments as they are made, and the windows they go to.
    assert floor.moving_bytes == max(6 * window, 1024 * 64 * 4 * 3 // 2)
    assert floor.reason == "the parameters that the model itself uses at once; the largest is weight, 256.00 KiB"


@pytest.mark.parametrize(
    ("optimizer_memory", "tensors"),
    [
        (NO_OPTIMIZER, 2),
        (OptimizerMemory(state_tensors=1), 3),
        (OptimizerMemory(state_tensors=2, scratch_tensors=3), 7),
    ],
)
def test_optimizer_memory(optimizer_memory: OptimizerMemory, tensors: int) -> None:
    assert floor_of(linear(64, 64), optimizer_memory).moving_bytes == tensors * 64 * 64 * 4


def test_whole_updates_need_the_whole_tensor() -> None:
    model = linear(64, 1024)
    whole = floor_of(model, OptimizerMemory(state_tensors=1, whole=True))
    assert whole.moving_bytes == 3 * 1024 * 64 * 4
    assert whole.reason == "the update of all of weight (256.00 KiB)"


def test_masters() -> None:
    floor = floor_of(linear(64, 64, dtype=torch.bfloat16), masters=True)
    narrow, wide = 64 * 64 * 2, 64 * 64 * 4
    assert floor.fixed_bytes == narrow
    # Parameter, fp32 sum of gradients and its fp32 copy, master, two moments.
    assert floor.moving_bytes == narrow + wide + wide + wide + 2 * wide
    assert floor.states_bytes == narrow + wide + wide + 2 * wide


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = nn.Sequential(linear(64, 64), linear(64, 16))
    model[0].requires_grad_(False)
    floor = floor_of(model)
    assert floor.fixed_bytes == 64 * 16 * 4
    assert floor.states_bytes == 64 * 64 * 4 + 4 * 64 * 16 * 4
    assert floor_of(model.requires_grad_(False)).fixed_bytes == 0


def test_small_tensors_and_buffers_are_there_at_all_times() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, device="meta"))
            self.register_buffer("mean", torch.empty(100, device="meta"))

    floor = floor_of(Normed(), held=12345)
    assert floor.fixed_bytes == 400 + 12345 + 4 * PAGE + 32


def test_modules_inside_each_other_add_up() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.empty(1024, 64, device="meta"))
            self.inner = nn.Sequential(linear(64, 512), linear(64, 2048))

    floor = floor_of(Outer())
    assert floor.moving_bytes == (1024 + 2048) * 64 * 4 * 3 // 2
    assert floor.reason == "the parameters that inner.1 uses at once; the largest is inner.1.weight, 512.00 KiB"


def test_a_module_with_parameters_of_its_own_may_use_its_childrens() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.empty(64, 64, device="meta"))
            self.a, self.b = linear(64, 1024), linear(64, 2048)

    assert floor_of(Mixer()).moving_bytes == (64 + 1024 + 2048) * 64 * 4 * 3 // 2


def test_bf16_parameters_have_no_copies() -> None:
    floor = floor_of(linear(64, 4096, dtype=torch.bfloat16))
    assert floor.moving_bytes == 4096 * 64 * 2


def test_a_layer_that_is_recomputed_meets_the_parameters_that_wait_for_it() -> None:
    layer = nn.Sequential(linear(64, 4096), linear(64, 1024))
    assert floor_of(layer).moving_bytes == 4096 * 64 * 4 * 3 // 2
    floor = floor_of(nn.ModuleList([layer, linear(64, 4096)]))
    assert floor.moving_bytes == 2 * 4096 * 64 * 4 * 3 // 2
    assert floor.reason.endswith("that 0.0 uses at once; the largest is 0.0.weight, 1.00 MiB, while 0 is recomputed")
    head = nn.ModuleDict({"layers": nn.ModuleList([linear(64, 1024)]), "head": linear(64, 4096)})
    assert floor_of(head).moving_bytes == 4096 * 64 * 4 * 3 // 2


def test_the_sum_of_gradients_can_decide() -> None:
    floor = floor_of(nn.Embedding(4096, 64, device="meta", dtype=torch.bfloat16), masters=True)
    assert floor.moving_bytes == 4096 * 64 * (2 + 4)
    assert floor.reason == "the gradient of weight (512.00 KiB)"


# ---- against the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("kind", ["host+disk", "mock+host"])
def test_a_byte_less_is_refused_with_the_figure_and_the_name(name: str, kind: str, tmp_path: Path) -> None:
    model = ENTRIES[name].build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    floor, least = (needs(model, tmp_path, kind, optimizer=optimizer)[0] for optimizer in (adamw, sgd))
    assert least <= floor
    memory = open_memory(kind, least - 1, tmp_path)
    with pytest.raises(BudgetError) as caught:
        Engine.attach(model, config(), memory=memory)
    option = "host_memory" if kind == "host+disk" else "device_memory"
    assert str(caught.value).startswith(f"{option} is ")
    enough, _ = needs(model, tmp_path, kind, optimizer=unfused)
    assert floor <= enough
    more = f" (with AdamW; an optimizer without state needs {least}B)" if least < enough else ""
    assert str(caught.value).endswith(f"Set {option} to at least {enough}B{more}.")
    named = re.findall(
        r"(?:the update of (?:all|a window) of|the largest is|the gradient of) ([\w.]+)", str(caught.value)
    )
    assert named
    assert named[0] in before
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5", "mamba"])
def test_what_is_used_comes_close_to_the_floor(name: str, tmp_path: Path) -> None:
    """With all that can be asked for at once (checkpointing, autocast, accumulation) or without."""
    entry = ENTRIES[name]
    floor, _ = needs(entry.build(), tmp_path, "host+disk")
    peaks = []
    for recipe in (Recipe(), Recipe(accumulation=2, checkpointing="non-reentrant", autocast=torch.bfloat16)):
        model = entry.build()
        with on_pages(model, "host+disk", floor, tmp_path) as engine:
            train(model, entry, recipe, engine)
            assert max(t.slot_bytes for t in engine.pool.tensors()) < floor
            peaks.append(engine.pool.budget.peak_bytes)
    assert 0.95 * floor <= max(peaks) <= floor


def test_with_less_than_the_floor_training_would_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an update decides the figure is what is needed, to the page."""
    entry = ENTRIES["llama"]
    floor, _ = needs(entry.build(), tmp_path, "host+disk")
    monkeypatch.setattr("ptm_accel.needs.refuse_short", lambda *given: None)
    model = entry.build()
    with on_pages(model, "host+disk", floor - PAGE, tmp_path) as engine:
        with pytest.raises(BudgetError, match="cannot place"):
            train(model, entry, Recipe(), engine)
        engine.zero_grad()


NARROW = torch.bfloat16


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (Recipe(accumulation=2), {}),
        (Recipe(autocast=NARROW), {}),
        (Recipe(accumulation=2, autocast=NARROW, checkpointing="non-reentrant"), {}),
        (Recipe(accumulation=2), {"master_weights": "fp32"}),
        (Recipe(optimizer=sgd), {}),
    ],
    ids=["plain", "autocast", "checkpointed", "masters", "sgd"],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_without_a_backing_store_there_is_a_figure_too(
    name: str, recipe: Recipe, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM alone: what holds all states and a step beside them is enough, and a byte less is refused."""
    entry = ENTRIES[name]

    def build() -> nn.Module:
        return entry.build().to(NARROW) if options else entry.build()

    def attach(capacity: int) -> tuple[nn.Module, Engine]:
        model = build()
        memory = build_memory(Capacities(page_bytes=PAGE, host_bytes=capacity), torch.device("cpu"))
        return model, Engine.attach(model, config(**options), memory=memory)

    with monkeypatch.context() as patch:
        patch.setattr(Pages, "grouped", False)
        model, engine = attach(1 << 26)
    engine.bind_optimizer(recipe.optimizer(model))
    whole, states = engine.needs.floor.whole_bytes, engine.needs.floor.states_bytes
    engine.close()
    assert states < whole

    model, engine = attach(whole)
    ours = train(model, entry, recipe, engine)
    engine.check_integrity()
    engine.close()
    plain = train_with_masters(build(), entry, recipe) if options else train(build(), entry, recipe)
    assert_same(ours, plain)

    with pytest.raises(BudgetError) as caught:  # noqa: PT012 - which of the two says no depends on the optimizer
        model, engine = attach(whole - 1)
        engine.bind_optimizer(recipe.optimizer(model))
    assert "with no tier below for what does not fit" in str(caught.value)
    figure = r"Set disk to a directory on an SSD, or host_memory to at least (\d+)B(?: \(with AdamW; .* (\d+)B\))?\.$"
    named = re.search(figure, str(caught.value))
    assert named
    assert str(whole) in named.groups()
    engine.close()


def test_parameters_that_fit_nowhere_are_refused_at_once(tmp_path: Path) -> None:
    model = ENTRIES["llama"].build()
    floor, _ = needs(model, tmp_path, "mock+host")
    memory = build_memory(Capacities(page_bytes=PAGE, host_bytes=floor + 16 * KIB), torch.device("cpu"))
    with pytest.raises(BudgetError, match="the states of this model take .* with no tier below"):
        Engine.attach(model, config(), memory=memory)


def _figure(error: BudgetError) -> int:
    """What the message names for AdamW, which it does not know yet."""
    found = re.search(r"(\d+)B \(with AdamW; an optimizer without state needs \d+B\)\.$", str(error))
    assert found, str(error)
    return int(found[1])


def test_who_sets_the_figure_for_adamw_is_not_refused_again() -> None:
    """A model comes onto pages before there is an optimizer; its state must have a place as well."""

    def attach(capacity: int) -> Engine:
        memory = build_memory(Capacities(page_bytes=PAGE, host_bytes=capacity), torch.device("cpu"))
        return Engine.attach(ENTRIES["llama"].build(), config(), memory=memory)

    floor = floor_of(ENTRIES["llama"].build(), NO_OPTIMIZER)
    with pytest.raises(BudgetError) as caught:
        attach(floor.whole_bytes - 1)
    engine = attach(_figure(caught.value))
    engine.bind_optimizer(unfused(engine.model))
    engine.close()
    engine = attach(_figure(caught.value) - 1)
    with pytest.raises(BudgetError, match=r"host_memory to at least \d+B\.$"):
        engine.bind_optimizer(unfused(engine.model))
    engine.close()


def test_who_raises_the_disk_by_the_figure_for_adamw_is_not_refused_again(tmp_path: Path) -> None:
    least, _ = needs(ENTRIES["llama"].build(), tmp_path, "host+disk")

    def attach(disk_bytes: int) -> Engine:
        sizes = Capacities(page_bytes=PAGE, host_bytes=least, disk_paths=[tmp_path], disk_bytes=disk_bytes)
        memory = build_memory(sizes, torch.device("cpu"))
        return Engine.attach(ENTRIES["llama"].build(), config(), memory=memory)

    with pytest.raises(BudgetError, match=r"Raise the limit of disk, or add a path, by at least \d+B ") as caught:
        attach(2 * PAGE)
    enough = 2 * PAGE + _figure(caught.value)
    engine = attach(enough)
    engine.bind_optimizer(adamw(engine.model))
    engine.close()
    engine = attach(enough - 1)
    with pytest.raises(BudgetError, match=r"Raise the limit of disk, or add a path, by at least 1B\.$"):
        engine.bind_optimizer(adamw(engine.model))
    engine.close()


def test_tiers_that_are_too_small_together_are_refused(tmp_path: Path) -> None:
    model = ENTRIES["llama"].build()
    floor, need = needs(model, tmp_path, "mock+host")
    memory = open_memory("mock+host", floor, tmp_path, host_bytes=need // 8)
    with pytest.raises(BudgetError) as caught:
        Engine.attach(model, config(), memory=memory)
    assert "the tiers below hold too little of them (host " in str(caught.value)
    assert re.search(r"\)\. Set disk, or raise host_memory by at least \d+B", str(caught.value))


@pytest.mark.parametrize("kind", ["host+disk", "mock+host"])
def test_an_optimizer_with_a_larger_optimizer_memory_is_refused_when_it_comes(kind: str, tmp_path: Path) -> None:
    model = ENTRIES["gpt2"].build()
    floor, _ = needs(model, tmp_path, kind)
    with on_pages(model, kind, floor, tmp_path) as engine:
        with pytest.raises(BudgetError, match=r"cannot train under less than .* for the update of all of ") as caught:
            engine.bind_optimizer(torch.optim.RMSprop(model.parameters(), lr=1e-3))
        assert not isinstance(caught.value, DeviceBudgetError)
        assert engine.optimizer is None
        engine.bind_optimizer(adamw(model))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["host+disk", "mock+host", "mock+host+disk"])
def test_what_is_enough_for_one_optimizer_is_refused_to_another_when_it_comes(kind: str, tmp_path: Path) -> None:
    entry = ENTRIES["t5"]
    floor, least = (needs(entry.build(), tmp_path, kind, optimizer=optimizer)[0] for optimizer in (adamw, sgd))
    assert least < floor
    plain = train(entry.build(), entry, Recipe(optimizer=sgd, accumulation=2))
    model = entry.build()
    with on_pages(model, kind, least, tmp_path) as engine:
        with pytest.raises(BudgetError, match=f"cannot train under less than .* to at least {floor}B[.]$"):
            engine.bind_optimizer(adamw(model))
        assert engine.optimizer is None
        assert_same(train(model, entry, Recipe(optimizer=sgd, accumulation=2), engine), plain)
        kept = engine.optimizer
        with pytest.raises(BudgetError, match=f"cannot train under less than .* to at least {floor}B[.]$"):
            engine.bind_optimizer(adamw(model))
        assert engine.optimizer is kept
        assert engine.needs.floor.total_bytes == least


def test_the_landing_is_part_of_the_floor(tmp_path: Path) -> None:
    model = ENTRIES["llama"].build()
    floor, _ = needs(model, tmp_path, "mock+host")
    with on_pages(model, "mock+host", floor, tmp_path) as engine:
        landing = engine.pool.budget.used_by_tag()[Tag.GRAD]
        assert landing == max(p.numel() * 4 for p in model.parameters())
        assert engine.needs.floor.fixed_bytes >= landing
        assert engine.needs.floor.fixed_bytes <= landing + round_up(1 << 10)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(), lambda: nn.ReLU()])
def test_a_model_without_parameters(make: Callable[[], nn.Module]) -> None:
    assert floor_of(make()) == Floor(0, 0, 0, 0, 0, 0, "the model")


# ---- figures that work -----------------------------------------------------------------------------------------------


def _named(error: BudgetError) -> dict[str, int]:
    """The budgets that a refusal names, by setting: what it is to be, or what it is to be raised by."""
    patterns = {
        "device": r"Set device_memory to at least (\d+)B",
        "host": r"an SSD(?: and host_memory to at least \d+B)?, or host_memory to at least (\d+)B"
        r"|Set host_memory to at least (\d+)B",
        "below": r"(?:Set disk, or raise host_memory|Raise the limit of disk, or add a path,) by at least (\d+)B",
    }
    found = {key: re.search(pattern, str(error)) for key, pattern in patterns.items()}
    return {key: int(next(filter(None, match.groups()))) for key, match in found.items() if match}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("page", [PAGE, 4 * PAGE])
@pytest.mark.parametrize("tiers", ["host", "host+disk", "device+host", "device+host+disk"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("checkpointing", ["off", "non-reentrant"])
@pytest.mark.parametrize("name", ALL)
def test_the_figures_of_one_refusal_are_enough(
    name: str, checkpointing: str, accumulation: int, tiers: str, page: int, tmp_path: Path
) -> None:
    entry = ALL[name]
    if checkpointing not in entry.checkpointing:
        checkpointing = "off"
    recipe = Recipe(checkpointing=checkpointing, accumulation=accumulation, steps=3)
    disk = [tmp_path] if "disk" in tiers else []
    host = LITTLE if tiers == "device+host+disk" else 3 * page
    sizes = Capacities(
        page_bytes=page,
        host_bytes=host,
        device_bytes=page if "device" in tiers else None,
        disk_paths=disk,
        disk_bytes=3 * page if disk else None,
    )

    def attach(sizes: Capacities) -> tuple[Memory, Engine]:
        memory = build_memory(sizes, MockDevice() if "device" in tiers else torch.device("cpu"))
        try:
            return memory, Engine.attach(entry.build(), config(page_size=page), memory=memory)
        except BudgetError:
            memory.close()
            raise

    with pytest.raises(BudgetError) as caught:
        attach(sizes)
    figures = _named(caught.value)
    assert ("device" in figures) == ("device" in tiers), str(caught.value)
    if "device" in figures:
        sizes = replace(sizes, device_bytes=figures["device"])
    if "host" in figures:
        sizes = replace(sizes, host_bytes=figures["host"])
    if disk:
        sizes = replace(sizes, disk_bytes=3 * page + figures["below"])
    elif "below" in figures:
        sizes = replace(sizes, host_bytes=host + figures["below"])
    memory, engine = attach(sizes)
    ours = train(engine.model, entry, recipe, engine)
    engine.check_integrity()
    engine.close()
    memory.close()
    assert_same(ours, train(entry.build(), entry, recipe))


@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
def test_a_parameter_that_a_recomputed_layer_is_given_is_brought_in(checkpointing: str, tmp_path: Path) -> None:
    """DeBERTa hands the weight of its relative embeddings on to each layer, which reads no module of it."""
    entry, recipe = MORE["deberta"], Recipe(checkpointing=checkpointing, accumulation=2, steps=3)
    sizes = Capacities(page_bytes=4 * PAGE, host_bytes=12 * PAGE, disk_paths=[tmp_path])
    with pytest.raises(BudgetError) as caught:
        Engine.attach(entry.build(), config(page_size=4 * PAGE), memory=build_memory(sizes, torch.device("cpu")))
    model, least = entry.build(), _named(caught.value)["host"]
    with on_pages(model, "host+disk", least, tmp_path, page_size=4 * PAGE) as engine:
        ours = train(model, entry, recipe, engine)
    assert_same(ours, train(entry.build(), entry, recipe))
