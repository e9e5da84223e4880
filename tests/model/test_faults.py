"""The parameter dictionaries of a paged model, what is written to a parameter that is away, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import ConfigError, PagedModelError, PlaceholderError, UnsupportedError
from ptm_accel.memory.paged import Place
from ptm_accel.outside import gathered
from tests.plain_loop import same_bits
from tests.tiers import at_floor, config, needs, on_pages

WIDTH = 64


def net(layers: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def evict(engine: Engine) -> None:
    for slot in engine.slots:
        if slot.value in engine.pool.shelf:
            engine.pool.evict(slot.value)


def test_every_way_of_reading_by_name_brings_values_in(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        assert torch.isnan(next(model.parameters()).detach()).all()
        table = model[0]._parameters
        for read in (table.__getitem__, table.get):
            evict(engine)
            value = read("weight")
            assert value is not None
            assert same_bits(value.detach(), plain[0].weight.detach())
        assert same_bits(model[1].get_parameter("weight").detach(), plain[1].weight.detach())
        assert same_bits(getattr(model[2], "weight").detach(), plain[2].weight.detach())  # noqa: B009
        assert table.get("nothing", 3) == 3
        with pytest.raises(KeyError):
            table["nothing"]
        assert table.pop("nothing", None) is None


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


@pytest.mark.parametrize("write", ["zero_", "fill_"])
def test_writing_to_a_placeholder_is_an_error_when_it_is_noticed(write: str, tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        param = next(model.parameters())
        with torch.no_grad():
            getattr(param, write)(*([] if write == "zero_" else [1.0]))
        with pytest.raises(PlaceholderError) as caught:
            model[0](torch.ones(1, WIDTH))
        assert str(caught.value) == (
            "parameter 0.weight was written to while it was on pages, by zero_() or fill_() on its placeholder "
            "(shape (64, 64)); that write is lost. Write to parameters inside `with ptm_accel.gathered(model, "
            "write=True):`."
        )
        assert not engine.pool.pinned()
        evict(engine)
        assert param.detach().isnan().all(), "what was written to is not shown again"


def test_a_placeholder_is_made_once(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        seen = set()
        for _ in range(3):
            evict(engine)
            param = next(model.parameters())
            assert param.detach().isnan().all()
            seen.add(param.data_ptr())
            model(torch.ones(1, WIDTH))
        assert len(seen) == 1


@pytest.mark.parametrize(
    "write", [lambda p: p.add_(1.0), lambda p: p.copy_(torch.ones(WIDTH, WIDTH)), lambda p: p.mul_(2)]
)
def test_other_writes_to_a_placeholder_raise_at_once(write: object, tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            write(next(model.parameters()))  # type: ignore[operator]


def test_a_placeholder_has_the_right_shape_and_no_memory(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        for param in model.parameters():
            assert (param.shape, param.dtype, param.numel()) == ((WIDTH, WIDTH), torch.float32, WIDTH * WIDTH)
            assert param.untyped_storage().nbytes() == 4
        assert {s.value.place for s in engine.slots} == {Place.AWAY}


def test_moving_to_where_it_is_changes_nothing(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        assert model.to("cpu").float().to(torch.float32) is model
        assert engine_of(model) is engine
        for ours, theirs in zip(model, plain, strict=True):
            assert same_bits(ours.weight.detach(), theirs.weight.detach())


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("meta")])
def test_conversions_are_refused(convert: object, tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path):
        with pytest.raises(PagedModelError) as caught:
            convert(model)  # type: ignore[operator]
        text = str(caught.value)
        assert text.startswith("cannot convert parameter 'weight' (torch.float32 on cpu) to ")
        assert text.endswith(
            "it is on pages. Load or build the model in the wanted dtype, or call "
            "`ptm_accel.engine_of(model).detach()` first."
        )


@pytest.mark.parametrize("convert", [lambda m: m.to(memory_format=torch.channels_last), lambda m: m.share_memory()])
def test_another_place_in_memory_is_refused(convert: object, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3))
    with at_floor(model, tmp_path):
        said = r"^cannot change how parameter 'weight' of shape \(8, 3, 3, 3\) lies in memory .*it is on pages. Call "
        with pytest.raises(PagedModelError, match=said):
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
        "parameters 0.weight and 1.weight are two Parameter objects over the same memory. Tie them by using one "
        "Parameter in both places (as tie_weights() does)."
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
        "parameters 1.weight and 0.weight are two Parameter objects over the same memory in part. Tie them by using "
        "one Parameter in both places (as tie_weights() does), or give each memory of its own "
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


def test_other_dials_for_a_model_that_is_on_pages_are_refused(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        assert Engine.attach(model) is engine
        assert Engine.attach(model, config()) is engine
        with pytest.raises(ConfigError, match="this model is already on pages with .* and cannot be moved to .*"):
            Engine.attach(model, config(host_memory="1GB"))
