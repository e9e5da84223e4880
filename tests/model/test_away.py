"""What a parameter on pages is, what it is asked without coming in, and what is refused."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import BudgetError, ConfigError, PagedModelError, UnsupportedError
from ptm_accel.memory.block import Place
from ptm_accel.model.away import AwayParameter
from ptm_accel.outside import gathered
from tests.plain_loop import same_bits
from tests.tiers import at_floor, config, needs, on_pages

WIDTH = 64


def net(layers: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def evict(engine: Engine) -> None:
    for slot in engine.slots:
        if slot.value.block in engine.pool.eviction:
            engine.pool.admission.evict(slot.value.block)


def test_a_description_brings_nothing_in(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(ours) is AwayParameter
            assert isinstance(ours, nn.Parameter)
            for describe in DESCRIPTIONS:
                assert describe(ours) == describe(theirs)
            assert torch.zeros_like(ours).stride() == theirs.stride()
            assert ours.to("cpu") is ours
            assert ours.contiguous() is ours.float() is ours
        assert model.to("cpu").float() is model
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 5 * WIDTH * WIDTH
        model.requires_grad_(True)
        assert repr(model) == repr(plain)
        assert {s.value.place for s in engine.slots} == {Place.AWAY}


DESCRIPTIONS = [
    lambda p: (p.shape, p.size(), p.size(0), p.dim(), p.ndim, p.numel(), p.nelement(), len(p), p.nbytes, p.itemsize),
    lambda p: (p.dtype, p.device, p.layout, p.is_cuda, p.is_floating_point(), p.is_complex(), p.element_size()),
    lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p.grad, p.stride(), p.stride(0), p.is_contiguous()),
    lambda p: (p.storage_offset(), p.new_zeros(2).sum().item(), torch.numel(p), torch.is_floating_point(p)),
]


def test_it_is_ordinary_in_the_forward_of_its_own_module(tmp_path: Path) -> None:
    model = net(2)
    seen: list[type] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(type(self.weight))
            return super().forward(x)

    trusted: list[type] = []
    with at_floor(model, tmp_path) as engine:
        model[0].register_full_backward_hook(lambda module, *_: trusted.append(type(module.weight)))
        out = model(torch.ones(1, WIDTH, requires_grad=True))
        assert all(type(p) is AwayParameter for p in model.parameters())
        with gathered(model[0]):
            assert type(model[0].weight) is nn.Parameter
        out.sum().backward()
        engine.detach()
        assert all(type(p) is nn.Parameter for p in model.parameters())
    assert trusted == [AwayParameter]


def test_a_list_function_needs_room_for_one_tensor(tmp_path: Path) -> None:
    model, plain = net(20), net(20)
    with at_floor(model, tmp_path) as engine:
        ours, theirs = list(model.parameters()), list(plain.parameters())
        assert torch.equal(torch.stack(torch._foreach_norm(ours)), torch.stack(torch._foreach_norm(theirs)))
        with torch.no_grad():
            torch._foreach_mul_(ours, [1.5] * 20)
            torch._foreach_mul_(theirs, [1.5] * 20)
        assert all(same_bits(o.detach(), t.detach()) for o, t in zip(ours, theirs, strict=True))
        assert engine.pool.budget.peak_bytes <= engine.pool.budget.capacity_bytes


def test_values_that_do_not_fit_at_once_are_refused(tmp_path: Path) -> None:
    model = net(20)
    with at_floor(model, tmp_path) as engine:
        with pytest.raises(BudgetError, match="cannot place 16384 B for"):
            torch.stack(list(model.parameters()))
        assert not engine.pool.tenants.pinned()
        assert model(torch.ones(1, WIDTH)).isfinite().all()


def test_a_parameter_of_a_closed_engine_is_an_error(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        engine.close()
        assert model[0].weight.shape == (WIDTH, WIDTH)
        with pytest.raises(PagedModelError, match=r"the values of a parameter of shape \(64, 64\) are gone: its model"):
            model[0].weight.detach()


def test_copies_of_a_parameter(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        for copied in (copy.deepcopy(model[1].weight), pickle.loads(pickle.dumps(model[1].weight))):
            assert type(copied) is nn.Parameter
            assert same_bits(copied.detach(), plain[1].weight.detach())
        assert same_bits(copy.deepcopy(model[2]).weight.detach(), plain[2].weight.detach())


def test_a_gradient_that_is_gone_is_an_error(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path):
        model(torch.ones(1, WIDTH)).sum().backward()
        kept = model[0].weight.grad
        assert kept is not None
        assert kept is model[0].weight.grad
        model.zero_grad()
        assert model[0].weight.grad is None
        assert kept.shape == (WIDTH, WIDTH)
        with pytest.raises(PagedModelError, match=r"gradient of 0.weight was used after an optimizer step or zero_"):
            kept.sum()


def test_using_all_outside_of_forwards_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with at_floor(model, tmp_path), caplog.at_level(logging.WARNING):
        for _ in range(4):
            for param in model.parameters():
                param.data.mul_(0.5)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("all 5 parameters are used outside of the forwards of their modules, ")


def test_a_parameter_that_leaves_the_model_takes_its_values_along(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        taken = model[0]._parameters.pop("weight")
        assert taken is not None
        assert same_bits(taken.detach(), plain[0].weight.detach())
        model[0]._parameters["weight"] = taken


def test_writes_by_reading_first_are_kept_inside_gathered(tmp_path: Path) -> None:
    model = net()
    _, need = needs(model, tmp_path, "host+disk")
    with on_pages(model, "host+disk", need, tmp_path) as engine:
        evict(engine)
        with gathered(model, write=True), torch.no_grad():
            for number, layer in enumerate(model):
                layer.weight.fill_(number)
        evict(engine)
        assert [float(layer.weight.detach().mean()) for layer in model] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_moving_to_where_it_is_changes_nothing(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        assert model.to("cpu").float().to(torch.float32) is model
        assert engine_of(model) is engine
        for ours, theirs in zip(model, plain, strict=True):
            assert same_bits(ours.weight.detach(), theirs.weight.detach())


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_conversions_are_refused(convert: object, tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path):
        with pytest.raises(PagedModelError) as caught:
            convert(model)  # type: ignore[operator]
        text = str(caught.value)
        assert text.startswith("parameter 0.weight (torch.float32 on cpu) cannot be given data of torch.")
        assert text.endswith(
            "it is on pages. Load or build the model in the wanted dtype, or call "
            "`ptm_accel.engine_of(model).detach()` first."
        )


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (
            lambda m: m.to(memory_format=torch.channels_last),
            r"^cannot change the memory format of a parameter of 4 dimensions",
        ),
        (
            lambda m: m.share_memory(),
            r"^share_memory_ cannot work on a tensor of shape \(8, 3, 3, 3\)",
        ),
    ],
)
def test_another_place_in_memory_is_refused(convert: object, said: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3))
    with at_floor(model, tmp_path), pytest.raises(PagedModelError, match=said):
        convert(model)  # type: ignore[operator]


def test_a_memory_format_that_says_nothing_of_linear_layers_changes_nothing(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path):
        model.to(memory_format=torch.channels_last)
        for ours, theirs in zip(model, plain, strict=True):
            assert same_bits(ours.weight.detach(), theirs.weight.detach())


def test_a_parameter_that_is_not_contiguous_is_refused(tmp_path: Path) -> None:
    model = net(2)
    model[1].weight.data = torch.randn(WIDTH, WIDTH).t()
    with pytest.raises(UnsupportedError) as caught:
        needs(model, tmp_path)
    assert str(caught.value) == (
        "parameter 1.weight is not contiguous (shape (64, 64), strides (1, 64)). "
        "Call `param.data = param.data.contiguous()` first."
    )


def test_two_parameters_over_one_memory_are_refused(tmp_path: Path) -> None:
    model = net(2)
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(UnsupportedError) as caught:
        needs(model, tmp_path)
    assert str(caught.value) == (
        "parameters 0.weight and 1.weight are two Parameter objects over the same memory, or parts of it. Tie "
        "them by using one Parameter in both places (as tie_weights() does), or give each memory of its own "
        "(`param.data = param.data.clone()`)."
    )


def test_two_parameters_over_parts_of_one_memory(tmp_path: Path) -> None:
    """Apart they are allowed."""
    flat = torch.randn(3 * WIDTH * WIDTH)
    model = net(2)
    model[1].weight = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))
    model[0].weight = nn.Parameter(flat[WIDTH * WIDTH // 2 : WIDTH * WIDTH * 3 // 2].view(WIDTH, WIDTH))
    with pytest.raises(UnsupportedError) as caught:
        needs(model, tmp_path)
    assert str(caught.value) == (
        "parameters 1.weight and 0.weight are two Parameter objects over the same memory, or parts of it. Tie "
        "them by using one Parameter in both places (as tie_weights() does), or give each memory of its own "
        "(`param.data = param.data.clone()`)."
    )
    model[0].weight = nn.Parameter(flat[WIDTH * WIDTH : 2 * WIDTH * WIDTH].view(WIDTH, WIDTH))
    assert needs(model, tmp_path)


class Quantised(nn.Parameter):
    """As the parameters of quantisation libraries."""


def test_parameters_of_other_classes_are_refused(tmp_path: Path) -> None:
    model = net(2)
    model[0].weight = Quantised(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(UnsupportedError) as caught:
        needs(model, tmp_path)
    assert str(caught.value) == (
        "parameter 0.weight is a Quantised, not a plain nn.Parameter; quantised and distributed parameters cannot be "
        "put on pages. Load the model in a floating-point dtype, on one process."
    )


def test_parameters_of_deepspeed_are_refused(tmp_path: Path) -> None:
    model = net(2)
    model[1].weight.ds_id = 7  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError) as caught:
        needs(model, tmp_path)
    assert str(caught.value) == (
        "parameter 1.weight is managed by DeepSpeed ZeRO-3. ptm_accel takes its place; leave DeepSpeed out."
    )


class FSDPNet(nn.Module):
    """FSDP2 gives a module's class a name like this."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: DistributedDataParallel(net()), "the model is already wrapped by DDP (DistributedDataParallel)"),
        (lambda: nn.Sequential(FSDPNet()), "0 is already wrapped by FSDP2 (FSDPNet)"),
        (lambda: nn.DataParallel(net()), "the model is already wrapped by DataParallel (DataParallel)"),
    ],
)
def test_models_that_are_wrapped_are_refused(build: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        needs(build(), tmp_path)  # type: ignore[operator]
    assert str(caught.value) == (
        f"{named}. ptm_accel takes its place; pass the unwrapped model and leave the other plugin out."
    )


def test_other_options_for_a_model_that_is_on_pages_are_refused(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        assert Engine.attach(model) is engine
        assert Engine.attach(model, config()) is engine
        with pytest.raises(ConfigError, match="this model is already on pages with .* and cannot be moved to .*"):
            Engine.attach(model, config(host_memory="1GB"))
