"""Memory of the kinds the tests train on, and the budgets they ask for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.block import Block
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.model.floor import ANY_OPTIMIZER
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.needs import Needs
from ptm_accel.pages import Pages
from tests.mock_device import MockCopy, MockDevice

PAGE = 4096
AMPLE = 64 << 20
LITTLE = 128 << 10
"""Host memory between a device and a disk: little enough that most pages go on to the disk."""

MEMORIES = ("mock+host", "host+disk", "mock+host+disk")
"""RAM only (a device tier over host frames), RAM and disk without a device, and all three tiers."""

BUDGETS = ("fits", "30%", "floor")


def jitter(seed: int = 0, longest_s: float = 3e-4) -> Callable[[MockCopy], None]:
    """Delays a third of a mock device's copies by random times, so that a missing wait shows."""
    rng = random.Random(seed)
    lock = threading.Lock()

    def delay(copy: MockCopy) -> None:
        with lock:
            late = rng.random() < 0.33
            seconds = rng.random() * longest_s
        if late:
            time.sleep(seconds)

    return delay


def open_memory(
    kind: str,
    compute_bytes: int,
    directory: Path,
    *,
    seed: int = 0,
    host_bytes: int | None = None,
    page_bytes: int = PAGE,
) -> Memory:
    """Tiers of one kind.

    Args:
        kind: one of `MEMORIES`.
        compute_bytes: the budget of the tier that computes.
        directory: where scratch files go.
        seed: of the mock device's latencies.
        host_bytes: host memory under a device; by default little if there is a disk below it.
        page_bytes: of a page.
    """
    disk = [] if kind == "mock+host" else [directory]
    if kind == "host+disk":
        capacities = Capacities(page_bytes=page_bytes, host_bytes=compute_bytes, disk_paths=disk)
        return build_memory(capacities, torch.device("cpu"))
    if host_bytes is None:
        host_bytes = LITTLE if disk else AMPLE
    capacities = Capacities(page_bytes=page_bytes, host_bytes=host_bytes, device_bytes=compute_bytes, disk_paths=disk)
    return build_memory(capacities, MockDevice(delay=jitter(seed)))


def config(**options: object) -> PTMConfig:
    """Options for tiny models: pages so small that they page."""
    return PTMConfig(**{"page_size": PAGE, **options})  # type: ignore[arg-type]


@contextmanager
def on_pages(
    model: nn.Module,
    kind: str,
    compute_bytes: int,
    directory: Path,
    *,
    host_bytes: int | None = None,
    seed: int = 0,
    **options: object,
) -> Iterator[Engine]:
    """The model on pages; at the end the conservation laws are checked and all memory is given back."""
    page = options.get("page_size", PAGE)
    assert isinstance(page, int)
    memory = open_memory(kind, compute_bytes, directory, seed=seed, host_bytes=host_bytes, page_bytes=page)
    try:
        engine = Engine.attach(model, config(**options), memory=memory)
        yield engine
        engine.check_integrity()
        engine.close()
    finally:
        memory.close()


@contextmanager
def in_groups() -> Iterator[None]:
    """Meanwhile groups are as large as models fit with, for budgets of which they are a large part."""

    def suit(needs: Needs, grouped: SlotTable, alone: SlotTable) -> bool:
        return needs.estimate(ANY_OPTIMIZER, None, grouped).total_bytes <= needs._pool.share_bytes

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ptm_accel.pages.group_sizes", lambda capacity: (capacity // 3, capacity // 6, capacity // 12))
        patched.setattr(Needs, "suit", suit)
        yield


def members(engine: Engine) -> int:
    """The parameters of the largest group."""
    return max(slot.value.block.parts for slot in engine.slots)


def needs(
    model: nn.Module,
    directory: Path,
    kind: str = "mock+host",
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **options: object,
) -> tuple[int, int]:
    """The floor and the need of a model (under an optimizer), in bytes. The model is plain again afterwards."""
    memory = open_memory(kind, AMPLE, directory)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pages, "grouped", False)
        engine = Engine.attach(model, config(**options), memory=memory)
    if optimizer is not None:
        engine.bind_optimizer(optimizer(model))
    floor, need = engine.needs.floor.total_bytes, engine.needs.floor.whole_bytes
    engine.detach()
    return floor, need


def budget_bytes(budget: str, floor: int, need: int) -> int:
    """The compute tier's bytes for one of `BUDGETS`."""
    return {"fits": 2 * need + (4 << 20), "30%": max(need * 3 // 10, floor), "floor": floor}[budget]


@contextmanager
def at_floor(model: nn.Module, directory: Path, kind: str = "host+disk", **options: object) -> Iterator[Engine]:
    """The model on pages under the least budget it can train under."""
    floor, _ = needs(model, directory, kind, **options)
    with on_pages(model, kind, floor, directory, **options) as engine:
        yield engine


@contextmanager
def memory_of(pages: int, directory: Path, kind: str = "host+disk") -> Iterator[Memory]:
    """Tiers with room for so many pages, beside what they hold themselves; nothing is left of it at the end."""
    probe = open_memory(kind, 1 << 20, directory)
    held = probe.pool.budget.used_bytes
    probe.close()
    memory = open_memory(kind, pages * PAGE + held, directory)
    try:
        yield memory
        memory.check_integrity()
    finally:
        memory.close()
    assert memory.pool.budget.used_bytes == 0


def evict_and_wait(pool: Pool, block: Block) -> None:
    """Evicts a tensor, and waits until its memory is free."""
    pool.admission.evict(block)
    pool.admission.released.settle()
