"""Lower-precision copies exactly where autocast would make them, and none of them kept."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ptm_accel.engine import Engine
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.model.addresses import CastSource, ExtentTable
from ptm_accel.model.casts import CastCache
from ptm_accel.model.grouping import group_of
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor
from tests.plain_loop import same_bits
from tests.tiers import PAGE, at_floor

WIDTH = 64


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Reused(nn.Module):
    """All uses of a parameter in one region share a cast, so their gradients are summed in the lower precision.

    Without autocast's cache each has its own, and they are summed in fp32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = linear(), linear(bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.other(x) + F.linear(x, self.layer.weight)


class SwitchedOff(nn.Module):
    """Switches autocast off for a part, and reads one parameter in both precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * self.scale
        with torch.autocast("cpu", enabled=False):
            z = F.linear(x, self.layer.weight, self.layer.bias)
        assert z.dtype == torch.float32
        return y + z


class SwitchedOn(nn.Module):
    """Switches autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = linear(), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x) @ self.weight


class Ops(nn.Module):
    """Every way to a matrix product, and what autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.stack = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.table = nn.Embedding(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.addmm(self.bias, x, self.weight) + x @ self.weight.t() + torch.mm(x, self.weight[:, :])
        x = x + torch.bmm(x[:, None], self.stack)[:, 0] + torch.einsum("bi,bij->bj", x, self.stack)
        x = x + self.conv(x.t()[None])[0].t() + self.table(torch.arange(4))
        return self.norm(x.float()) + (self.weight * 2).sum() + torch.matmul(x, other=self.weight)


class Frozen(nn.Module):
    """Autocast casts frozen weights anew at every use."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = linear(), linear(bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.base(x) + self.adapter(x))
        return x


class Transformed(nn.Module):
    """Uses layers in functions that torch transforms, whose tensors have no storage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = linear(), linear(bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(torch.vmap(self.layer)(x))
        return x + torch.vmap(lambda row: row @ self.other.weight)(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reused": Reused,
    "switched off": SwitchedOff,
    "switched on": SwitchedOn,
    "ops": Ops,
    "frozen": Frozen,
    "transformed": Transformed,
}


def run(model: nn.Module, *, cache: bool = True) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=not isinstance(model, SwitchedOn), cache_enabled=cache):
        out = model(inputs())
        loss = out.float().square().mean()
    loss.backward()
    return {"out": out.detach(), "loss": loss.detach()}


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    return plain, make()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_as_autocast(name: str, cache: bool, tmp_path: Path) -> None:
    plain, paged = twins(MODELS[name])
    with at_floor(paged, tmp_path) as engine:
        for _ in range(2):
            theirs, ours = run(plain, cache=cache), run(paged, cache=cache)
            assert all(same_bits(ours[key], theirs[key]) for key in theirs)
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert engine.gradients is not None
        executor = engine.pages.executor
        found = {g.slot.name: executor.snapshot(g.value).clone() for g in engine.gradients.present() if g.value}
        assert found.keys() == expected.keys()
        for key, grad in expected.items():
            assert grad is not None
            assert same_bits(found[key], grad), key


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Regions(nn.Module):
    """Uses its layer in several regions, each of its own where no other runs around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            with bf16():
                x = torch.tanh(self.layer(x))
        return x


class OwnRegions(nn.Module):
    """As `Regions`, and reads the weight in all of them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            with bf16():
                x = torch.tanh(x @ self.weight)
        return x


def around_one(model: nn.Module) -> torch.Tensor:
    with bf16():
        out: torch.Tensor = model(inputs())
    return out


def around_all(model: nn.Module) -> torch.Tensor:
    with bf16():
        return model(inputs()) + model(inputs() * 2) + model(inputs() * 3)


def around_all_with_its_own(model: nn.Module) -> torch.Tensor:
    with bf16():
        return around_one(model) + around_one(model)


def around_each(model: nn.Module) -> torch.Tensor:
    return around_one(model) + around_one(model)


def with_and_without_gradients(model: nn.Module) -> torch.Tensor:
    with bf16():
        with torch.no_grad():
            target = model(inputs())
        return model(inputs() * 2) - target + model(inputs() * 3)


def recomputed_within(model: nn.Module) -> torch.Tensor:
    with bf16():
        out: torch.Tensor = checkpoint(model, inputs().requires_grad_(), use_reentrant=False)
        out = out + model(inputs() * 2)
        out.float().square().mean().backward()
    return around_one(model)


@pytest.mark.parametrize("make", [linear, Regions, OwnRegions])
@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(inputs()),
        around_one,
        around_all,
        around_all_with_its_own,
        around_each,
        with_and_without_gradients,
        recomputed_within,
    ],
)
def test_uses_share_a_cast_as_long_as_the_outermost_region_lasts(
    make: Callable[[], nn.Module], use: Callable[[nn.Module], torch.Tensor], tmp_path: Path
) -> None:
    """Which gradients are summed in the lower precision, and which in fp32, depends on it."""
    plain, paged = twins(make)
    with at_floor(paged, tmp_path) as engine:
        for _ in range(2):
            found = []
            for model in (plain, paged):
                out = use(model)
                out.float().square().mean().backward()
                found.append(out.detach())
            assert same_bits(*found)
        assert engine.gradients is not None
        executor = engine.pages.executor
        sums = {g.slot.name: executor.snapshot(g.value).clone() for g in engine.gradients.present() if g.value}
        for name, param in plain.named_parameters():
            assert param.grad is not None
            assert same_bits(sums[name], param.grad), name


def test_the_region_is_looked_at_where_nobody_sees_it(tmp_path: Path) -> None:
    """Who counts what a model does counts no more than in torch, forward and backward."""

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    def count(model: nn.Module) -> int:
        with Counted() as counted:
            around_each(model).float().square().mean().backward()
        return sum(name in ("aten.mm", "aten.addmm") for name in counted.seen)

    plain, paged = twins(linear)
    expected = count(plain)
    assert expected > 0
    with at_floor(paged, tmp_path):
        assert count(paged) == expected


def test_gradients_that_are_on_in_inference_mode_are_none(tmp_path: Path) -> None:
    plain, paged = twins(Reused)
    found = []
    with at_floor(paged, tmp_path):
        for model in (plain, paged):
            with torch.inference_mode(), torch.enable_grad(), bf16():
                found.append(model(inputs()).clone())
            # And what was met first in inference mode is trained as ever.
            run(model)
    assert same_bits(*found)


class Wide(nn.Module):
    """A model whose outermost module has a parameter of its own, as some encoders do."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(linear() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mask
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_copy_is_gone_when_the_module_that_made_it_returns(tmp_path: Path) -> None:
    model = Wide()
    casts: list[int] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        engine.pool.admission.released.collect()
        casts.append(engine.pool.budget.used_by_tag().get(Tag.CAST, 0))

    with at_floor(model, tmp_path) as engine:
        for layer in model.layers:
            layer.register_forward_hook(look)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(inputs())
        assert casts == [0] * len(model.layers)
        out.float().sum().backward()
        engine.pool.admission.released.collect()
        assert Tag.CAST not in engine.pool.budget.used_by_tag()


