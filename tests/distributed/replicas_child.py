"""One of two processes: trains a model with DDP and one on pages, on the same data, and compares every bit.

Started by torchrun with one argument: a folder for pages.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import UnsupportedError

STEPS, ACCUMULATION, WIDTH = 4, 2, 48


class Net(nn.Module):
    """Layers, one of which only some processes use, and running means."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = self.norm(x)
        return (self.sometimes(x) if extra else x).square().mean()


class Wrapper(nn.Module):
    """Calls what it wraps as PEFT does: past its hooks."""

    def __init__(self, inner: Net) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        return self.inner.forward(x, extra)


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(STEPS * ACCUMULATION)]


def train_plain(rank: int) -> tuple[Net, list[float]]:
    # Each process begins elsewhere; DDP takes the first one's values.
    model = net(rank)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for number, batch in enumerate(batches(rank)):
        last = number % ACCUMULATION == ACCUMULATION - 1
        with nullcontext() if last else wrapped.no_sync():
            wrapped(batch, rank == 0 and number % 4 == 3).backward()
        if last:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return model, norms


def train_paged(rank: int, folder: Path, *, wrap: bool) -> tuple[Net, list[float], Engine]:
    model = net(rank)
    engine = Engine.attach(
        model, PTMConfig(host_memory=110 << 10, page_size=4096, disk=str(folder)), device=torch.device("cpu")
    )
    engine.training.replicate()
    engine.training.replicate()
    called: nn.Module = model
    if wrap:
        called = Wrapper(model)
        engine.follow(called)
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    norms = []
    for number, batch in enumerate(batches(rank)):
        last = number % ACCUMULATION == ACCUMULATION - 1
        with nullcontext() if last else engine.training.no_sync():
            called(batch, rank == 0 and number % 4 == 3).backward()
        if last:
            norms.append(float(engine.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return model, norms, engine


def gradients_of(model: Net, rank: int) -> dict[str, torch.Tensor]:
    """Two micro-batches in the first process, one in the other, added up in fp32."""
    sums: dict[str, torch.Tensor] = {}
    for batch in batches(rank)[: 2 - rank]:
        model(batch.bfloat16(), rank == 0).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                sums[name] = sums[name] + param.grad if name in sums else param.grad.float()
                param.grad = None
    return sums


def sums_of_unequal_precision_are_shared(rank: int, folder: Path) -> None:
    """One process has bf16 gradients or none where the other has fp32 sums."""
    expected = gradients_of(net(0).bfloat16(), rank)
    model = net(0).bfloat16()
    options = PTMConfig(host_memory=200 << 10, page_size=4096, disk=str(folder), master_weights="fp32")
    engine = Engine.attach(model, options, device=torch.device("cpu"))
    engine.training.replicate()
    engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for number, batch in enumerate(batches(rank)[: 2 - rank]):
        with engine.training.no_sync() if number < 1 - rank else nullcontext():
            model(batch.bfloat16(), rank == 0).backward()
    assert engine.gradients is not None
    dtypes = {grad.value.dtype for grad in engine.gradients.slots() if grad.value is not None}
    assert dtypes == {torch.float32 if rank == 0 else torch.bfloat16}
    engine.training.synchronise()
    for grad in engine.gradients.slots():
        name = grad.slot.name
        total = expected.get(name, torch.zeros(grad.slot.value.shape)) / 2
        dist.all_reduce(total)
        if name.startswith("never"):
            assert grad.value is None
            continue
        assert grad.value is not None
        with engine.pages.executor.pin(grad.value) as shared:
            assert shared.dtype == torch.float32, name
            assert torch.equal(shared, total), name
    engine.close()


def one_process_without_gradients(rank: int, folder: Path, *, training: bool) -> None:
    """Its backward reaches no parameter of the model; it takes part all the same, be it without dropout (`eval()`)."""
    plain = DistributedDataParallel(net(0), find_unused_parameters=True).train(training)
    model = net(0).train(training)
    options = PTMConfig(host_memory=200 << 10, page_size=4096, disk=str(folder))
    engine = Engine.attach(model, options, device=torch.device("cpu"))
    engine.training.replicate()
    paged = engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    stock = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for batch in batches(rank)[:2]:
        expected = plain(batch, False)
        (expected if rank == 0 else expected * 0.0).backward()
        stock.step()
        stock.zero_grad()
        loss = model(batch, False)
        if rank == 0:
            loss.backward()
        paged.step()
        paged.zero_grad()
    ours, theirs = model.state_dict(), plain.module.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    engine.close()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plain, expected = train_plain(rank)
    for wrap in (False, True):
        model, norms, engine = train_paged(rank, folder, wrap=wrap)
        assert norms == expected, (norms, expected)
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name
        assert engine.pool.stats.loaded_bytes, "everything stayed in memory, so this shows little"
        engine.check_integrity()
        engine.close()
    sums_of_unequal_precision_are_shared(rank, folder)
    one_process_without_gradients(rank, folder, training=True)
    one_process_without_gradients(rank, folder, training=False)
    other = nn.Linear(WIDTH, WIDTH + rank)
    refused = Engine.attach(other, PTMConfig(host_memory="1MiB", page_size=4096), device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="the 2 processes have different models"):
        refused.training.replicate()
    sys.stdout.write(f"process {rank} agrees over {len(norms)} steps\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
