"""Norms of gradients in fp32: with room for a copy or without, the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ptm_accel.engine import Engine
from ptm_accel.memory.budget import Tag
from ptm_accel.model.norms import Norms, total_norm
from ptm_accel.runtime.executor import Executor
from tests.tiers import AMPLE, needs, on_pages, open_memory

DTYPES = (torch.bfloat16, torch.float16)
SHAPES = ((), (1,), (7,), (1000,), (64, 48), (65536,), (513, 1023), (3, 1 << 18))


class Called(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_changes_no_bit(dtype: torch.dtype, norm_type: float, tmp_path: Path) -> None:
    memory = open_memory("host+disk", AMPLE, tmp_path)
    roomy, bare = Norms(Executor(memory.pool), wide=True), Norms(Executor(memory.pool), wide=True)
    roomy.hold(3 << 20)
    for shape in SHAPES:
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            gradient = (torch.randn(shape, generator=generator) * 10.0**-seed).to(dtype)
            assert torch.equal(roomy.of(gradient, norm_type), bare.of(gradient, norm_type)), shape
            assert torch.equal(bare.of(gradient, norm_type), bare.of(gradient.float(), norm_type)), shape
    roomy.release()
    memory.close()


def test_what_is_not_wide_has_the_norm_of_torchs_clipping(tmp_path: Path) -> None:
    memory = open_memory("host+disk", AMPLE, tmp_path)
    norms = Norms(Executor(memory.pool), wide=False)
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(norms.of(gradient, 2.0), torch._foreach_norm([gradient], 2.0)[0])
    assert total_norm([], 2.0) == 0.0
    memory.close()


@pytest.mark.parametrize("room_bytes", [0, 3 << 20])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_every_norm_is_of_the_kernel_that_torchs_clipping_calls(
    dtype: torch.dtype, room_bytes: int, tmp_path: Path
) -> None:
    """On a CPU others give the same bits, on a GPU they sum in another order."""
    memory = open_memory("host+disk", AMPLE, tmp_path)
    norms = Norms(Executor(memory.pool), wide=True)
    norms.hold(room_bytes)
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameter = nn.Parameter(torch.zeros(5000))
    parameter.grad = gradient.float()
    with Called() as in_torch:
        stock = torch.nn.utils.get_total_norm([parameter.grad])
    with Called() as here:
        norm = norms.of(gradient, 2.0)
    assert torch.equal(total_norm([norm], 2.0), stock)
    assert in_torch.kernels[0] is torch.ops.aten._foreach_norm.Scalar
    assert [kernel for kernel in here.kernels if "norm" in str(kernel)] == in_torch.kernels[:1]
    norms.release()
    memory.close()


def test_the_room_is_charged_and_given_back(tmp_path: Path) -> None:
    memory = open_memory("host+disk", AMPLE, tmp_path)
    norms = Norms(Executor(memory.pool), wide=True)
    for nbytes in (1 << 20, 2 << 20):
        norms.hold(nbytes)
        assert memory.pool.budget.used_by_tag()[Tag.GRAD] == nbytes
    norms.hold(0)
    memory.pool.admission.released.settle()
    assert Tag.GRAD not in memory.pool.budget.used_by_tag()
    memory.check_integrity()
    memory.close()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))).bfloat16()


def held(engine: Engine) -> int:
    """What is held of the budget for norms: there are no gradients, and room for one of them."""
    engine.pool.admission.released.settle()
    charged = engine.pool.budget.used_by_tag()[Tag.GRAD]
    return charged - max(slot.value.nbytes for slot in engine.slots)


def test_it_is_held_where_there_is_room_to_spare(tmp_path: Path) -> None:
    floor, whole = needs(net(), tmp_path, "host+disk", master_weights="fp32")
    largest = 64 * 64 * 4
    small = floor * 215 // 100
    part = small // 16 // 4096 * 4096
    sizes = {floor: 0, 2 * floor + 4096: 4096, small: part, whole: 0, whole + 8192: 8192, 2 * whole: largest}
    assert small < whole
    assert 4096 < part < largest
    for capacity, expected in sizes.items():
        with on_pages(net(), "host+disk", capacity, tmp_path, master_weights="fp32") as engine:
            assert held(engine) == expected, capacity
    with on_pages(net(), "host+disk", 2 * whole, tmp_path) as engine:
        assert held(engine) == 0, "without masters norms are those of bf16"
    with on_pages(net(), "mock+host", 2 * whole, tmp_path, master_weights="fp32") as engine:
        assert held(engine) == 0, "on a device there is no need of it"


def test_clipping_has_the_same_numbers_with_it_and_without(tmp_path: Path) -> None:
    whole = needs(net(), tmp_path, "host+disk", master_weights="fp32")[1]
    found = []
    for capacity in (whole, 2 * whole):
        model = copy.deepcopy(net())
        with on_pages(model, "host+disk", capacity, tmp_path, master_weights="fp32") as engine:
            optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
            norms = []
            for _ in range(2):
                model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
                norms.append(engine.clip_grad_norm_(0.01).item())
                optimizer.step()
                optimizer.zero_grad()
            found.append((norms, [value.clone() for value in model.state_dict().values()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


REAL = (torch.float32,)
COMPLEX = (torch.float32, torch.complex64)
ALL = (torch.bfloat16, torch.complex128, torch.float32, torch.complex64, torch.float16)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("dtypes", [REAL, COMPLEX, ALL])
def test_complex_and_empty_gradients_have_their_place_among_the_norms(
    dtypes: tuple[torch.dtype, ...], norm_type: float, given: bool, tmp_path: Path
) -> None:
    """The norm of a complex gradient is real, and that of an empty one is 0, which changes how torch adds them up."""

    def build() -> nn.ParameterList:
        rng = torch.Generator().manual_seed(3)
        sizes = torch.randint(0, 40, (60,), generator=rng).tolist()
        kinds = [dtypes[at % len(dtypes)] if size % 3 else dtypes[0] for at, size in enumerate(sizes)]
        sizes = [0 if size < 8 else size for size in sizes]
        values = (torch.randn(size, dtype=kind, generator=rng) for size, kind in zip(sizes, kinds, strict=True))
        return nn.ParameterList(nn.Parameter(value) for value in values)

    plain, model = build(), build()
    sum((param.abs().double() * 0.3).square().sum() for param in plain).backward()  # type: ignore[union-attr]
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        sum((param.abs().double() * 0.3).square().sum() for param in model).backward()  # type: ignore[union-attr]
        found = engine.clip_grad_norm_(1.0, norm_type, parameters=list(model.parameters()) if given else None)
        assert torch.equal(found, expected)
        for ours, theirs in zip(model, plain, strict=True):
            assert torch.equal(ours.grad, theirs.grad)
