"""Models of one process on one device share the tiers: one budget, whoever comes first."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel import opening
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, ConfigError
from ptm_accel.memory.activation_reserve import ActivationReserve
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.tenants import Need, Tenants
from ptm_accel.pages import Pages, refuse_too_large
from ptm_accel.units import format_least
from tests.figures import FIGURE, named_bytes
from tests.plain_loop import adamw, sgd
from tests.tiers import AMPLE, MEMORIES, config, needs, open_memory

CPU = torch.device("cpu")


def net(seed: int = 0, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))


def options(nbytes: int, directory: Path, **more: object) -> PTMConfig:
    return config(host_memory=nbytes, **{"disk": str(directory), **more})


@pytest.fixture
def attached() -> Iterator[Callable[..., Engine]]:
    """Puts models on pages, and takes those away at the end that are left."""
    engines: list[Engine] = []

    def attach(model: nn.Module, given: PTMConfig, **how: object) -> Engine:
        engines.append(Engine.attach(model, given, device=CPU, **how))  # type: ignore[arg-type]
        return engines[-1]

    yield attach
    for engine in engines:
        engine.close()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module, number: int) -> float:
    """A step as of DPO: the reference model runs between the forward and the backward of the other."""
    batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
    output = model(batch)
    with torch.no_grad():
        wanted = reference(batch)
    loss = (output - wanted).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    values = theirs.state_dict()
    return all(torch.equal(value, values[name]) for name, value in ours.state_dict().items())


# ---- what each may count on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "shares"),
    [(300, [50, 100]), (150, [50, 100]), (100, [10 + 70 * 40 // 120, 20 + 70 * 80 // 120]), (30, [10, 20])],
)
def test_a_share_is_the_least_and_of_the_rest_by_use(capacity: int, shares: list[int], tmp_path: Path) -> None:
    memory = open_memory("host+disk", AMPLE, tmp_path)
    other = memory.join()
    memory.pool.need, other.pool.need = Need("a", 10, 50), Need("b", 20, 100)
    tenants = Tenants(Budget(Tier.HOST, capacity))
    tenants.pools = [memory.pool, other.pool]
    assert [tenants.share_bytes(pool) for pool in tenants.pools] == shares
    tenants.pools.pop()
    assert tenants.share_bytes(memory.pool) == capacity, "who is alone has all of it"
    other.close()
    memory.close()


def test_tensors_leave_the_model_that_is_furthest_beyond_its_share(tmp_path: Path) -> None:
    memory = open_memory("host+disk", AMPLE, tmp_path)
    other = memory.join()
    memory.pool.need, other.pool.need = Need("a", 8192, AMPLE), Need("b", 8192, AMPLE)
    for number in range(8):
        pool = (memory if number % 4 else other).pool
        # Names need not differ.
        pool.fault(pool.create("w", Tag.PARAM, torch.Size([1024]), torch.float32, fill=number), write=True)
    left = []
    while (victim := other.pool.admission.victim()) is not None:
        left.append(victim.owner is memory.pool)
        memory.pool.admission.evict(victim)
    assert left == [True] * 5 + [False, True, False]
    memory.close()
    assert [bool((other.pool.fault(tensor) == tensor.fill).all()) for tensor in other.pool.tensors()] == [True] * 2
    other.check_integrity()
    other.close()
    assert memory.disk is not None
    assert memory.disk.closed
    assert all(budget.used_bytes == 0 for budget in memory.budgets.values())


# ---- two models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("first", ["trained", "reference"])
def test_one_trains_beside_its_reference_to_the_same_numbers(kind: str, first: str, tmp_path: Path) -> None:
    floors = [needs(net(seed), tmp_path, kind)[0] for seed in range(2)]
    plain, reference = net(0, 4), net(1)
    paged, paged_reference = copy.deepcopy(plain), copy.deepcopy(reference)
    memory = open_memory(kind, sum(floors), tmp_path)
    order = [(paged, False), (paged_reference, True)]
    engines = {
        model: Engine.attach(model, config(), memory=memory, evaluates=evaluates)
        for model, evaluates in (order if first == "trained" else reversed(order))
    }
    optimizer = engines[paged].bind_optimizer(adamw(paged))
    stock = adamw(plain)
    for number in range(5):
        assert train(paged, optimizer, paged_reference, number) == train(plain, stock, reference, number)
    assert memory.pool.budget.peak_bytes <= sum(floors)
    assert same(paged, plain)
    assert same(paged_reference, reference)
    for engine in engines.values():
        engine.check_integrity()
        engine.close()
    assert all(budget.used_bytes == 0 for budget in memory.budgets.values())


def test_two_train_at_once_and_either_may_leave(tmp_path: Path, attached: Callable[..., Engine]) -> None:
    floors = [needs(net(seed, layers), tmp_path, "host+disk")[0] for seed, layers in ((0, 4), (1, 8))]
    given = options(sum(floors) + (16 << 10), tmp_path)
    plain = [net(0), net(1, 8)]
    paged = copy.deepcopy(plain)
    engines = [attached(model, given) for model in paged]
    assert engines[0].memory.budgets is engines[1].memory.budgets
    steppers = [engine.bind_optimizer(adamw(engine.model)) for engine in engines]
    stock = [adamw(model) for model in plain]
    for number in range(4):
        for index in range(2):
            ours = train(paged[index], steppers[index], paged[1 - index], number)
            assert ours == train(plain[index], stock[index], plain[1 - index], number)
    assert all(engine.run_ahead.enabled for engine in engines)
    assert engines[0].detach() is paged[0]
    assert same(paged[0], plain[0])
    assert not any(isinstance(value, Engine) for value in vars(paged[0]).values())
    for number in range(4, 7):
        assert train(paged[1], steppers[1], paged[0], number) == train(plain[1], stock[1], plain[0], number)
    engines[1].check_integrity()
    assert engines[1].pool.share_bytes == given.host_memory
    with pytest.raises(AssertionError, match="no longer on pages"):
        engines[0].pool.fault(engines[0].pool.create("w", Tag.PARAM, torch.Size([4]), torch.float32))


def test_stock_may_be_taken_while_two_train_by_turns(tmp_path: Path, attached: Callable[..., Engine]) -> None:
    """What is left of a step of one, with its pins, is under way while the other is asked."""
    floor, need = needs(net(0, 12), tmp_path, "host+disk", optimizer=adamw)
    models = [net(0, 12), net(1, 12)]
    engines = [attached(model, options(floor + need, tmp_path)) for model in models]
    steppers = [engine.bind_optimizer(adamw(engine.model)) for engine in engines]
    for number in range(6):
        for model, stepper in zip(models, steppers, strict=True):
            train(model, stepper, models[0], number)
            for engine in engines if number == 5 else ():
                engine.check_integrity()


def test_one_that_comes_in_the_middle_of_a_step_makes_the_first_plan(
    tmp_path: Path, attached: Callable[..., Engine]
) -> None:
    plain, paged = net(), net()
    floor, whole = needs(net(), tmp_path, "host+disk")
    first = attached(paged, options(floor + whole, tmp_path))
    stock, stepper = adamw(plain), first.bind_optimizer(adamw(paged))
    for number in range(6):
        for model in (plain, paged):
            model(torch.ones(4, 64)).square().mean().backward()
        if number == 2:
            assert not first.run_ahead.enabled, "all of it fits"
            attached(net(1), options(floor + whole, tmp_path))
            assert first.run_ahead.enabled
        for optimizer in (stock, stepper):
            optimizer.step()
            optimizer.zero_grad()
    assert same(paged, plain)
    first.check_integrity()


def test_one_that_fails_or_is_forgotten_leaves_nothing(tmp_path: Path, attached: Callable[..., Engine]) -> None:
    floor = needs(net(), tmp_path, "host+disk")[0]
    given = options(3 * floor, tmp_path)
    first = attached(net(), given)
    used = {tier: budget.used_bytes for tier, budget in first.memory.budgets.items()}
    resolved, memory = opening.open_memory(given, device=CPU)
    refuse_too_large(net(1), given, resolved, memory)
    memory.pool.hold(4096, Tag.PARAM, "what is missing")
    assert first.pool.share_bytes < 3 * floor
    memory.close()
    Engine.attach(net(2), given, device=CPU)
    gc.collect()
    assert first.pool.share_bytes == 3 * floor
    first.pool.admission.released.collect()
    assert {tier: budget.used_bytes for tier, budget in first.memory.budgets.items()} == used


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_too_little_for_both_is_refused_with_figures(tmp_path: Path, attached: Callable[..., Engine]) -> None:
    floor = needs(net(), tmp_path, "host+disk")[0]
    least = needs(net(), tmp_path, "host+disk", optimizer=sgd)[0]
    first = attached(net(), options(floor + least - 1, tmp_path))
    second = net(1)
    values = [param.detach().clone() for param in second.parameters()]
    text = (
        r"this model cannot train under less than .*, beside other models of this process that share it "
        rf"\(Sequential .*\)\. Set host_memory to at least {FIGURE} "
        rf"\(with AdamW; an optimizer without state needs {format_least(floor + least)}\), or take a model"
    )
    with pytest.raises(BudgetError, match=text) as refused:
        attached(second, options(floor + least - 1, tmp_path))
    named = named_bytes(f"at least {FIGURE}", refused.value)
    assert all(torch.equal(param, value) for param, value in zip(second.parameters(), values, strict=True))
    first.close()
    other = attached(net(), options(floor + least, tmp_path))
    engine = attached(second, options(floor + least, tmp_path))
    with pytest.raises(BudgetError, match=rf"Set host_memory to at least {format_least(2 * floor)}, or take a model"):
        engine.bind_optimizer(adamw(second))
    engine.bind_optimizer(sgd(second))
    engine.close()
    other.close()
    enough = options(named, tmp_path)
    for model in (net(), net(1)):
        attached(model, enough).bind_optimizer(adamw(model))


def test_tiers_that_hold_too_little_of_both_are_refused(tmp_path: Path, attached: Callable[..., Engine]) -> None:
    floor = needs(net(), tmp_path, "host+disk")[0]
    nbytes = sum(param.nbytes for param in net().parameters())
    # Four tensors a parameter for the first, and for the second its values.
    given = options(2 * floor, tmp_path, disk={"paths": [str(tmp_path)], "limit": 7 * nbytes})
    first, second = attached(net(), given), attached(net(1), given, evaluates=True)
    optimizer = first.bind_optimizer(adamw(first.model))
    train(first.model, optimizer, second.model, 0)
    with pytest.raises(BudgetError, match=r"the tiers below hold too little of them \(disk .*Raise the limit of disk"):
        second.bind_optimizer(adamw(second.model))
    assert second.pages.needs.evaluates
    train(first.model, optimizer, second.model, 1)


def test_without_a_tier_below_all_of_both_must_fit(tmp_path: Path, attached: Callable[..., Engine]) -> None:
    whole = needs(net(), tmp_path, optimizer=sgd)[1]
    given = options(2 * whole, tmp_path, disk=None)
    first, second = attached(net(), given), attached(net(1), given)
    optimizers = [engine.bind_optimizer(sgd(engine.model)) for engine in (first, second)]
    train(first.model, optimizers[0], second.model, 0)
    with pytest.raises(BudgetError, match=r"beside other models of this process .*with no tier below"):
        second.bind_optimizer(adamw(second.model))


def test_other_figures_are_refused_with_both(tmp_path: Path, attached: Callable[..., Engine]) -> None:
    floor = needs(net(), tmp_path, "host+disk")[0]
    first = attached(net(), options(4 * floor, tmp_path))
    there, asked = f"host_memory={4 * floor}", f"host_memory={5 * floor}"
    text = f"on cpu: one is on pages already with {there}, and another was given {asked}. Give all of them the same, or"
    with pytest.raises(ConfigError, match=text):
        attached(net(1), options(5 * floor, tmp_path))
    text = rf"already with {there}, disk=DiskConfig\(paths=.*, and another was given {asked}, disk=None\. Give all"
    with pytest.raises(ConfigError, match=text):
        attached(net(1), options(5 * floor, tmp_path, disk=None))
    # What says nothing of memory, or nothing at all, is no other figure.
    for asked in (options(4 * floor, tmp_path, update="blocking", master_weights="fp32", shard="none"), PTMConfig()):
        other = attached(net(1), asked)
        assert other.memory.users is first.memory.users
        assert (other.config.update, other.config.shard) == (asked.update, asked.shard)
        assert other.config.page_bytes == 4096
        other.close()
    first.close()
    attached(net(1), options(5 * floor, tmp_path))


def test_a_card_has_one_activation_reserve_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second model finds less room than the first, and no groups.
    monkeypatch.setattr(Pages, "grouped", False)
    memory = open_memory("mock+host+disk", AMPLE, tmp_path, host_bytes=AMPLE)
    first = Engine.attach(net(), config(), memory=memory)
    card = memory.pool.admission

    class Quiet:
        live_bytes = 0

        def beside_bytes(self) -> int:
            return 0

        def confine(self, nbytes: int) -> None: ...

        def trim(self) -> None: ...

    card.activation_reserve = ActivationReserve(
        card.budget, AMPLE, first.pages.needs.least_beside_activations(), Quiet()
    )
    before = card.budget.capacity_bytes
    second = Engine.attach(net(1), config(), memory=memory)
    assert second.pool.admission is card
    assert card.budget.capacity_bytes == 2 * before == 2 * (first.needs.floor.total_bytes * 5 // 4)
    for engine in (first, second):
        engine.close()
