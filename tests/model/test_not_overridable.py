"""Functions that torch lets no subclass override: what they read of a parameter that is away, or waits for its update.

Each gives the values that plain torch gives, or NaN. The values of the step before are given by none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.model.away import AwayParameter
from ptm_accel.model.slots import ParamSlot
from tests.tiers import needs, on_pages

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH = 64


class Own(torch.Tensor):
    pass


def other() -> torch.Tensor:
    return torch.ones(1)


def given_as_data(p: torch.Tensor) -> torch.Tensor:
    made = other()
    made.data = p
    return made


@torch.no_grad()
def made_subclass(p: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(Own, p)


@torch.no_grad()
def made_sparse(p: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.arange(WIDTH)[None], p).to_dense()


def double(p: torch.Tensor) -> torch.Tensor:
    return p * 2


def scripted(p: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.jit.script(double)(p)
    return made


Reads = dict[str, Callable[[Any], torch.Tensor]]

READ_NAN: Reads = {
    "torch.tensor": torch.tensor,
    "as_tensor of another dtype": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "asarray, copied": lambda p: torch.asarray(p, copy=True),
    "torch.Tensor": torch.Tensor,
    "new_tensor of another": lambda p: other().new_tensor(p),
    "new of another": lambda p: other().new(p),  # type: ignore[no-untyped-call]
    "as_subclass past the class": lambda p: torch.Tensor.as_subclass(p, Own),
    "_make_subclass": made_subclass,
    "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p)),
    "t.data = p": given_as_data,
    "t.set_(p)": lambda p: other().set_(p),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p])[0],
    "sparse_coo_tensor": made_sparse,
    "torch.jit.script": scripted,
    "vmap": lambda p: torch.vmap(double)(p),
    "torch.func.grad": lambda p: torch.func.grad(lambda x: double(x).square().sum())(p),
    "torch.func.vjp": lambda p: torch.func.vjp(double, p)[0],
}

READ_RIGHT: Reads = {
    "nn.Parameter": nn.Parameter,
    "nn.Parameter, frozen": lambda p: nn.Parameter(p, requires_grad=False),
    "nn.Buffer": nn.Buffer,
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "new_tensor of its own": lambda p: p.new_tensor(p),
    "as_subclass": lambda p: p.as_subclass(Own),
    "from_dlpack": lambda p: torch.from_dlpack(p.detach()),
    "as_nested_tensor": lambda p: torch.nested.as_nested_tensor([p])[0],
    "unflatten": lambda p: p.unflatten(0, (2, -1)),
    "as_strided": lambda p: torch.as_strided(p, (2, 2), (1, 1)),
    "vander": lambda p: torch.vander(p[0]),
    "normal": lambda p: torch.normal(p, 1.0, generator=torch.Generator().manual_seed(0)),
    "vmap of a detached one": lambda p: torch.vmap(double)(p.detach()),
    "vmap of a function that uses it": lambda p: torch.vmap(lambda x: p * x)(torch.ones(2)),
    "torch.func.jvp": lambda p: torch.func.jvp(double, (p,), (torch.ones(WIDTH, WIDTH),))[0],
    "torch.func.grad of a detached one": lambda p: torch.func.grad(lambda x: double(x).square().sum())(p.detach()),
    "torch.func.grad of a function that uses it": lambda p: torch.func.grad(lambda x: (p * x).sum())(torch.ones(1)),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Pair:
    """A model on pages, and the same one without, trained alike.

    Attributes:
        before: the values before the last step, by parameter.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.engine = engine
        plain = net()
        self._trained = [(plain, adamw(plain)), (model, engine.bind_optimizer(adamw(model)))]
        self._twins = list(zip(engine.slots, plain.parameters(), strict=True))
        self.before: dict[nn.Parameter, torch.Tensor] = {}
        for _ in range(4):
            self.step()

    def step(self) -> None:
        self.before = {plain: plain.detach().clone() for _, plain in self._twins}
        for model, optimizer in self._trained:
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def _weights(self) -> Iterator[tuple[ParamSlot, nn.Parameter]]:
        for slot, plain in self._twins:
            if slot.value.shape == (WIDTH, WIDTH):
                yield slot, plain

    def away(self) -> tuple[nn.Parameter, nn.Parameter]:
        """A parameter that is away, and what it is without pages."""
        pool = self.engine.pool
        self.engine.pages.executor.finish_updates()
        for slot, plain in self._weights():
            if slot.value.block in pool.eviction:
                pool.admission.evict(slot.value.block)
            if not slot.value.place.resident:
                return slot.param, plain
        raise AssertionError("nothing leaves")

    def pending(self) -> tuple[nn.Parameter, nn.Parameter]:
        """As `away`, of one that is in memory and whose update is pending."""
        for _ in range(2):
            queue = self.engine.pages.executor.pending_updates
            for slot, plain in self._weights():
                if slot.value.place.resident and queue is not None and queue.awaits(slot.value.block):  # type: ignore[attr-defined]
                    return slot.param, plain
            self.step()
        raise AssertionError("no update is pending")


@contextmanager
def pair(tmp_path: Path) -> Iterator[Pair]:
    _, whole = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    model = net()
    with on_pages(model, "host+disk", whole * 85 // 100, tmp_path) as engine:
        yield Pair(model, engine)


def outcome(found: Any, wanted: torch.Tensor) -> str:
    assert type(found) is type(wanted)
    with torch._C.DisableTorchFunctionSubclass():
        if found.isnan().all():
            return "NaN"
        return "right" if torch.equal(found, wanted) and found.requires_grad == wanted.requires_grad else "wrong"


@pytest.mark.parametrize("state", ["away", "pending"])
def test_what_they_read(state: str, tmp_path: Path) -> None:
    with pair(tmp_path) as models:
        found = {}
        for name, read in (READ_NAN | READ_RIGHT).items():
            ours, plain = getattr(models, state)()
            assert type(ours) is AwayParameter
            value, wanted = read(ours), read(plain)
            if isinstance(value, AwayParameter):
                # Torch has returned what it was given.
                assert value is ours
                value, wanted = value.detach(), wanted.detach()
            found[name] = outcome(value, wanted)
            del value
    assert found == dict.fromkeys(READ_NAN, "NaN") | dict.fromkeys(READ_RIGHT, "right")


_NO_READS = re.compile(
    r"set_|seed|fork|wait|import_ir|autocast|clear_|init_num|save|load|compile|export|from_file|rng|parse|handle_torch"
)
"""Functions of the list that take no tensor, and change something for other tests."""


def test_nothing_that_torch_lists_reads_the_step_before(tmp_path: Path) -> None:
    """Called in several ways, most of which are errors: what comes back has not the values that are out of date."""
    listed = sorted(torch.overrides.get_ignored_functions(), key=str)
    listed = [f for f in listed if callable(f) and not _NO_READS.search(str(f) + getattr(f, "__name__", ""))]
    assert len(listed) > 100
    came_back = 0
    with pair(tmp_path) as models:
        for function in listed:
            for number in range(4):
                ours, plain = models.pending()
                given = [(ours,), (ours, Own), (other(), ours), ([ours],)][number]
                try:
                    found = function(*given)
                except Exception:
                    # It takes other arguments.
                    continue
                for value in found if isinstance(found, (list, tuple)) else [found]:
                    if isinstance(value, torch.Tensor) and value.shape == plain.shape and value is not ours:
                        came_back += 1
                        with torch._C.DisableTorchFunctionSubclass():
                            assert not torch.equal(value, models.before[plain]), function
    assert came_back > 10
