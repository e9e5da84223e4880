"""Every optimizer that is said to be supported gives a plain run's numbers, bit for bit, under the least budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.plain_loop import MakeOptimizer, Recipe, assert_same, decay_groups, train
from tests.tiers import budget_bytes, needs, on_pages
from tests.trainer_runs import Job, run_trainer
from tests.zoo import ENTRIES


class Lion(torch.optim.Optimizer):
    """An optimizer from outside torch: signs of an average, and a count in its groups."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                    state["since"] = group["count"]
                update = state["average"] * first + p.grad * (1 - first)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.sign_(), alpha=-group["lr"] / group["count"])
                state["average"].mul_(second).add_(p.grad, alpha=1 - second)


class Trust(torch.optim.Optimizer):
    """Uses norms of whole tensors, and state of other shapes than its parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["rows"] = torch.zeros(p.shape[0])
                    state["columns"] = torch.zeros(p.shape[-1])
                    state["name"] = "trust"
                state["rows"] += p.grad.reshape(p.shape[0], -1).square().mean(1)
                state["columns"] += p.grad.reshape(-1, p.shape[-1]).square().mean(0)
                scale = p.norm() / (p.grad.norm() + state["rows"].sum() + state["columns"].sum() + 1e-6)
                p.add_(p.grad * scale, alpha=-group["lr"])


class Exchanging(torch.optim.Optimizer):
    """Gives its state, and the parameter, other data in the place of changing them."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                state["average"].data = state["average"] * 0.9 + p.grad
                p.data = p - group["lr"] * state["average"]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices only; what it does not hold is not updated."""
    return torch.optim.Muon([p for p in trainable(model) if p.dim() == 2], lr=1e-2, momentum=0.9)


def three_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Other rates and options by group, one group without parameters of its own kind of decay."""
    params = trainable(model)
    groups: list[dict[str, Any]] = [
        {"params": params[::3], "lr": 1e-2, "betas": (0.8, 0.9)},
        {"params": params[1::3], "lr": 1e-3, "weight_decay": 0.3},
        {"params": params[2::3], "lr": 3e-3, "eps": 1e-4, "amsgrad": True},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.0, foreach=False)


