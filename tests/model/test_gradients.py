"""Gradients leave at once, keep every bit, and their norms are torch's."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.memory.block import Block
from ptm_accel.memory.budget import Tag
from ptm_accel.outside import gathered
from ptm_accel.units import format_bytes
from tests.plain_loop import same_bits
from tests.tiers import at_floor, needs, on_pages

WIDTH = 64


def net(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    for number, layer in enumerate(layers):
        layer.to(dtypes[number % len(dtypes)])
    return nn.Sequential(*layers)


def backward(model: nn.Sequential, seed: int = 0, factor: float = 1.0) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    for layer in model:
        assert isinstance(layer, nn.Linear)
        x = torch.tanh(layer(x.to(layer.weight.dtype)))
    (x.float().square().mean() * factor).backward()


def found(engine: Engine) -> dict[str, torch.Tensor]:
    assert engine.gradients is not None
    return {g.slot.name: engine.pages.executor.snapshot(g.value).clone() for g in engine.gradients.present() if g.value}


def expect(engine: Engine, plain: nn.Module) -> None:
    grads = found(engine)
    for name, param in plain.named_parameters():
        assert param.grad is not None
        assert same_bits(grads[name], param.grad), name


def test_sums_over_micro_batches(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        for seed in range(3):
            backward(model, seed)
            backward(plain, seed)
        expect(engine, plain)


class Signed(torch.autograd.Function):
    """A gradient of negative zeros, which adding to zeros would lose."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, weight: torch.Tensor) -> torch.Tensor:
        return weight.sum() * 0.0

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.full((WIDTH, WIDTH), -0.0)


def test_the_first_gradient_keeps_its_negative_zeros(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    with at_floor(model, tmp_path) as engine:
        Signed.apply(model.weight).backward()
        assert torch.signbit(found(engine)["weight"]).all()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)])
def test_clipping_is_torchs(dtypes: tuple[torch.dtype, ...], max_norm: float, norm_type: float, tmp_path: Path) -> None:
    model, plain = net(dtypes), net(dtypes)
    with at_floor(model, tmp_path) as engine:
        engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=0.0, fused=True))
        backward(model)
        backward(plain)
        ours = engine.clip_grad_norm_(max_norm, norm_type)
        theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        assert same_bits(ours, theirs)
        assert engine.optimizer is not None
        engine.optimizer.gradients.apply_scale()
        expect(engine, plain)
        # The norm of what has been clipped, and once more with what was noted as gradients left.
        theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type)
        assert same_bits(engine.clip_grad_norm_(1e9, norm_type), theirs)
        expect(engine, plain)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_numbers_that_are_none_go_the_way_they_go_in_torch(factor: float, tmp_path: Path) -> None:
    model, plain = net(), net()
    inner = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        for step in range(2):
            backward(model, step, factor if step == 0 else 1.0)
            backward(plain, step, factor if step == 0 else 1.0)
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            assert same_bits(engine.clip_grad_norm_(1.0), norm)
            optimizer.step()
            inner.step()
            optimizer.zero_grad()
            inner.zero_grad()
        values = model.state_dict()
        assert all(same_bits(values[name], value) for name, value in plain.state_dict().items())
        assert any(value.isnan().any() for value in values.values())


def test_no_gradients_have_no_norm(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        assert same_bits(engine.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(net().parameters(), 1.0))


def test_clipping_twice_multiplies_twice(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
        inner = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
        backward(model)
        backward(plain)
        for bound in (0.05, 0.01):
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), bound)
            assert same_bits(engine.clip_grad_norm_(bound), norm)
        optimizer.step()
        inner.step()
        values = model.state_dict()
        assert all(same_bits(values[name], value) for name, value in plain.state_dict().items())


