"""The rate of updates on the CPU is that of the arithmetic that carries them out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ptm_accel.memory.mapping import MappedRun
from ptm_accel.optim import arithmetic, update_rate
from ptm_accel.optim.update_rate import measure_cpu_update
from ptm_accel.units import MIB

KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]


def _run_with(monkeypatch: pytest.MonkeyPatch, available: int) -> list[int]:
    sizes: list[int] = []
    mapped = update_rate.anonymous_run

    def spy(nbytes: int, purpose: str) -> MappedRun:
        sizes.append(nbytes)
        return mapped(nbytes, purpose)

    monkeypatch.setattr(update_rate, "anonymous_run", spy)
    monkeypatch.setattr(update_rate, "available_bytes", lambda: available)
    return sizes


@pytest.mark.parametrize(("dtype", "masters"), KINDS)
def test_updates_have_a_rate_draw_no_random_numbers_and_leave_no_thread(dtype: torch.dtype, masters: bool) -> None:
    state, before = torch.get_rng_state(), set(threading.enumerate())
    assert measure_cpu_update(dtype, masters=masters) > 1e5
    assert torch.equal(torch.get_rng_state(), state)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("available", "taken"), [(1 << 40, 256), (50 * MIB, 12), (0, 4)])
def test_updates_take_less_memory_where_there_is_little(
    available: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = _run_with(monkeypatch, available)
    assert measure_cpu_update(torch.float32) > 1e5
    assert sizes == [taken * MIB]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "masters"), KINDS)
def test_it_is_measured_as_updates_run(
    dtype: torch.dtype, masters: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused kernel over views in the dtype of the state, scaled gradients, a thread for each core."""
    calls: list[tuple[list[torch.Tensor], ...]] = []
    names: set[str] = set()
    kernel: Callable[..., Any] = torch._fused_adamw_

    def spy(*columns: Any, **options: Any) -> None:
        calls.append(columns[:4])
        names.add(threading.current_thread().name)
        kernel(*columns, **options)

    monkeypatch.setitem(arithmetic._KERNELS, torch.ops.aten._fused_adamw_, spy)
    monkeypatch.setattr(update_rate, "_BYTES", 32 * MIB)
    monkeypatch.setattr(update_rate, "_PASSES", 1)
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        measure_cpu_update(dtype, masters=masters)
    finally:
        torch.set_num_threads(count)
    wide = torch.float32 if masters else dtype
    assert {tensor.dtype for columns in calls for column in columns for tensor in column} == {wide}
    bytes_each = 16 if masters else 4 * dtype.itemsize
    elements = 32 * MIB // bytes_each
    # Once to begin with, once timed.
    assert sum(param.numel() for columns in calls for param in columns[0]) == 2 * elements
    assert max(param.numel() for columns in calls for param in columns[0]) <= elements // 8
    assert 1 <= len(names) <= threads
    if threads == 1:
        assert names == {threading.current_thread().name}
    else:
        assert all(name.startswith("ptm_accel update rate") for name in names)


def test_masters_are_rounded_into_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widening the gradient and rounding the master are part of such an update, and so of its time."""
    taken: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    take = arithmetic.InPieces.take

    def spy(self: Any, param: Any, grad: Any, value: Any, desk: Any = None) -> torch.Tensor:
        taken.append((param, grad, value))
        return take(self, param, grad, value, desk)

    monkeypatch.setattr(arithmetic.InPieces, "take", spy)
    _run_with(monkeypatch, 0)
    measure_cpu_update(torch.bfloat16, masters=True)
    assert taken
    for param, grad, value in taken:
        assert value is not None
        assert (param.dtype, grad.dtype, value.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
        # The values began as 0.1, and have followed their masters.
        assert torch.equal(value, param.bfloat16())
    assert taken[0][0][0] != 0.1