def test_copies_without_gradients_are_not_remembered(tmp_path: Path) -> None:
    """Their memory goes back to the allocator, and what lies there next is no parameter."""
    model = Wide()
    with at_floor(model, tmp_path) as engine:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(inputs())
        remembered = len(engine.table)
        assert remembered <= len(engine.slots)


def table_of(tmp_path: Path) -> tuple[ExtentTable, ParamSlot, Engine | None]:
    memory = build_memory(Capacities(page_bytes=PAGE, host_bytes=1 << 20), torch.device("cpu"))
    table = ExtentTable(memory.pool.stats)
    param = nn.Parameter(torch.zeros(WIDTH))
    group = group_of("p", param, small=0)
    value = group.part(0, "", Tag.PARAM, param.dtype, memory.pool)
    return table, ParamSlot("p", param, group, 0, value, Executor(memory.pool), table), None


def test_an_address_is_a_parameters_only_while_its_storage_lives(tmp_path: Path) -> None:
    table, slot, _ = table_of(tmp_path)
    copy = torch.zeros(WIDTH, dtype=torch.bfloat16)
    source = CastSource(slot, slot.param.detach(), torch.bfloat16)
    address = table.add(copy, source)
    assert table.find(copy[3:]) is source
    # The next tensor of its size is likely to lie where it lay; the table must see that it is another one.
    del copy
    gc.collect()
    others = [torch.zeros(WIDTH, dtype=torch.bfloat16) for _ in range(64)]
    assert all(table.find(other) is None for other in others)
    assert table.sweep([address]) == []
    assert len(table) == 0


def test_sweeping_keeps_what_lives(tmp_path: Path) -> None:
    table, slot, _ = table_of(tmp_path)
    kept, dead = torch.zeros(WIDTH), torch.zeros(2 * WIDTH)
    source = CastSource(slot, slot.param.detach(), torch.bfloat16)
    addresses = [table.add(kept, source), table.add(dead, source)]
    del dead
    gc.collect()
    assert table.sweep([*addresses, -1]) == addresses[:1]
    assert table.find(kept) is source


def test_other_dtypes_and_tensors_are_not_touched(tmp_path: Path) -> None:
    table, slot, _ = table_of(tmp_path)
    cache = CastCache(slot.pool, SlotTable(), table)
    stranger, whole = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    assert cache.cast(stranger, torch.bfloat16) is stranger
    assert cache.cast(whole, torch.bfloat16) is whole
    assert cache.cast("text", torch.bfloat16) == "text"


class Products(TorchDispatchMode):
    """Notes the matrix products that are carried out, with what of their operands requires gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[bool]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            needs = [arg.requires_grad for arg in args if isinstance(arg, torch.Tensor)]
            self.seen.append((func.overloadpacket.__name__, needs))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("without", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_without_gradients_products_are_carried_out_as_in_torch(
    tmp_path: Path, without: Any, cache: bool, frozen: bool
) -> None:
    """A batch that is not contiguous is folded where the weight requires gradients, and a product of batches else."""

    def products(model: nn.Module) -> list[tuple[str, list[bool]]]:
        batch = torch.randn(3, WIDTH, 5).transpose(1, 2)
        with without(), torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), Products() as products:
            model(batch)
            model(batch)
        return products.seen

    plain, paged = nn.Sequential(linear(bias=False), linear()), nn.Sequential(linear(bias=False), linear())
    for model in (plain, paged):
        model[0].requires_grad_(not frozen)
    wanted = products(plain)
    assert len(wanted) == 4
    with at_floor(paged, tmp_path):
        assert products(paged) == wanted