def test_gradients_can_be_looked_at_and_changed(tmp_path: Path) -> None:
    model, plain = net(), net()
    _, need = needs(model, tmp_path, "host+disk")
    with on_pages(model, "host+disk", 2 * need, tmp_path) as engine:
        engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
        backward(model)
        backward(plain)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        engine.clip_grad_norm_(0.01)
        with gathered(model, grads=True):
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert same_bits(ours.detach(), theirs.detach())
                assert same_bits(ours.grad, theirs.grad)
        with gathered(model, grads=True, write=True), torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.grad = param.grad * 2
        for param in plain.parameters():
            assert param.grad is not None
            param.grad *= 2
        assert same_bits(engine.clip_grad_norm_(1e9), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
        expect(engine, plain)


def test_gradients_are_gathered_of_the_part_that_is_asked_for(tmp_path: Path) -> None:
    """Under the least budget there is no room for those of the rest."""
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        backward(plain)
        for ours, theirs in zip(model, plain, strict=True):
            with gathered(ours, grads=True, write=True):
                for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert same_bits(param.grad, expected.grad)
                    param.grad.mul_(0.5)
                assert engine.pool.tenants.pinned()
            for param in theirs.parameters():
                param.grad.mul_(0.5)
        expect(engine, plain)


def test_an_embedding_and_its_gradient_are_looked_at_under_the_least_budget(tmp_path: Path) -> None:
    """A tensor at a time fits any budget."""

    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(640, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 640, bias=False))
        model[2].weight = model[0].weight
        return model

    model, plain = tied(), tied()
    with at_floor(model, tmp_path) as engine:
        for either in (model, plain):
            either(torch.arange(8)).square().mean().backward()
        with gathered(model[0], grads=True):
            ours, theirs = model[0].weight, plain[0].weight
            assert ours.grad is not None
            assert theirs.grad is not None
            assert same_bits(ours.grad.norm(), theirs.grad.norm())
            assert same_bits((ours.grad * 0.5).sum(), (theirs.grad * 0.5).sum())
            assert same_bits(ours.detach(), theirs.detach())
        assert engine.pool.budget.peak_bytes <= engine.pool.budget.capacity_bytes


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_after_accumulation_sees_the_sum(when: str, tmp_path: Path) -> None:
    model, plain = net(), net()

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    plain[2].weight.register_post_accumulate_grad_hook(halve)
    if when == "before":
        model[2].weight.register_post_accumulate_grad_hook(halve)
    _, need = needs(model, tmp_path, "host+disk")
    with on_pages(model, "host+disk", 2 * need, tmp_path) as engine:
        if when == "after":
            model[2].weight.register_post_accumulate_grad_hook(halve)
        for seed in range(3):
            backward(model, seed)
            backward(plain, seed)
            expect(engine, plain)


