"""Models of one process that were given the same dials share them."""

from __future__ import annotations

import copy
import functools
import gc
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from ptm_accel import opening, paged_model, sharing
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.memory.budget import Tag, Tier
from ptm_accel.memory.card_memory import CardMemory
from ptm_accel.memory.scratch import scratch_bytes
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.memory.tide import MARGIN, Tide
from ptm_accel.model.floor import NO_OPTIMIZER
from ptm_accel.sharing import Claim, Need, Party, divide, share
from tests.card import Card, CardAllocator, CardTier
from tests.plain_loop import adamw, sgd
from tests.tiers import AMPLE, needs, open_memory

CPU = torch.device("cpu")


def model(seed: int = 0, width: int = 64, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def dials(nbytes: int, directory: Path, **more: object) -> PTMConfig:
    return PTMConfig(host_memory=nbytes, page_size=4096, disk=str(directory), **more)  # type: ignore[arg-type]


@pytest.fixture
def attached() -> Iterator[list[Engine]]:
    """Engines that are closed at the end."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


def attach(engines: list[Engine], module: nn.Module, config: PTMConfig, *, evaluates: bool = False) -> Engine:
    engine = Engine.attach(module, config, device=CPU, evaluates=evaluates)
    engines.append(engine)
    return engine


def limits(engines: list[Engine]) -> list[int]:
    return [engine.pool.room.limit_bytes for engine in engines]


def test_a_peak_from_before_the_budget_was_shared_is_told_as_such(attached: list[Engine], tmp_path: Path) -> None:
    config = dials(256 << 10, tmp_path)
    first = attach(attached, model(layers=16), config)
    first.model(torch.ones(1, 64)).sum().backward()
    assert "(more before it was shared)" not in first.metrics.summary()
    attach(attached, model(1, layers=16), config)
    [limit, _] = limits(attached)
    assert limit < first.metrics.peaks()[Tier.HOST]
    assert re.search(r"peak host \S+ KiB of \S+ KiB \(more before it was shared\), disk ", first.metrics.summary())


# ---- the division ----------------------------------------------------------------------------------------------------


def test_a_division_gives_the_least_and_then_by_use() -> None:
    assert divide(100, [Need(10, 50), Need(20, 100)]) == [10 + 70 * 40 // 120, 20 + 70 * 80 // 120]


def test_where_all_fits_it_fits_still() -> None:
    assert divide(300, [Need(10, 50), Need(20, 100)]) == [100, 200]


def test_less_than_all_need_cannot_be_divided() -> None:
    assert divide(29, [Need(10, 50), Need(20, 100)]) is None
    assert divide(30, [Need(10, 50), Need(20, 100)]) == [10, 20]


@pytest.mark.parametrize("seed", range(50))
def test_parts_never_exceed_the_whole_nor_fall_below_the_least(seed: int) -> None:
    rng = random.Random(seed)
    asked = []
    for _ in range(rng.randint(1, 5)):
        least = rng.randrange(1000)
        asked.append(Need(least, least + rng.randrange(5000)))
    capacity = rng.randrange(20000)
    parts = divide(capacity, asked)
    if parts is None:
        assert capacity < sum(need.least for need in asked)
        return
    assert sum(parts) <= capacity
    fits = sum(need.whole for need in asked) <= capacity
    for part, need in zip(parts, asked, strict=True):
        assert need.least <= part
        assert part >= need.whole if fits else part <= need.whole


# ---- two models ------------------------------------------------------------------------------------------------------


def train(module: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss = module(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_two_models_train_within_one_budget_to_the_same_numbers(tmp_path: Path, attached: list[Engine]) -> None:
    floors = [needs(model(seed, layers=layers), tmp_path, "host+disk")[0] for seed, layers in ((0, 4), (1, 8))]
    capacity = sum(floors) + (16 << 10)
    plain = [model(0), model(1, layers=8)]
    paged = copy.deepcopy(plain)
    steppers = []
    for module in paged:
        engine = attach(attached, module, dials(capacity, tmp_path))
        steppers.append(engine.bind_optimizer(torch.optim.AdamW(module.parameters(), fused=True)))
    assert sum(limits(attached)) <= capacity
    assert all(limit >= engine.floor.total_bytes for limit, engine in zip(limits(attached), attached, strict=True))
    stock = [torch.optim.AdamW(module.parameters(), fused=True) for module in plain]
    for step in range(4):
        for index in range(2):
            batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + index))
            assert train(paged[index], steppers[index], batch) == train(plain[index], stock[index], batch)
    assert sum(engine.pool.budget.peak_bytes for engine in attached) <= capacity
    for module, oracle in zip(paged, plain, strict=True):
        ours, theirs = module.state_dict(), oracle.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for engine in attached:
        engine.check_integrity()


def test_one_that_comes_in_the_middle_of_training_takes_its_part_then(tmp_path: Path, attached: list[Engine]) -> None:
    plain = model()
    paged = copy.deepcopy(plain)
    floor, whole = needs(model(), tmp_path, "host+disk")
    first = attach(attached, paged, dials(floor + whole, tmp_path))
    optimizers = [torch.optim.AdamW(module.parameters(), fused=True) for module in (plain, paged)]
    stepper = first.bind_optimizer(optimizers[1])
    batch = torch.ones(4, 64)
    for step in range(6):
        assert train(paged, stepper, batch) == train(plain, optimizers[0], batch)
        if step == 2:
            assert not first.run_ahead.enabled, "all of it fitted"
            attach(attached, model(1), dials(floor + whole, tmp_path))
            assert first.run_ahead.enabled
            assert first.pool.budget.used_bytes <= first.pool.budget.capacity_bytes < whole
            assert sum(limits(attached)) <= floor + whole
    first.check_integrity()


def test_too_little_for_both_is_refused_before_anything_changes(tmp_path: Path, attached: list[Engine]) -> None:
    floor = needs(model(), tmp_path, "host+disk")[0]
    least = needs(model(), tmp_path, "host+disk", optimizer=sgd)[0]
    assert least < floor
    # The first one came when there was room for AdamW.
    capacity = floor + least - 1
    first = attach(attached, model(), dials(capacity, tmp_path))
    second = model(1)
    values = [param.detach().clone() for param in second.parameters()]
    figures = rf"2 of them cannot train.* to at least {floor + least} bytes \({2 * floor} with AdamW's state"
    with pytest.raises(BudgetError, match=figures):
        Engine.attach(second, dials(capacity, tmp_path), device=CPU)
    assert all(torch.equal(param, value) for param, value in zip(second.parameters(), values, strict=True))
    assert limits([first]) == [capacity]
    first.close()
    first, other = attach(attached, model(), dials(capacity + 1, tmp_path)), second
    engine = attach(attached, other, dials(capacity + 1, tmp_path))
    with pytest.raises(BudgetError, match=rf"2 of them cannot train.* to at least {2 * floor} bytes, or take"):
        engine.bind_optimizer(adamw(other))
    engine.bind_optimizer(sgd(other))
    assert limits([first, engine]) == [floor, least]


def test_who_cannot_give_way_keeps_what_it_has(tmp_path: Path, attached: list[Engine]) -> None:
    floor, whole = needs(model(), tmp_path, "host+disk")
    first = attach(attached, model(), dials(floor + whole, tmp_path))
    room = first.pool.room
    with room.reserve(room.budget.free_bytes, Tag.STATE, "what the test holds"):
        with pytest.raises(BudgetError, match="what is there already"):
            Engine.attach(model(1), dials(floor + whole, tmp_path), device=CPU)
        assert limits([first]) == [floor + whole]
    attach(attached, model(1), dials(floor + whole, tmp_path))


def test_a_model_that_goes_leaves_its_part_to_the_others(tmp_path: Path, attached: list[Engine]) -> None:
    floor = needs(model(), tmp_path, "host+disk")[0]
    config = dials(3 * floor, tmp_path)
    first = attach(attached, model(), config)
    second = Engine.attach(model(1), config, device=CPU)
    assert limits([first])[0] < 3 * floor
    second.close()
    assert limits([first]) == [3 * floor]
    third = model(2)
    engine = Engine.attach(third, config, device=CPU)
    assert limits([first])[0] < 3 * floor
    engine.detach()
    assert limits([first]) == [3 * floor]


def test_a_model_that_nobody_uses_any_more_has_no_part(tmp_path: Path, attached: list[Engine]) -> None:
    floor = needs(model(), tmp_path, "host+disk")[0]
    config = dials(2 * floor - 4096, tmp_path)
    gc.collect()
    gc.disable()
    try:
        # Nobody has it any more, but it is in a cycle.
        Engine.attach(model(), config, device=CPU)
        engine = attach(attached, model(1), config)
    finally:
        gc.enable()
    assert engine.party is not None
    assert engine.party.others() == []
    assert limits(attached) == [2 * floor - 4096]


def test_other_dials_are_other_budgets(tmp_path: Path, attached: list[Engine]) -> None:
    floor = needs(model(), tmp_path, "host+disk")[0]
    attach(attached, model(), dials(2 * floor, tmp_path))
    attach(attached, model(1), dials(2 * floor + 4096, tmp_path))
    assert limits(attached) == [2 * floor, 2 * floor + 4096]


def test_what_is_only_evaluated_gets_less(tmp_path: Path, attached: list[Engine]) -> None:
    floor, whole = needs(model(), tmp_path, "host+disk")
    config = dials(floor + whole, tmp_path)
    trained = attach(attached, model(), config)
    evaluated = attach(attached, model(1), config, evaluates=True)
    assert limits([trained])[0] > limits([evaluated])[0] >= floor
    uneven = limits([trained])[0]
    # Once it has an optimizer it is trained after all.
    evaluated.bind_optimizer(torch.optim.AdamW(evaluated.model.parameters(), fused=True))
    assert limits([trained])[0] < uneven
    assert abs(limits([trained])[0] - limits([evaluated])[0]) <= 1
    # An engine that was there before may turn out to be a reference.
    third = attach(attached, model(2), dials(4 * floor + whole, tmp_path))
    fourth = attach(attached, model(3), dials(4 * floor + whole, tmp_path))
    even = limits([third])[0]
    assert Engine.attach(fourth.model, evaluates=True) is fourth
    assert limits([third])[0] > even


def test_an_optimizer_that_needs_less_leaves_more(tmp_path: Path, attached: list[Engine]) -> None:
    floor, whole = needs(model(), tmp_path, "host+disk")
    config = dials(floor + whole, tmp_path)
    first = attach(attached, model(), config)
    second = attach(attached, model(1), config)
    before = limits([second])[0]
    first.bind_optimizer(torch.optim.SGD(first.model.parameters(), fused=True))
    assert limits([second])[0] > before
    assert sum(limits(attached)) <= floor + whole


# ---- who comes, fails and goes ---------------------------------------------------------------------------------------


def step(engine: Engine) -> None:
    assert engine.optimizer is not None
    train(engine.model, engine.optimizer, torch.ones(2, 64))  # type: ignore[arg-type]


def trained(engines: list[Engine], config: PTMConfig, seed: int = 0) -> Engine:
    engine = attach(engines, model(seed), config)
    engine.bind_optimizer(torch.optim.AdamW(engine.model.parameters(), fused=True))
    return engine


def test_a_model_that_is_being_read_has_its_part_already_and_leaves_it_if_it_fails(
    tmp_path: Path, attached: list[Engine]
) -> None:
    floor = needs(model(), tmp_path, "host+disk")[0]
    config = dials(3 * floor, tmp_path)
    first = trained(attached, config)
    resolved, memory = opening.open_memory(config, device=CPU)
    Engine.rehearse(model(1), config, resolved, memory)
    assert limits([first])[0] + memory.pool.room.limit_bytes <= 3 * floor
    first.bind_optimizer(torch.optim.SGD(first.model.parameters(), lr=0.1))
    assert limits([first])[0] + memory.pool.room.limit_bytes <= 3 * floor
    memory.close()
    step(first)
    assert limits([first]) == [3 * floor]


def test_what_was_collected_leaves_its_part_with_the_next_step(tmp_path: Path, attached: list[Engine]) -> None:
    floor = needs(model(), tmp_path, "host+disk")[0]
    config = dials(3 * floor, tmp_path)
    first = trained(attached, config)
    Engine.attach(model(1), config, device=CPU)
    gc.collect()
    step(first)
    assert limits([first]) == [3 * floor]


def test_a_change_that_is_refused_leaves_all_parts_as_they_were(tmp_path: Path, attached: list[Engine]) -> None:
    floor = needs(model(), tmp_path, "host+disk")[0]
    config = dials(3 * floor, tmp_path)
    first, second = attach(attached, model(), config), attach(attached, model(1), config, evaluates=True)
    before = limits(attached)
    module = first.model
    assert isinstance(module, nn.Sequential)
    module.append(nn.Linear(64, 4096))
    with pytest.raises(BudgetError, match="2 of them cannot train"):
        first.follow()
    assert limits(attached) == before
    with pytest.raises(UnsupportedError):
        second.bind_optimizer(torch.optim.LBFGS(second.model.parameters()))
    assert (limits(attached), second.evaluates) == (before, True)


def test_the_disk_is_for_those_who_need_it_and_for_all_together(tmp_path: Path, attached: list[Engine]) -> None:
    floor = needs(model(), tmp_path, "host+disk")[0]
    nbytes = sum(param.nbytes for param in model().parameters())
    # Four tensors a parameter for the first, and for the second its values.
    folder = {"paths": [str(tmp_path)], "limit": 7 * nbytes}
    config = PTMConfig(host_memory=2 * floor, page_size=4096, disk=folder)
    first = trained(attached, config)
    second = attach(attached, model(1), config, evaluates=True)
    for _ in range(3):
        step(first)
    disks = [engine.memory.budgets[Tier.DISK] for engine in attached]
    assert sum(disk.used_bytes for disk in disks) <= 7 * nbytes
    assert sum(engine.memory.disk.size_bytes for engine in attached if engine.memory.disk) <= 7 * nbytes
    assert all(disk.free_bytes == disks[0].free_bytes for disk in disks)
    with pytest.raises(BudgetError, match="the states of 2 models of this process"):
        second.bind_optimizer(torch.optim.AdamW(second.model.parameters(), fused=True))
    assert second.evaluates
    step(first)


def test_what_the_first_has_on_disk_is_not_missing_for_the_second(
    tmp_path: Path, attached: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, before = tmp_path.stat().st_dev, scratch_bytes(tmp_path.stat().st_dev)
    free = 64 << 20
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=free - scratch_bytes(device) + before))
    config = PTMConfig(
        host_memory=2 * needs(model(), tmp_path, "host+disk")[0],
        page_size=4096,
        disk={"paths": [str(tmp_path)], "limit": free},
    )
    step(trained(attached, config))
    assert scratch_bytes(device) > before
    attach(attached, model(1), config, evaluates=True)


def test_without_a_disk_it_counts_what_is_known(tmp_path: Path, attached: list[Engine]) -> None:
    def sgd(engine: Engine) -> None:
        engine.bind_optimizer(torch.optim.SGD(engine.model.parameters(), lr=0.1))

    plain = needs(model(), tmp_path, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))[1]
    config = PTMConfig(host_memory=2 * plain + (8 << 10), page_size=4096)
    for seed in range(2):
        sgd(attach(attached, model(seed), config))
    for engine in attached:
        step(engine)
    assert sum(engine.pool.budget.peak_bytes for engine in attached) <= 2 * (2 * plain + (8 << 10))
    assert sum(limits(attached)) <= 2 * plain + (8 << 10)
    with pytest.raises(BudgetError, match="2 of them cannot train"):
        attached[1].bind_optimizer(torch.optim.AdamW(attached[1].model.parameters(), fused=True))


def fill(attached: list[Engine], config: PTMConfig) -> None:
    """Puts models on pages that share dials, more than can be."""
    for seed in range(99):
        attach(attached, model(seed, layers=8), config)


def test_a_compiled_region_is_part_of_the_least(tmp_path: Path, attached: list[Engine]) -> None:
    floor, whole = needs(model(layers=8), tmp_path, "host+disk")
    config = dials(whole, tmp_path)
    compiled = model(layers=8)
    compiled.compile(backend="eager")
    engine = attach(attached, compiled, config)
    assert engine.party is not None
    assert engine.party.claim is not None
    least = engine.party.claim.compute.least
    assert least > floor
    with pytest.raises(BudgetError, match="of them cannot train"):
        fill(attached, config)
    assert limits([engine])[0] >= least
    engine.bind_optimizer(torch.optim.AdamW(compiled.parameters(), fused=True))
    step(engine)


@pytest.mark.parametrize("which", [0, 1])
def test_nobody_gives_if_one_cannot(which: int, tmp_path: Path, attached: list[Engine]) -> None:
    floor, whole = needs(model(), tmp_path, "host+disk")
    config = dials(whole + 4 * floor, tmp_path)
    engines = [attach(attached, model(seed), config) for seed in range(2)]
    before = limits(attached)
    room = engines[which].pool.room
    with room.reserve(room.available_bytes(), Tag.STATE, "what the test holds"):
        with pytest.raises(BudgetError, match="what is there already"):
            Engine.attach(model(2), config, device=CPU)
        assert limits(attached) == before
    attach(attached, model(2), config)
    assert sum(limits(attached)) <= whole + 4 * floor


def test_nobody_comes_in_the_middle_of_a_step(tmp_path: Path, attached: list[Engine]) -> None:
    floor, whole = needs(model(layers=12), tmp_path, "host+disk")
    config = dials((floor + whole) // 2, tmp_path)
    plain, paged = model(layers=12), model(layers=12)
    first = attach(attached, paged, config)
    optimizers = [torch.optim.AdamW(module.parameters(), fused=True) for module in (plain, paged)]
    stepper = first.bind_optimizer(optimizers[1])
    first.updates_in_backward = lambda: True
    batch, begun = torch.ones(4, 64), 0
    for number in range(6):
        loss = paged(batch).square().mean()
        with first.backward():
            loss.backward()
        if stepper.in_backward.chase is not None:
            begun += 1
            with pytest.raises(UnsupportedError, match=r"between a backward and its optimizer.step\(\)"):
                Engine.attach(model(number), config, device=CPU)
        stepper.step()
        stepper.zero_grad()
        assert loss.item() == train(plain, optimizers[0], batch)
    assert begun
    attach(attached, model(9), config)


def test_a_division_that_fails_is_undone(tmp_path: Path) -> None:
    config, parties = PTMConfig(page_size=4096), []
    for _ in range(3):
        memory = open_memory("host+disk", AMPLE, tmp_path)
        memory.dials = {tier: budget.capacity_bytes for tier, budget in memory.budgets.items()}
        parties.append(Party(memory, config))
    claim = Claim("model", Need(1 << 20, 2 * AMPLE), 1, 0, 4096)
    for party in parties[:2]:
        share(party, claim)

    def refuse(capacities: object) -> None:
        raise BudgetError("no")

    for which in range(2):
        before = [party.memory.capacity_bytes(Tier.HOST) for party in parties]
        parties[which].resize = refuse
        with pytest.raises(BudgetError, match="^no$"):
            share(parties[2], claim)
        assert [party.memory.capacity_bytes(Tier.HOST) for party in parties] == before
        assert parties[2].claim is None
        parties[which].resize = parties[which].memory.resize
    share(parties[2], claim)
    assert sum(party.memory.capacity_bytes(Tier.HOST) for party in parties) <= AMPLE
    for party in parties:
        party.memory.close()


def test_who_gives_comes_before_who_takes_and_settles_first(
    tmp_path: Path, attached: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    floor, whole = needs(model(), tmp_path, "host+disk")
    config = dials(whole + floor, tmp_path)
    for seed in range(3):
        attach(attached, model(seed), config)
    stock, calls = Memory.resize, []

    def watched(memory: Memory, capacities: Mapping[Tier, int]) -> None:
        stock(memory, capacities)
        calls.append("resized")
        assert sum(limits(attached)) <= whole + floor

    def settling(engine: Engine) -> None:
        calls.append("settled")

    monkeypatch.setattr(Memory, "resize", watched)
    for engine in attached:
        monkeypatch.setattr(engine, "settle", functools.partial(settling, engine))
    # It needs less than was expected, the one after it more.
    attached[1].bind_optimizer(torch.optim.SGD(attached[1].model.parameters(), lr=0.1))
    calls.clear()
    attached[0].resize({Tier.HOST: limits(attached)[0] - 4096})
    assert calls == ["settled", "resized"]
    calls.clear()
    attached[0].resize({Tier.HOST: limits(attached)[0] + 4096})
    assert calls == ["resized"], "an update under way may go on beside more memory"


# ---- on a device -----------------------------------------------------------------------------------------------------


def on_device(directory: Path, nbytes: int, host_bytes: int) -> Memory:
    memory = open_memory("mock+host+disk", nbytes, directory, host_bytes=host_bytes)
    memory.dials = {tier: budget.capacity_bytes for tier, budget in memory.budgets.items()}
    return memory


def test_host_memory_between_a_device_and_a_disk_is_divided(tmp_path: Path) -> None:
    nbytes, host = 4 * needs(model(layers=12), tmp_path)[0], 512 << 10
    memories = [on_device(tmp_path, nbytes, host) for _ in range(2)]
    config = PTMConfig(page_size=4096)
    engines = [
        Engine.attach(model(seed, layers=layers), config, memory=memory)
        for seed, (layers, memory) in enumerate(zip((12, 1), memories, strict=True))
    ]
    try:
        for tier, dial in ((Tier.DEVICE, nbytes), (Tier.HOST, host)):
            parts = [memory.capacity_bytes(tier) for memory in memories]
            assert sum(parts) <= dial
            assert parts[0] > parts[1] > 0
        for engine in engines:
            engine.bind_optimizer(torch.optim.AdamW(engine.model.parameters(), fused=True))
            step(engine)
            engine.check_integrity()
    finally:
        for engine in engines:
            engine.close()


def test_models_that_compute_elsewhere_share_nothing(tmp_path: Path) -> None:
    config = PTMConfig(page_size=4096)
    there = on_device(tmp_path, AMPLE, AMPLE)
    here = open_memory("host+disk", AMPLE, tmp_path)
    here.dials = {tier: budget.capacity_bytes for tier, budget in here.budgets.items()}
    there.pool.compute.device = torch.device("meta")
    engines = [Party(memory, config) for memory in (there, here)]
    for party in engines:
        share(party, Claim("model", Need(1, 2), 1, 0, 4096))
        assert party.others() == []
    there.close()
    here.close()


def test_tides_of_one_card_know_of_each_other(tmp_path: Path) -> None:
    config, parties, card = PTMConfig(page_size=4096), [], CardMemory(CardAllocator(taken := Card(900 << 20)))
    others = taken.malloc(90 << 20)
    for number in range(2):
        memory = on_device(tmp_path, 900 << 20, AMPLE)
        party = Party(memory, config)
        share(party, Claim("model", Need(1 << 20, (600 - 300 * number) << 20), 1, 0, 4096))
        memory.pool.room.tide = Tide(memory.pool.budget, memory.pool.room.limit_bytes, 1 << 20, card)
        share(party, party.claim or pytest.fail("no claim"))
        parties.append(party)
    tide = parties[1].memory.pool.room.tide
    assert isinstance(tide, Tide)
    tide.end_step()
    assert parties[1].memory.pool.budget.capacity_bytes == (300 << 20) - int((90 << 20) * MARGIN / 3)
    assert parties[0].memory.pool.room.tide.high_water_bytes == 90 << 20  # type: ignore[union-attr]
    taken.free(others)
    for party in parties:
        party.memory.close()


@pytest.mark.parametrize("given", [None, "500MiB"])
def test_torch_is_held_to_what_was_given_of_a_card(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is derived leaves the rest of the card for what is not torch's."""
    limited: list[int] = []
    for module in (sharing, paged_model):
        monkeypatch.setattr(module, "CudaTier", CardTier)
    monkeypatch.setattr(CardTier, "limit", lambda self, nbytes: limited.append(nbytes), raising=False)
    capacities = Capacities(page_bytes=4096, host_bytes=AMPLE, device_bytes=500 << 20, disk_paths=[])
    memory = build_memory(capacities, CardTier(Card(500 << 20)))
    memory.dials = {tier: budget.capacity_bytes for tier, budget in memory.budgets.items()}
    engine = Engine.attach(model(), PTMConfig(device_memory=given, page_size=4096), memory=memory)
    assert set(limited) == ({500 << 20} if given else set())
    limited.clear()
    party = Party(memory, engine.asked)
    share(party, Claim("model", Need(1 << 20, 400 << 20), 1, 0, 4096))
    assert set(limited) == ({500 << 20} if given else set())
    engine.close()


# ---- memory that shrinks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mock+host", "host+disk", "mock+host+disk"])
def test_memory_shrinks_and_grows_with_all_values_in_place(kind: str, tmp_path: Path) -> None:
    memory = open_memory(kind, AMPLE, tmp_path, host_bytes=AMPLE)
    module = model()
    values = [param.detach().clone() for param in module.parameters()]
    engine = Engine.attach(module, PTMConfig(page_size=4096), memory=memory)
    try:
        module(torch.ones(1, 64)).sum().backward()
        floor = engine.floor.total_bytes
        small = {memory.pool.budget.tier: floor}
        if kind == "mock+host+disk":
            small[Tier.HOST] = 64 << 10
        before = {tier: memory.capacity_bytes(tier) for tier in small}
        engine.resize(small)
        engine.check_integrity()
        assert {tier: memory.capacity_bytes(tier) for tier in small} == small
        for tier, nbytes in small.items():
            assert memory.budgets[tier].used_bytes <= nbytes
        assert all(torch.equal(now, then) for now, then in zip(module.state_dict().values(), values, strict=True))
        engine.resize(before)
        assert {tier: memory.capacity_bytes(tier) for tier in small} == before
        module(torch.ones(1, 64)).sum().backward()
        engine.check_integrity()
    finally:
        engine.close()
        memory.close()


def test_a_resize_that_fails_changes_no_tier(tmp_path: Path) -> None:
    memory = open_memory("mock+host", AMPLE, tmp_path)
    engine = Engine.attach(model(), PTMConfig(page_size=4096), memory=memory)
    try:
        with memory.pool.room.reserve(memory.pool.budget.free_bytes, Tag.STATE, "what the test holds"):
            with pytest.raises(BudgetError, match="what is there already"):
                memory.resize({Tier.HOST: 2 * AMPLE, Tier.DEVICE: 4096})
            assert memory.capacity_bytes(Tier.HOST) == memory.capacity_bytes(Tier.DEVICE) == AMPLE
    finally:
        engine.close()
        memory.close()


def test_frames_that_have_nowhere_to_go_keep_their_budget(tmp_path: Path) -> None:
    floor, _ = needs(model(), tmp_path, "mock+host")
    memory = open_memory("mock+host", floor, tmp_path)
    engine = Engine.attach(model(), PTMConfig(page_size=4096), memory=memory)
    try:
        used = memory.budgets[Tier.HOST].used_bytes
        assert used > 0
        with pytest.raises(BudgetError, match="there is no disk tier"):
            engine.resize({Tier.HOST: used - 4096})
        assert memory.capacity_bytes(Tier.HOST) == AMPLE
        engine.check_integrity()
    finally:
        engine.close()
        memory.close()


def test_memory_that_was_made_for_one_model_is_not_shared(tmp_path: Path) -> None:
    memories: list[Memory] = [open_memory("host+disk", AMPLE, tmp_path) for _ in range(2)]
    engines = [
        Engine.attach(model(seed), PTMConfig(page_size=4096), memory=memory) for seed, memory in enumerate(memories)
    ]
    assert limits(engines) == [AMPLE, AMPLE]
    assert engines[0]._floor(NO_OPTIMIZER).total_bytes <= engines[0].floor.total_bytes
    for engine in engines:
        engine.close()
