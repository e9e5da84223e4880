"""Where everything fits, the hooks come off: same numbers, and whatever looks at the pages finds what is true."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ptm_accel
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import PagedModelError
from ptm_accel.memory.budget import Tag
from tests.plain_loop import adamw
from tests.tiers import AMPLE, MEMORIES, needs, on_pages

WIDTH, STEPS = 32, 6

Optimizer = torch.optim.Optimizer
Nothing = Callable[[], object]
Action = Callable[[nn.Module, Optimizer], object]


class Net(nn.Module):
    """Two layers that share a weight, a frozen one, one that is used every other time, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen, self.rare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.tied.weight = self.second.weight
        self.frozen.requires_grad_(False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))
        self.calls += 1
        return self.rare(self.frozen(x)) if self.calls % 2 else self.frozen(x)


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def run(model: nn.Module, optimizer: Optimizer, between: Action, after: Action) -> Iterator[int]:
    """Steps, each clipped: `between` is done before the fifth step, `after` behind the fourth."""
    for number in range(STEPS):
        yield number
        for part in range(2):
            model(batch(2 * number + part)).square().mean().backward()
        engine = engine_of(model)
        if number == 4:
            between(model, optimizer)
        clip: Any = torch.nn.utils.clip_grad_norm_ if engine is None else engine.clip_grad_norm_
        clip(model.parameters(), 0.1) if engine is None else clip(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if number == 3:
            after(model, optimizer)


def nothing(model: nn.Module, optimizer: Optimizer) -> None: ...


def assign_data(model: nn.Module, optimizer: Optimizer) -> None:
    weight = dict(model.named_parameters())["first.weight"]
    weight.data = weight.data * 0.5


def decay_data(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.data.mul_(0.9)


def drop_gradient(model: nn.Module, optimizer: Optimizer) -> None:
    dict(model.named_parameters())["first.weight"].grad = None


def change_gradient(model: nn.Module, optimizer: Optimizer) -> None:
    gradient = dict(model.named_parameters())["first.weight"].grad
    if gradient is not None:
        gradient.mul_(0.25)


def zero_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def evaluate(model: nn.Module, optimizer: Optimizer) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(99))
    model.train()


def load_weights(model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def reload_state(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def freeze(model: nn.Module, optimizer: Optimizer) -> None:
    model.get_submodule("first").requires_grad_(False)


def unfreeze(model: nn.Module, optimizer: Optimizer) -> None:
    model.get_submodule("frozen").requires_grad_(True)


def slower(model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.1


def other_kernel(model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = False, True


def look_at_pages(model: nn.Module, optimizer: Optimizer) -> None:
    """What is asked of an engine ends the mode, or is right without that."""
    engine = engine_of(model)
    if engine is not None:
        with ptm_accel.gathered(model, grads=True):
            assert len(list(model.parameters())) > 4
        plain = ptm_accel.plain_copy(model)
        for (name, value), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(value.detach(), other), name
        engine.check_integrity()


ACTIONS = [
    nothing, assign_data, decay_data, drop_gradient, change_gradient, zero_gradients, evaluate, load_weights,
    reload_state, freeze, unfreeze, slower, other_kernel, look_at_pages,
]  # fmt: skip


def make_adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def make_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def assert_same(model: nn.Module, optimizer: Optimizer, other: nn.Module, other_optimizer: Optimizer) -> None:
    for (name, value), there in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, there), name
    kept, expected = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert kept.keys() == expected.keys()
    for number, entries in expected.items():
        for key, value in entries.items():
            here = kept[number][key]
            same = torch.equal(here, value) if isinstance(value, torch.Tensor) else here == value
            assert same, (number, key)


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
@pytest.mark.parametrize("place", ["between", "after"])
@pytest.mark.parametrize("make", [make_adamw, make_sgd], ids=["adamw", "sgd"])
@pytest.mark.thinned(40)
def test_same_numbers(
    make: Callable[[nn.Module], Optimizer], place: str, action: Action, kind: str, tmp_path: Path
) -> None:
    given = {"between": nothing, "after": nothing, place: action}
    expected = Net()
    oracle = make(expected)
    for _ in run(expected, oracle, given["between"], given["after"]):
        pass
    model = Net()
    with on_pages(model, kind, AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make(model))
        active = [engine.training.plain.active for _ in run(model, optimizer, given["between"], given["after"])]
        assert active[:4] == [False, True, True, True]
        assert_same(model, optimizer, expected, oracle)


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("thaws", [False, True], ids=["frozen", "thawed"])
def test_it_may_end_between_a_forward_and_its_backward(kind: str, thaws: bool, tmp_path: Path) -> None:
    """What was frozen in the forward, and is not any more, was saved without a node that adds up its gradient."""

    def train(model: nn.Module, optimizer: Optimizer, end: Nothing, leave: Nothing) -> None:
        for number in range(STEPS):
            loss = model(batch(number)).square().mean()
            if number == 3:
                model.norm.requires_grad_(True)
                end()
                # What is pinned until the next forward only may leave now.
                with torch.no_grad():
                    model(batch(70))
                leave()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    expected, model = Net(), Net()
    for each in (expected, model):
        each.norm.requires_grad_(not thaws)
    oracle = make_adamw(expected)
    train(expected, oracle, lambda: None, lambda: None)
    with on_pages(model, kind, AMPLE, tmp_path) as engine:
        ended = []

        def end() -> None:
            ended.append(engine.training.plain.active)
            engine.settle()
            leave()
            ended.append(engine.training.plain.active)

        def leave() -> None:
            for slot in engine.slots:
                if slot.value.block in engine.pool.eviction:
                    engine.pool.admission.evict(slot.value.block)
            assert engine.pool.tenants.pinned()

        optimizer = engine.bind_optimizer(make_adamw(model))
        train(model, optimizer, end, leave)
        assert ended == [True, False]
        assert_same(model, optimizer, expected, oracle)
        engine.check_integrity()


@pytest.mark.parametrize("end", ["close", "detach", "collect"])
def test_a_graph_may_outlive_it(end: str, tmp_path: Path) -> None:
    model = Net()
    engine = Engine.attach(model, ptm_accel.PTMConfig(host_memory=AMPLE, page_size=4096, disk=str(tmp_path)))
    optimizer = engine.bind_optimizer(make_adamw(model))
    for _ in run(model, optimizer, nothing, nothing):
        pass
    pool, weight = engine.pool, model.first.weight
    loss = model(batch(50)).sum()
    engine.settle()
    assert pool.tenants.pinned()
    if end == "close":
        engine.close()
    elif end == "detach":
        engine.detach()
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.isfinite().all()
    del model, engine, optimizer, weight
    gc.collect()
    assert pool.closed
    del loss


class Checkpointed(Net):
    """Each layer is recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.tied):
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=False)
        return x


def test_layers_may_be_recomputed_after_its_end(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: Optimizer, end: Callable[[], object]) -> None:
        for number in range(STEPS):
            loss = model(batch(number)).square().mean()
            if number in (2, 4):
                end()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    expected, model = Checkpointed(), Checkpointed()
    oracle = make_adamw(expected)
    train(expected, oracle, lambda: None)
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make_adamw(model))
        train(model, optimizer, optimizer.state_dict)
        assert_same(model, optimizer, expected, oracle)


@pytest.mark.parametrize("make", [make_adamw, make_sgd], ids=["adamw", "sgd"])
def test_zeros_are_left_of_what_the_step_before_has_used(
    make: Callable[[nn.Module], Optimizer], tmp_path: Path
) -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> None:
        for number in range(STEPS):
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    expected, model = Net(), Net()
    oracle = make(expected)
    train(expected, oracle)
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make(model))
        train(model, optimizer)
        assert engine.training.plain.active
        assert_same(model, optimizer, expected, oracle)


def test_gradients_that_no_step_has_used_are_kept(tmp_path: Path) -> None:
    def train(model: Net, optimizer: Optimizer, other: Optimizer) -> None:
        for number in range(STEPS):
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                other.step()
                other.zero_grad()

    def make_both(model: Net) -> tuple[Optimizer, Optimizer]:
        last = list(model.tied.parameters())[1:]
        mine = [param for param in model.parameters() if param is not last[0]]
        return torch.optim.AdamW(mine, lr=1e-2), torch.optim.SGD(last, lr=0.1)

    expected, model = Net(), Net()
    oracle, other = make_both(expected)
    train(expected, oracle, other)
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        ours, theirs = make_both(model)
        train(model, engine.bind_optimizer(ours), theirs)
        for (name, value), there in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(value, there), name


def test_data_of_another_shape_is_taken_after_its_end(tmp_path: Path) -> None:
    model = Net()
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make_adamw(model))
        for _ in run(model, optimizer, nothing, nothing):
            pass
        engine.settle()
        model.first.weight.data = torch.ones(WIDTH, 2 * WIDTH)
        assert torch.equal(model.state_dict()["first.weight"], torch.ones(WIDTH, 2 * WIDTH))


def test_a_graph_from_before_a_step_is_out_of_date(tmp_path: Path) -> None:
    model = Net()
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make_adamw(model))
        for _ in run(model, optimizer, nothing, nothing):
            pass
        loss, older = model(batch(0)).square().mean(), model(batch(1)).square().mean()
        loss.backward()
        engine.settle()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            older.backward()
        del older
        engine.check_integrity()


def test_a_parameter_that_is_kept_longer_than_its_model_is_no_longer_there(tmp_path: Path) -> None:
    model = Net()
    engine = Engine.attach(model, ptm_accel.PTMConfig(host_memory=AMPLE, page_size=4096, disk=str(tmp_path)))
    optimizer = engine.bind_optimizer(make_adamw(model))
    for _ in run(model, optimizer, nothing, nothing):
        pass
    weight = model.first.weight
    del model, engine, optimizer
    gc.collect()
    with pytest.raises(PagedModelError, match=r"first\.weight are gone: its model is no longer in use"):
        weight.detach()


@pytest.mark.parametrize("end", ["close", "detach"])
def test_a_model_with_data_that_it_cannot_have_is_taken_off_its_pages(end: str, tmp_path: Path) -> None:
    model = Net()
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make_adamw(model))
        for _ in run(model, optimizer, nothing, nothing):
            pass
        before = model.first.weight.detach().clone()
        model.half()
        with pytest.raises(PagedModelError, match=r"cannot be given data of torch\.float16"):
            model(batch(0).half())
        if end == "detach":
            engine.detach()
            assert torch.equal(model.first.weight, before)
            assert model.half()(batch(0).half()).isfinite().all()
        else:
            engine.close()
        assert engine.pool.closed


def test_nothing_is_on_the_modules_meanwhile(tmp_path: Path) -> None:
    model = Net()
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make_adamw(model))
        for _ in run(model, optimizer, nothing, nothing):
            pass
        assert engine.training.plain.active
        hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
        assert hooks == [1] + [0] * (len(hooks) - 1)
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
        charged = engine.pool.budget.used_by_tag()[Tag.GRAD]
        assert charged >= sum(param.nbytes for param in model.parameters() if param.requires_grad)
        with pytest.raises(PagedModelError, match=r"cannot be copied by copy\.deepcopy"):
            copy.deepcopy(model)
        engine.settle()
        assert not engine.training.plain.active
        assert nn.Parameter not in {type(param) for param in model.parameters()}


def test_it_is_off_where_pages_move(tmp_path: Path) -> None:
    floor, need = needs(Net(), tmp_path, "host+disk", optimizer=adamw)
    model = Net()
    with on_pages(model, "host+disk", max(floor, need * 2 // 3), tmp_path) as engine:
        optimizer = engine.bind_optimizer(make_adamw(model))
        for _ in run(model, optimizer, nothing, nothing):
            assert not engine.training.plain.active


def test_another_model_ends_it(tmp_path: Path) -> None:
    model, other = Net(), Net()
    given = {"host_memory": AMPLE, "page_size": 4096, "disk": str(tmp_path)}
    engine = Engine.attach(model, ptm_accel.PTMConfig(**given), device=torch.device("cpu"))
    optimizer = engine.bind_optimizer(make_adamw(model))
    steps = run(model, optimizer, nothing, nothing)
    for number in steps:
        if number == 3:
            assert engine.training.plain.active
            second = Engine.attach(other, ptm_accel.PTMConfig(**given), device=torch.device("cpu"))
        if number >= 3:
            assert not engine.training.plain.active
    second.close()
    engine.close()


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    model = Net()
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make_adamw(model))
        for _ in run(model, optimizer, nothing, nothing):
            pass
        weight = model.first.weight
        kept = weight.data
        weight.data = kept.double()
        with pytest.raises(PagedModelError, match=r"first\.weight .*cannot be given data of torch\.float64"):
            model(batch(0).double())
        weight.data = kept


def test_a_model_comes_off_its_pages(tmp_path: Path) -> None:
    expected = Net()
    oracle = make_adamw(expected)
    for _ in run(expected, oracle, nothing, nothing):
        pass
    model = Net()
    with on_pages(model, "mock+host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make_adamw(model))
        for _ in run(model, optimizer, nothing, nothing):
            pass
        for net in (expected, model):
            net(batch(50)).sum().backward()
        assert engine.training.plain.active
        engine.detach()
        for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(param, other), name
            assert (param.grad is None) == (other.grad is None)
            assert param.grad is None or torch.equal(param.grad, other.grad), name