def test_gathering_what_does_not_fit_is_refused_and_leaves_no_pins(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        taken = sum(slot.value.slot_bytes for slot in engine.slots)
        said = rf"gathered: the 12 tensors take {re.escape(format_bytes(taken))} together, and host_memory is .* a part"
        faults = engine.pool.stats.faults
        with pytest.raises(BudgetError, match=said), gathered(model):
            raise AssertionError("not reached")
        assert engine.pool.stats.faults == faults
        assert not engine.pool.tenants.pinned()
        with gathered(model[0]):
            pass


def test_sparse_gradients_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(64, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    with at_floor(model, tmp_path) as engine:
        with pytest.raises(UnsupportedError) as caught:
            model(torch.arange(4)).sum().backward()
        assert str(caught.value) == (
            "the gradient of 0.weight is torch.sparse_coo; only dense gradients can be kept on pages. "
            "Build the module with sparse=False."
        )
        engine.zero_grad()


def test_room_for_the_next_gradient_is_always_held(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        largest = WIDTH * WIDTH * 4
        assert engine.pool.budget.used_by_tag()[Tag.GRAD] == largest
        backward(model)
        engine.zero_grad()
        engine.pool.admission.released.collect()
        assert engine.pool.budget.used_by_tag()[Tag.GRAD] == largest


def test_a_sum_that_is_widened_is_charged_and_kept_until_it_is(tmp_path: Path) -> None:
    model = net((torch.bfloat16,))
    floor, need = needs(net((torch.bfloat16,)), tmp_path, "host+disk", master_weights="fp32")
    with on_pages(model, "host+disk", (floor + need) // 2, tmp_path, master_weights="fp32") as engine:
        backward(model)
        assert engine.gradients is not None
        grad = max(engine.gradients.present(), key=lambda each: 0 if each.value is None else each.value.nbytes)
        narrow, pool = grad.value, engine.pool
        assert narrow is not None
        assert narrow.dtype == torch.bfloat16
        before = found(engine)[grad.slot.name]
        engine.run_ahead.end()
        left = pool.budget.capacity_bytes - pool.budget.used_bytes + pool.eviction.nbytes
        rest = pool.admission.reserve(left - 2 * narrow.slot_bytes, Tag.STAGING, "a neighbour")
        with pytest.raises(BudgetError, match=rf"for {re.escape(narrow.block.name)}:"):
            grad.widen()
        rest.release()
        assert grad.value is narrow
        assert same_bits(found(engine)[grad.slot.name], before)
        grad.widen()
        assert grad.value is not None
        assert same_bits(found(engine)[grad.slot.name], before.float())
        assert narrow.member not in narrow.used


def test_clipping_before_there_is_an_optimizer(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        backward(plain)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert same_bits(engine.clip_grad_norm_(0.01), norm)
        expect(engine, plain)
        engine.zero_grad()
        assert not found(engine)


class _MovesAwayFirst:
    """A plan that moves a gradient away just before it is used."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.moved = 0

    def accessed(self, tensor: Block, *, write: bool) -> None:
        if tensor.tag is Tag.GRAD and tensor in self.engine.pool.eviction:
            self.moved += 1
            self.engine.pool.admission.evict(tensor)

    def awaited(self, tensor: Block) -> None:
        pass

    def created(self, tensor: Block) -> None:
        pass


def test_a_norm_is_never_that_of_what_a_sum_was_before_it_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = net()
    for seed in range(2):
        backward(plain, seed)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    model = net()
    floor, need = needs(net(), tmp_path, "host+disk")
    with on_pages(model, "host+disk", (floor + need) // 2, tmp_path) as engine:
        backward(model, 0)
        engine.run_ahead.end()
        monkeypatch.setattr(engine.run_ahead, "begin", lambda kind: None)
        adviser = engine.pages.executor.plan = _MovesAwayFirst(engine)
        backward(model, 1)
        engine.pages.executor.plan = None
        assert adviser.moved
        assert engine.clip_grad_norm_(1e9) == expected


class OfDtype(nn.Module):
    """A parameter of any type beside narrower ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))
        self.narrow = nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x.to(self.weight.dtype) @ self.weight).abs().square().sum()
        return out.float() + self.narrow(x.bfloat16()).float().sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_what_is_no_narrower_than_a_master_has_none(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its gradients are summed, measured and used as they are."""
    model, plain = OfDtype(dtype), OfDtype(dtype)
    with on_pages(model, "host+disk", 64 << 20, tmp_path, master_weights="fp32") as engine:
        ours = engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
        theirs = torch.optim.SGD([plain.weight], lr=1e-2)
        for number in range(2):
            for seed in range(2):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * number + seed))
                model(x).backward()
                plain(x).backward()
            norm = engine.clip_grad_norm_(1.0, parameters=[model.weight])
            assert same_bits(norm, nn.utils.clip_grad_norm_([plain.weight], 1.0))
            ours.step()
            theirs.step()
            ours.zero_grad()
            theirs.zero_grad()
            assert same_bits(model.weight.detach().clone(), plain.weight.detach())
        assert {state.slot.name for state in ours.states if state.master is not None} == {
            "narrow.weight",
            "narrow.bias",
        }


def test_a_gradient_that_torch_has_yet_to_conjugate(tmp_path: Path) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(x.to(self.weight.dtype) @ self.weight.conj()).square().sum()

    model, plain = Lazy(), Lazy()
    x = torch.randn(4, WIDTH)
    plain(x).backward()
    assert plain.weight.grad is not None
    assert plain.weight.grad.is_conj()
    with on_pages(model, "host+disk", 64 << 20, tmp_path) as engine:
        model(x).backward()
        assert same_bits(found(engine)["weight"], plain.weight.grad.resolve_conj())
    with at_floor(Lazy(), tmp_path) as engine:
        engine.model(x).backward()
        assert same_bits(found(engine)["weight"], plain.weight.grad.resolve_conj())


def test_gradients_of_what_is_unfrozen_are_charged_as_they_arrive(tmp_path: Path) -> None:
    """From the first forward after that, whether a step has come or not."""
    model, plain = net(), net()
    for which in (model, plain):
        which.requires_grad_(False)
        which[5].requires_grad_(True)
    floor, _ = needs(model, tmp_path, "host+disk")
    with on_pages(model, "host+disk", floor + (WIDTH * WIDTH * 8), tmp_path) as engine:
        backward(model)
        backward(plain)
        model.requires_grad_(True)
        plain.requires_grad_(True)
        for seed in (1, 2):
            backward(model[:6], seed)
            backward(plain, seed)
        expect(engine, plain)
        assert engine.pool.budget.peak_bytes <= engine.pool.budget.capacity_bytes