def of(cls: Any, **options: Any) -> MakeOptimizer:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = cls(trainable(model), **options)
        return made

    return make


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw-fused": of(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw-foreach": of(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw-single": of(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw-groups": lambda model: torch.optim.AdamW(decay_groups(model), lr=1e-2, fused=True),
    "adamw-three-groups": three_groups,
    "adam-amsgrad-fused": of(torch.optim.Adam, lr=1e-2, amsgrad=True, fused=True),
    "adam-amsgrad-single": of(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam-maximize": of(torch.optim.Adam, lr=1e-3, maximize=True, fused=True),
    "sgd": of(torch.optim.SGD, lr=1e-1, weight_decay=0.1),
    "sgd-momentum-fused": of(torch.optim.SGD, lr=1e-1, momentum=0.9, fused=True),
    "sgd-momentum-foreach": of(torch.optim.SGD, lr=1e-1, momentum=0.9, dampening=0.1, foreach=True),
    "sgd-nesterov": of(torch.optim.SGD, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": of(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.3),
    "adagrad-fused": of(torch.optim.Adagrad, lr=1e-2, fused=True),
    "adafactor-torch": of(torch.optim.Adafactor, lr=1e-2),
    "adafactor-hf": of(transformers.Adafactor),
    "adafactor-hf-fixed": of(
        transformers.Adafactor, lr=1e-2, beta1=0.9, relative_step=False, scale_parameter=False, weight_decay=0.1
    ),
    "rmsprop": of(torch.optim.RMSprop, lr=1e-3),
    "rmsprop-centered": of(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "nadam": of(torch.optim.NAdam, lr=1e-3),
    "radam": of(torch.optim.RAdam, lr=1e-2),
    "adamax": of(torch.optim.Adamax, lr=1e-2),
    "adadelta": of(torch.optim.Adadelta, lr=1.0),
    "rprop": of(torch.optim.Rprop, lr=1e-3),
    "asgd": of(torch.optim.ASGD, lr=1e-2),
    "muon": muon,
    "lion": of(Lion),
    "trust": of(Trust),
    "exchanging": of(Exchanging),
}


def check(name: str, recipe: Recipe, budget: str, tmp_path: Path, kind: str = "host+disk") -> None:
    entry = ENTRIES[name]
    plain = train(entry.build(), entry, recipe)
    assert_same(plain, train(entry.build(), entry, recipe))
    assert any(plain.state[number] for number in plain.state) or isinstance(
        recipe.optimizer(entry.build()), torch.optim.SGD
    )
    sizes = needs(entry.build(), tmp_path, kind, optimizer=recipe.optimizer)
    model = entry.build()
    with on_pages(model, kind, budget_bytes(budget, *sizes), tmp_path) as engine:
        paged = train(model, entry, recipe, engine)
        assert (engine.pool.stats.evictions > 0) == (budget != "fits")
    assert_same(paged, plain)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_numbers_under_the_least_budget(name: str, tmp_path: Path) -> None:
    check("qwen2-moe", Recipe(optimizer=OPTIMIZERS[name], clip=0.3), "floor", tmp_path)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_numbers_where_all_fits(name: str, tmp_path: Path) -> None:
    check("gpt2", Recipe(optimizer=OPTIMIZERS[name], accumulation=2, clip=None), "fits", tmp_path, "mock+host")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["host+disk", "mock+host", "mock+host+disk"])
@pytest.mark.parametrize("budget", ["fits", "30%", "floor"])
@pytest.mark.parametrize("model", ["llama-tied", "mamba", "lora", "t5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_numbers_everywhere(name: str, model: str, budget: str, kind: str, tmp_path: Path) -> None:
    check(model, Recipe(optimizer=OPTIMIZERS[name], accumulation=2), budget, tmp_path, kind)


OFFERED = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "adafactor", "rmsprop")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("optim", OFFERED)
def test_what_the_trainer_offers(optim: str, tmp_path: Path) -> None:
    """`optim=` by name, in the Trainer's own groups, with its scheduler."""
    entry, job = ENTRIES["llama"], Job(accumulation=2, clip=0.3, arguments=(("optim", optim),))
    plain = run_trainer(entry.build(), entry, job, tmp_path, paged=False)
    assert_same(plain, run_trainer(entry.build(), entry, job, tmp_path, paged=False))
    model = entry.build()
    _, need = needs(entry.build(), tmp_path, "host+disk")
    with on_pages(model, "host+disk", need // 2, tmp_path) as engine:
        paged = run_trainer(model, entry, job, tmp_path, paged=True)
        assert engine.pool.stats.evictions > 0
    assert_same(paged, plain)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Changes momentum (here: betas) as well as the rate."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)


def by_group(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1.0 / (s + 1), lambda s: 0.5**s])


@pytest.mark.parametrize("scheduler", [one_cycle, by_group])
def test_schedulers(scheduler: Any, tmp_path: Path) -> None:
    check("llama", Recipe(scheduler=scheduler), "floor", tmp_path)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("pages", [4096, 16384, 65536])
def test_all_sizes_of_windows_give_the_same_numbers(pages: int, tmp_path: Path) -> None:
    """Tensors that are cut into few windows and into many, with a short last one."""
    entry = ENTRIES["mixtral"]
    plain = train(entry.build(), entry, Recipe())
    for numerator in (4, 6, 9):
        model = entry.build()
        _, need = needs(entry.build(), tmp_path, "host+disk", page_size=pages)
        with on_pages(model, "host+disk", need * numerator // 10, tmp_path, page_size=pages) as engine:
            assert_same(train(model, entry, Recipe(), engine), plain)


def test_an_optimizer_over_a_part_of_the_model_under_the_trainer(tmp_path: Path) -> None:
    """`model.zero_grad()` drops all gradients, also those of parameters that no optimizer holds."""
    entry, job = ENTRIES["llama"], Job(accumulation=2, clip=0.1)
    build = entry.build()
    plain = run_trainer(build, entry, job, tmp_path, paged=False, optimizers=(muon(build), None))
    model = entry.build()
    _, need = needs(entry.build(), tmp_path, "host+disk")
    with on_pages(model, "host+disk", need // 2, tmp_path):
        paged = run_trainer(model, entry, job, tmp_path, paged=True, optimizers=(muon(model), None))
    assert_same(paged, plain)
