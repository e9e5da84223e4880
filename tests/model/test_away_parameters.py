"""Code that uses parameters and gradients through torch gets torch's numbers, whether or not they are in memory.

A case is a small function of ordinary code, called at one place of an ordinary loop. Each runs on a plain model and,
unchanged, on the same model on pages: losses, weights, optimizer state and all that the case saw are compared bit for
bit. The column `plain` runs a case twice on plain models, which shows that the comparison itself is right.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters

from ptm_accel.errors import BudgetError, PTMError
from tests.plain_loop import same_bits
from tests.tiers import needs, on_pages

WIDTH = 64
STEPS = 4


# ---- models ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of several sizes, biases and norms that are small, and a shared weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.down(torch.relu(self.up(self.norm(x))))
        out: torch.Tensor = self.head(x)
        return out


class Byol(nn.Module):
    """Moves its target network in its own forward, as BYOL and MoCo do."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = Net(), Net(1)
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for q, p in zip(self.target.parameters(), self.online.parameters(), strict=True):
                q.data.lerp_(p.data, 0.1)
            wanted = self.target(x)
        out: torch.Tensor = self.online(x) - wanted
        return out


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class KeepsWeight(torch.autograd.Function):
    """Keeps the weight as an attribute, not through `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.weight, grad.t() @ ctx.x


class OwnFunctions(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(self.function.apply(x, weight))
        return x


class KeptInAList(nn.Module):
    """Computes with parameters from a list of its own, which no module access goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.kept = [list(layer.parameters()) for layer in (*self.net.layers, self.net.up, self.net.down)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in self.kept:
            x = torch.tanh(F.linear(x, weight, bias))
        return x


# ---- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What a case is given beside the model.

    Attributes:
        number: of the step.
        optimizer: of the model.
        other: a second model, which the loss is measured against.
        kept: what the case keeps from step to step.
        seen: what is compared.
    """

    optimizer: torch.optim.Optimizer
    other: nn.Module
    number: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)

    @property
    def x(self) -> torch.Tensor:
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self.number))

    def see(self, *values: Any) -> None:
        self.seen += [v.detach().clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for v in values]


Act = Callable[[Any, Step], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trained(model), lr=1e-2, fused=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(model), lr=1e-1, momentum=0.9)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Case:
    """One use of parameters or gradients.

    Attributes:
        act: the user's code.
        at: where the loop calls it: `loss` (its result is added), `forward` (its result is the loss), `backward`
            (between backward and step) or `step` (after the step).
        clips: the `max_norm` of stock clipping after it; None for none.
        build: makes the model.
        optimizer: makes the optimizer, if that is not one of the column.
        prepared: the optimizer is one for a model on pages.
        holds: it uses many parameters in one call, or keeps aliases of them: the least budget may be too little.
        refused: what it may end with instead of its result.
    """

    act: Act
    at: str = "step"
    clips: tuple[float | None, ...] = (None,)
    build: Callable[[], nn.Module] = Net
    optimizer: MakeOptimizer | None = None
    prepared: bool = True
    holds: bool = False
    refused: tuple[type[Exception], ...] = ()


CASES: list[Case] = []


def case(**options: Any) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        CASES.append(Case(act, **options))
        return act

    return add


def train(
    model: nn.Module, other: nn.Module, make: MakeOptimizer, bind: Callable[[Any], Any], case: Case, clip: float | None
) -> dict[str, Any]:
    """An ordinary loop; returns every number."""
    optimizer = make(model)
    step = Step(bind(optimizer), other)
    torch.manual_seed(7)
    for step.number in range(STEPS):
        if case.at == "forward":
            loss = case.act(model, step)
        else:
            with torch.no_grad():
                wanted = other(step.x)[:, :8]
            loss = (model(step.x)[:, :8] - wanted).square().mean()
        if case.at == "loss":
            loss = loss + case.act(model, step)
        step.see(loss)
        loss.backward()
        del loss
        if case.at == "backward":
            case.act(model, step)
        if clip is not None:
            step.see(clip_grad_norm_(model.parameters(), clip))
        step.optimizer.step()
        step.optimizer.zero_grad()
        if case.at == "step":
            case.act(model, step)
    return {
        "seen": step.seen,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "other": {name: value.clone() for name, value in other.state_dict().items()},
        "state": copy.deepcopy(step.optimizer.state_dict()["state"]),
    }


# ---- averages of weights ---------------------------------------------------------------------------------------------


def _average(model: nn.Module, step: Step) -> list[nn.Parameter]:
    if "ema" not in step.kept:
        step.kept["ema"] = [nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters()]
    ema: list[nn.Parameter] = step.kept["ema"]
    return ema


@case()
@torch.no_grad()
def ema_lerp(model: nn.Module, step: Step) -> None:
    for e, p in zip(_average(model, step), model.parameters(), strict=True):
        e.lerp_(p, 0.1)
        step.see(e)


@case()
def ema_that_assigns(model: nn.Module, step: Step) -> None:
    for e, p in zip(_average(model, step), model.parameters(), strict=True):
        e.data = e.data * 0.9 + p.data * 0.1
        step.see(e)


@case()
def average_assigned_to_the_model(model: nn.Module, step: Step) -> None:
    for e, p in zip(_average(model, step), model.parameters(), strict=True):
        p.data = p.data * 0.9 + e.data * 0.1


@case()
def ema_in_a_thread(model: nn.Module, step: Step) -> None:
    ema = _average(model, step)
    _in_thread(lambda: ema_lerp(model, step))
    step.see(*ema)


@case()
def lookahead(model: nn.Module, step: Step) -> None:
    for slow, p in zip(_average(model, step), model.parameters(), strict=True):
        slow.data.add_(p.data - slow.data, alpha=0.5)
        p.data.copy_(slow.data)


@case(refused=(PTMError,))
def torchs_averaged_model(model: nn.Module, step: Step) -> None:
    averaged = step.kept.setdefault("averaged", None) or torch.optim.swa_utils.AveragedModel(model)
    step.kept["averaged"] = averaged
    averaged.update_parameters(model)
    step.see(*averaged.parameters())


@case()
def averages_within_a_state_dict(model: nn.Module, step: Step) -> None:
    for e, value in zip(_average(model, step), dict(model.named_parameters()).values(), strict=True):
        e.copy_(e * 0.9 + value.detach() * 0.1)
        step.see(e)


class EMAModel:
    """As diffusers has it."""

    def __init__(self, parameters: Iterator[nn.Parameter], decay: float, foreach: bool) -> None:
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.temp_stored_params: list[torch.Tensor] = []
        self.decay = decay
        self.foreach = foreach

    @torch.no_grad()
    def step(self, given: Iterator[nn.Parameter]) -> None:
        parameters = list(given)
        one_minus_decay = 1 - self.decay
        if self.foreach:
            differences = torch._foreach_sub(self.shadow_params, parameters)
            torch._foreach_sub_(self.shadow_params, differences, alpha=one_minus_decay)
            return
        for s_param, param in zip(self.shadow_params, parameters, strict=True):
            if param.requires_grad:
                s_param.sub_(one_minus_decay * (s_param - param))
            else:
                s_param.copy_(param)

    def copy_to(self, given: Iterator[nn.Parameter]) -> None:
        parameters = list(given)
        if self.foreach:
            torch._foreach_copy_(
                [param.data for param in parameters],
                [s_param.to(param.device).data for s_param, param in zip(self.shadow_params, parameters, strict=True)],
            )
            return
        for s_param, param in zip(self.shadow_params, parameters, strict=True):
            param.data.copy_(s_param.to(param.device).data)

    def store(self, parameters: Iterator[nn.Parameter]) -> None:
        self.temp_stored_params = [param.detach().cpu().clone() for param in parameters]

    def restore(self, parameters: Iterator[nn.Parameter]) -> None:
        for c_param, param in zip(self.temp_stored_params, parameters, strict=True):
            param.data.copy_(c_param.data)
        self.temp_stored_params = []


def _as_diffusers(model: nn.Module, step: Step, foreach: bool) -> None:
    if "ema" not in step.kept:
        step.kept["ema"] = EMAModel(model.parameters(), 0.9, foreach)
    ema = step.kept["ema"]
    ema.step(model.parameters())
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    with torch.no_grad():
        step.see(model(step.x), *ema.shadow_params)
    ema.restore(model.parameters())


@case()
def ema_of_diffusers(model: nn.Module, step: Step) -> None:
    _as_diffusers(model, step, foreach=False)


@case(holds=True)
def ema_of_diffusers_foreach(model: nn.Module, step: Step) -> None:
    _as_diffusers(model, step, foreach=True)


# ---- target networks -------------------------------------------------------------------------------------------------


@case()
def target_moved(model: nn.Module, step: Step) -> None:
    for q, p in zip(step.other.parameters(), model.parameters(), strict=True):
        q.data.lerp_(p.data, 0.1)


@case()
def target_moved_in_three_operators(model: nn.Module, step: Step) -> None:
    for q, p in zip(step.other.parameters(), model.parameters(), strict=True):
        q.data.mul_(0.9).add_(p.data, alpha=0.1)


@case()
@torch.no_grad()
def target_copied(model: nn.Module, step: Step) -> None:
    if step.number % 2:
        for q, p in zip(step.other.parameters(), model.parameters(), strict=True):
            q.copy_(p)


@case(at="forward", build=Byol)
def target_moved_in_a_forward(model: nn.Module, step: Step) -> torch.Tensor:
    loss: torch.Tensor = model(step.x).square().mean()
    return loss


# ---- values ----------------------------------------------------------------------------------------------------------


@case()
def clamped(model: nn.Module, step: Step) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)


@case()
def norms_logged(model: nn.Module, step: Step) -> None:
    step.see(*(p.norm() for p in model.parameters()))


@case()
def norms_without_gradients(model: nn.Module, step: Step) -> None:
    with torch.no_grad():
        step.see(*(p.norm() for p in model.parameters()))
    with torch.inference_mode():
        step.see(*(float(p.norm()) for p in model.parameters()))
        step.see(float(model(step.x).sum()))


@case(holds=True)
@torch.no_grad()
def norms_foreach(model: nn.Module, step: Step) -> None:
    step.see(*torch._foreach_norm(list(model.parameters())))


@case()
def norms_in_a_thread(model: nn.Module, step: Step) -> None:
    _in_thread(lambda: norms_logged(model, step))


@case()
@torch.no_grad()
def written_without_gradients(model: nn.Module, step: Step) -> None:
    for p in model.parameters():
        p.mul_(0.99)
        p[0] += 0.01


@case()
def initialised_again(model: Net, step: Step) -> None:
    if step.number == 1:
        nn.init.normal_(model.head.weight)
        model.up.reset_parameters()


@case()
def many_looks(model: nn.Module, step: Step) -> None:
    for name, p in model.named_parameters():
        step.see(name, p.sum().item(), tuple(p.shape), p.dtype, p.numel(), p.requires_grad, p.is_leaf, len(p))
        step.see(
            p.detach().cpu().numpy().copy().tolist(), p.flatten()[:3].tolist(), p.mT.mean() if p.dim() > 1 else 0, p[0]
        )
        step.see(torch.equal(p, p.detach().clone()), bool((p == p.data).all()), torch.isfinite(p).all())
        step.see(
            next(iter(p)),
            torch.stack([p, p]).sum(),
            torch.zeros_like(p),
            p.double().sum(),
            p @ p.mT if p.dim() > 1 else 0,
        )


@case()
@torch.no_grad()
def copied_into_the_state_dict(model: nn.Module, step: Step) -> None:
    for name in ("up.weight", "layers.1.weight", "norm.weight"):
        model.state_dict()[name].copy_(torch.full_like(model.state_dict()[name], 0.01 * (step.number + 1)))


@case(holds=True)
def as_a_vector(model: nn.Module, step: Step) -> None:
    step.see(parameters_to_vector(model.parameters()))


@case(holds=True)
def from_a_vector(model: nn.Module, step: Step) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())


@case()
def from_a_vector_of_values(model: nn.Module, step: Step) -> None:
    vector_to_parameters(torch.linspace(-0.1, 0.1, sum(p.numel() for p in model.parameters())), model.parameters())


@case(refused=(PTMError,))
def copied_deeply(model: nn.Module, step: Step) -> None:
    other = copy.deepcopy(model)
    step.see(other(step.x), *other.parameters())


@case(refused=(PTMError,))
def pickled(model: nn.Module, step: Step) -> None:
    step.see(*pickle.loads(pickle.dumps(model)).parameters())


@case()
def state_dict_saved(model: nn.Module, step: Step) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    step.see(torch.load(file))


# ---- in the loss -----------------------------------------------------------------------------------------------------


@case(at="loss")
def l2_penalty(model: nn.Module, step: Step) -> torch.Tensor:
    return 1e-3 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


@case(at="loss")
def penalty_of_norms(model: nn.Module, step: Step) -> torch.Tensor:
    return 1e-3 * sum((p.norm(2) + p.abs().sum() for p in model.parameters()), torch.zeros(()))


@case(at="loss")
def proximity_to_where_it_began(model: nn.Module, step: Step) -> torch.Tensor:
    pairs = zip(model.parameters(), _average(model, step), strict=True)
    return 1e-2 * sum(((p - e).pow(2).sum() for p, e in pairs), torch.zeros(()))


@case(at="forward")
def parameters_from_a_list(model: Net, step: Step) -> torch.Tensor:
    params: list[nn.Parameter] = step.kept.setdefault("params", list(model.parameters()))
    x = step.x
    for weight, bias in ((params[0], params[1]), (params[2], params[3]), (params[4], params[5])):
        x = torch.tanh(F.linear(x, weight, bias))
    return x.square().mean()


@case(at="forward", build=KeptInAList)
def parameters_from_a_list_in_a_forward(model: nn.Module, step: Step) -> torch.Tensor:
    loss: torch.Tensor = model(step.x).square().mean()
    return loss


@case(at="forward")
def functional_call(model: nn.Module, step: Step) -> torch.Tensor:
    out: torch.Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (step.x,))
    return out.square().mean()


@case(build=lambda: OwnFunctions(SavesWeight))
def own_function_that_saves_a_weight(model: nn.Module, step: Step) -> None:
    pass


@case(build=lambda: OwnFunctions(KeepsWeight))
def own_function_that_keeps_a_weight(model: nn.Module, step: Step) -> None:
    pass


# ---- gradients -------------------------------------------------------------------------------------------------------

CLIPS = (None, 0.05)


def _with_gradients(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


@case(at="backward", clips=CLIPS)
def gradients_read(model: nn.Module, step: Step) -> None:
    for p in model.parameters():
        assert p.grad is not None
        step.see(p.grad.norm(), p.grad, p.grad.shape, p.grad.dtype)


@case(at="backward", clips=CLIPS)
def gradients_read_in_a_thread(model: nn.Module, step: Step) -> None:
    _in_thread(lambda: gradients_read(model, step))


@case(at="backward", clips=CLIPS)
def gradient_dropped(model: Net, step: Step) -> None:
    if step.number < 2:
        model.head.weight.grad = None
        step.see(model.head.weight.grad)


@case(at="backward", clips=CLIPS)
def all_gradients_dropped(model: nn.Module, step: Step) -> None:
    if step.number == 1:
        for p in model.parameters():
            p.grad = None


@case(at="backward", clips=CLIPS)
def gradient_zeroed(model: Net, step: Step) -> None:
    for p in model.up.parameters():
        assert p.grad is not None
        p.grad.zero_()


@case(at="backward", clips=CLIPS)
def gradients_scaled(model: nn.Module, step: Step) -> None:
    for number, p in enumerate(_with_gradients(model)):
        assert p.grad is not None
        p.grad.mul_(0.5 + number)


@case(at="backward", clips=CLIPS)
def gradients_changed_foreach(model: nn.Module, step: Step) -> None:
    params = _with_gradients(model)
    gradients = [p.grad for p in params]
    given_back = torch._foreach_mul_(gradients, 0.5)
    if step.number % 2:
        with torch.no_grad():
            torch._foreach_add_(given_back or gradients, params, alpha=0.01)
    torch._foreach_div_(gradients, [2.0 + number for number in range(len(gradients))])
    step.see(*torch._foreach_norm(gradients))


@case(at="backward", clips=CLIPS)
def gradients_given(model: nn.Module, step: Step) -> None:
    for p in _with_gradients(model):
        assert p.grad is not None
        p.grad = p.grad * 0.5 + 0.01


@case(at="backward", clips=CLIPS)
def gradients_centralised(model: nn.Module, step: Step) -> None:
    for p in _with_gradients(model):
        assert p.grad is not None
        if p.dim() > 1:
            p.grad.data.add_(-p.grad.data.mean(dim=1, keepdim=True))


@case(at="backward", clips=CLIPS)
def decay_in_the_gradient(model: nn.Module, step: Step) -> None:
    for p in _with_gradients(model):
        assert p.grad is not None
        p.grad.add_(p.data, alpha=0.01)


@case(at="backward", clips=CLIPS)
def module_zeroed(model: Net, step: Step) -> None:
    model.layers[1].zero_grad()
    if step.number == 2:
        model.zero_grad()
    elif step.number == 3:
        model.up.zero_grad(set_to_none=False)


@case(at="forward", clips=CLIPS)
def gradients_of_autograd_grad(model: nn.Module, step: Step) -> torch.Tensor:
    loss = model(step.x).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    again: torch.Tensor = model(step.x).abs().mean()
    return again


@case(at="backward")
def clipped_by_norm(model: nn.Module, step: Step) -> None:
    step.see(clip_grad_norm_(model.parameters(), 0.05))


@case(at="backward")
def clipped_by_another_norm(model: nn.Module, step: Step) -> None:
    step.see(clip_grad_norm_(list(model.parameters()), 0.05, norm_type=float("inf"), error_if_nonfinite=True))


@case(at="backward")
def each_clipped_by_its_norm(model: nn.Module, step: Step) -> None:
    step.see(*(clip_grad_norm_(p, 0.01) for p in model.parameters()))


@case(at="backward")
def clipped_by_value(model: nn.Module, step: Step) -> None:
    clip_grad_value_(model.parameters(), 1e-3)


@case(at="backward")
def norm_without_clipping(model: nn.Module, step: Step) -> None:
    step.see(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


# ---- perturbed weights -----------------------------------------------------------------------------------------------


def _attack(model: nn.Module, step: Step, *, restores: bool) -> None:
    """As FGM: one more backward where the loss grows."""
    backup = {}
    for name, p in model.named_parameters():
        if p.requires_grad and p.dim() > 1 and p.grad is not None:
            norm = p.grad.norm()
            backup[name] = p.data.clone()
            if norm != 0 and not torch.isnan(norm):
                p.data.add_(0.05 * p.grad / norm)
    loss = model(step.x).square().mean()
    step.see(loss)
    loss.backward()
    if restores:
        for name, p in model.named_parameters():
            if name in backup:
                p.data = backup[name]


@case(at="backward", clips=CLIPS)
def adversarial(model: nn.Module, step: Step) -> None:
    _attack(model, step, restores=True)


@case(at="backward", clips=CLIPS)
def adversarial_without_restoring(model: nn.Module, step: Step) -> None:
    _attack(model, step, restores=False)


@case(at="backward")
def adversarial_with_gradients_put_back(model: nn.Module, step: Step) -> None:
    """As PGD: gradients are kept, and given back for the last backward."""
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    values = {name: p.data.clone() for name, p in model.named_parameters()}
    for last in (False, True):
        for p in _with_gradients(model):
            assert p.grad is not None
            p.data.add_(0.01 * p.grad / (p.grad.norm() + 1e-6))
        if last:
            for name, p in model.named_parameters():
                p.grad = kept[name]
        else:
            model.zero_grad()
        model(step.x).square().mean().backward()
    for name, p in model.named_parameters():
        p.data = values[name]


@case(at="backward")
def sharpness_aware(model: nn.Module, step: Step) -> None:
    """As SAM: the gradient of a neighbouring point, for the weights as they were."""
    norm = torch.stack([p.grad.norm(2) for p in model.parameters() if p.grad is not None]).norm(2)
    moved = {}
    with torch.no_grad():
        for p in _with_gradients(model):
            assert p.grad is not None
            moved[p] = p.grad * (0.05 / (norm + 1e-12))
            p.add_(moved[p])
    model.zero_grad()
    model(step.x).square().mean().backward()
    with torch.no_grad():
        for p, by in moved.items():
            p.sub_(by)
    step.see(norm)


# ---- an optimizer that nobody has prepared ---------------------------------------------------------------------------


def _stock(name: str, make: MakeOptimizer, **options: Any) -> None:
    act: Act = lambda model, step: None  # noqa: E731
    act.__name__ = f"stock_{name}"
    case(optimizer=make, prepared=False, **options)(act)


_stock("adamw", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), clips=CLIPS)
_stock("adamw_fused", adamw, holds=True)
_stock("adamw_foreach", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), holds=True)
_stock("momentum", lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9), clips=CLIPS)
_stock("adagrad", lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2))


# ---- the table -------------------------------------------------------------------------------------------------------


def _in_thread(run: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    for error in errors:
        raise error


@dataclass(frozen=True)
class Column:
    """On which memory; `pages` says which of the two models are on pages."""

    kind: str = "host+disk"
    least: bool = True
    optimizer: MakeOptimizer = adamw
    pages: tuple[str, ...] = ("model",)


COLUMNS = {
    "plain": Column(pages=()),
    "least": Column(),
    "ample": Column(least=False),
    "device": Column(kind="mock+host", optimizer=momentum),
}
WITH_TARGETS = {
    "both": Column(pages=("model", "other")),
    "other": Column(pages=("other",)),
    "both ample": Column(least=False, optimizer=momentum, pages=("model", "other")),
}


def _other() -> nn.Module:
    return Net(1).requires_grad_(False)


@cache
def _plain(case: Case, optimizer: MakeOptimizer, clip: float | None) -> dict[str, Any]:
    return train(case.build(), _other(), case.optimizer or optimizer, lambda given: given, case, clip)


def _rows() -> Iterator[Any]:
    for case in CASES:
        name = case.act.__name__
        columns = COLUMNS | (WITH_TARGETS if name.startswith("target") and case.build is Net else {})
        for clip in case.clips:
            for at, column in columns.items():
                clips = "" if clip is None else "-clipped"
                # Those are of the comparison itself, and of what never leaves.
                marks = [pytest.mark.wide] if at in ("plain", "ample", "both ample") else []
                yield pytest.param(case, clip, column, id=f"{name}{clips}-{at}", marks=marks)


@pytest.mark.thinned(70)
@pytest.mark.parametrize(("case", "clip", "column"), list(_rows()))
def test_same_numbers(case: Case, clip: float | None, column: Column, tmp_path: Path) -> None:
    theirs = _plain(case, column.optimizer, clip)
    make = case.optimizer or column.optimizer
    models = {"model": case.build(), "other": _other()}
    engines: dict[str, Any] = {}
    may_end = (*case.refused, *((BudgetError,) if case.holds and column.least else ()))
    with ExitStack() as stack:
        for name in column.pages:
            floor, need = needs(models[name], tmp_path, column.kind, optimizer=make if name == "model" else None)
            budget = floor if column.least else 4 * need
            engines[name] = stack.enter_context(on_pages(models[name], column.kind, budget, tmp_path))
        bind = engines["model"].bind_optimizer if "model" in engines and case.prepared else lambda given: given
        try:
            ours = train(models["model"], models["other"], make, bind, case, clip)
        except may_end as error:
            if not column.pages or len(str(error)) < 20:
                raise
            for engine in engines.values():
                engine.abort()
            return
        for engine in engines.values():
            assert engine.pool.stats.evictions > 0 or not column.least, "nothing was ever away"
            assert engine.pool.budget.peak_bytes <= engine.pool.budget.capacity_bytes
        _compare(ours, theirs)


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Names the first difference."""
    for at, (mine, other) in enumerate(zip(ours["seen"], theirs["seen"], strict=True)):
        assert same_bits(mine, other), f"seen[{at}]: {mine} and {other}"
    for what in ("weights", "other", "state"):
        assert ours[what].keys() == theirs[what].keys(), what
        for name, other in theirs[what].items():
            assert same_bits(ours[what][name], other), f"{what} {name}: {ours[what][name]} and {other}"
