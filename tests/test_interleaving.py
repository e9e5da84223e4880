"""Whatever is done, in whatever order and under whatever budget, a paged model does as a plain one does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError
from ptm_accel.outside import gathered, plain_copy
from tests.plain_loop import adamw, same_bits
from tests.tiers import MEMORIES, in_groups, needs, on_pages
from tests.zoo import ENTRIES, Entry, use_checkpointing

MODELS = ("llama-tied", "gpt2", "mixtral", "t5", "albert", "mamba", "lora", "whisper")
ACTIONS = 40


class StopError(Exception):
    """The user's own exception."""


class Twins:
    """A plain model and the same one on pages, each with its optimizer; every action is done to both."""

    def __init__(self, entry: Entry, plain: Any, paged: Any, engine: Engine, rng: random.Random) -> None:
        self.entry, self.plain, self.paged, self.engine, self.rng = entry, plain, paged, engine, rng
        self.inner = adamw(plain)
        self.optimizer = engine.bind_optimizer(adamw(paged))
        self.numbers = self.begun = 0
        self.gradients = 0
        self.autocast = rng.random() < 0.3
        self.kept: dict[str, torch.Tensor] | None = None

    def act(self) -> str:
        names = [name[3:] for name in dir(self) if name.startswith("do_")]
        weights = [4 if name in ("backward", "step", "whole_step") else 1 for name in names]
        (name,) = self.rng.choices(names, weights)
        getattr(self, f"do_{name}")()
        return name

    def both(self, model: Any, what: Any) -> Any:
        torch.manual_seed(self.numbers)
        return what(model)

    def batch(self) -> dict[str, torch.Tensor]:
        self.numbers += 1
        return self.entry.batch_at(self.numbers % 17)

    @contextmanager
    def region(self) -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            yield

    def compare(self, what: Any) -> None:
        ours, theirs = self.both(self.paged, what), self.both(self.plain, what)
        assert len(ours) == len(theirs)
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))

    # ---- what can be done ------------------------------------------------------------------------------------

    def do_backward(self) -> None:
        batch = self.batch()

        def run(model: Any) -> list[torch.Tensor]:
            with self.region():
                loss = model(**batch).loss
            loss.backward()
            return [loss.detach()]

        self.gradients += 1
        self.compare(run)

    def do_two_forwards(self) -> None:
        first, second = self.batch(), self.batch()

        def run(model: Any) -> list[torch.Tensor]:
            losses = []
            for batch in (first, second):
                with self.region():
                    losses.append(model(**batch).loss)
            (losses[0] * 0.3 - losses[1] * 0.1).backward()
            return [loss.detach() for loss in losses]

        self.gradients += 1
        self.compare(run)

    def do_penalty(self) -> None:
        """Of weights that are read by their names, outside of all forwards, before one or after it."""
        names = [name for name, param in self.plain.named_parameters() if param.requires_grad]
        chosen = self.rng.sample(names, min(8, len(names)))
        batch, first = self.batch(), self.rng.random() < 0.5

        def penalty(model: Any) -> torch.Tensor:
            return torch.stack([model.get_parameter(name).pow(2).sum() for name in chosen]).sum() * 1e-3

        def run(model: Any) -> list[torch.Tensor]:
            loss = penalty(model) if first or self.autocast else torch.zeros(())
            # Under autocast torch sums what comes from both in another precision.
            if not self.autocast:
                loss = loss + model(**batch).loss
            if not first:
                loss = loss + penalty(model)
            loss.backward()
            return [loss.detach()]

        self.gradients += 1
        self.compare(run)

    def do_step(self) -> None:
        clip = self.rng.choice([None, 0.1, 1e9])
        if clip is not None and self.gradients:
            norm = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), clip)
            assert same_bits(self.engine.clip_grad_norm_(clip), norm)
        self.inner.step()
        self.optimizer.step()
        self.inner.zero_grad()
        self.optimizer.zero_grad()
        self.gradients = 0

    def do_whole_step(self) -> None:
        """As in a loop that is known not to look at gradients: updates may begin during backward."""
        if self.gradients:
            self.do_step()
        batch = self.batch()

        def run(model: Any) -> list[torch.Tensor]:
            with self.region():
                loss = model(**batch).loss
            with self.engine.training.backward() if model is self.paged else nullcontext():
                loss.backward()
            return [loss.detach()]

        self.engine.training.updates_in_backward = lambda: True
        try:
            self.compare(run)
            norm = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), float("inf"))
            assert same_bits(self.engine.clip_grad_norm_(float("inf")), norm)
            self.begun += self.optimizer.updates.early is not None
            self.inner.step()
            self.optimizer.step()
        finally:
            self.engine.training.updates_in_backward = lambda: False
        self.inner.zero_grad()
        self.optimizer.zero_grad()

    def do_zero_grad(self) -> None:
        self.inner.zero_grad()
        self.engine.zero_grad()
        self.gradients = 0

    def do_rate(self) -> None:
        rate = self.rng.choice([1e-2, 1e-3])
        for optimizer in (self.inner, self.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = rate

    def do_evaluate(self) -> None:
        batch = self.batch()

        def run(model: Any) -> list[torch.Tensor]:
            model.eval()
            with torch.no_grad(), self.region():
                out = model(**batch)
            model.train()
            return [out.loss, out.logits]

        self.compare(run)

    def do_read(self) -> None:
        for name in self.rng.sample([n for n, _ in self.plain.named_parameters()], 3):
            assert same_bits(self.paged.get_parameter(name).detach(), self.plain.get_parameter(name).detach())

    def do_state_dict(self) -> None:
        ours, theirs = self.paged.state_dict(), self.plain.state_dict()
        assert list(ours) == list(theirs)
        for name in self.rng.sample(list(theirs), 5):
            assert same_bits(ours[name], theirs[name])

    def do_optimizer_state(self) -> None:
        ours, theirs = self.optimizer.state_dict(), self.inner.state_dict()
        assert ours["state"].keys() == theirs["state"].keys()
        for number in self.rng.sample(list(theirs["state"]), min(3, len(theirs["state"]))):
            assert all(same_bits(ours["state"][number][k], v) for k, v in theirs["state"][number].items())

    def do_keep(self) -> None:
        self.kept = {name: value.clone() for name, value in self.plain.state_dict().items()}

    def do_load(self) -> None:
        # Values must not change under gradients' feet in either model; both see the same change.
        if self.kept is not None:
            self.plain.load_state_dict(self.kept)
            self.paged.load_state_dict(self.kept)

    def do_copy(self) -> None:
        values = dict(plain_copy(self.paged).state_dict())
        assert all(same_bits(values[name], value) for name, value in self.plain.state_dict().items())

    def do_gather(self) -> None:
        try:
            with gathered(self.paged, write=True), torch.no_grad():
                for name, param in self.paged.named_parameters():
                    assert same_bits(param.detach(), self.plain.get_parameter(name).detach())
                    param.mul_(1.01)
        except BudgetError:
            return
        with torch.no_grad():
            for param in self.plain.parameters():
                param.mul_(1.01)

    def do_fail(self) -> None:
        batch = self.batch()
        modules = [m for m in self.plain.modules() if m._parameters]
        which = self.rng.randrange(len(modules))

        def fail(module: nn.Module, args: Any) -> None:
            raise StopError

        for model in (self.plain, self.paged):
            module = [m for m in model.modules() if m._parameters][which]
            handle = module.register_forward_pre_hook(fail)
            try:
                # Some modules are never called: then there is a loss, which is let go of.
                self.both(model, lambda m: m(**batch))
            except StopError:
                pending_updates = self.engine.pages.executor.pending_updates is not None
                assert model is self.plain or pending_updates or not self.engine.pool.tenants.pinned()
            finally:
                handle.remove()

    def do_evict(self) -> None:
        for tensor in list(self.engine.pool.tensors()):
            if tensor in self.engine.pool.eviction and self.rng.random() < 0.5:
                self.engine.pool.admission.evict(tensor)

    def do_abort(self) -> None:
        self.engine.abort()


def check(seed: int, tmp_path: Path, *, on_host: bool = False) -> int:
    """Returns how many steps had updates that began during backward.

    Args:
        seed: decides everything.
        tmp_path: for scratch files.
        on_host: below a device; some updates are carried out on the CPU, and nobody waits for them between actions.
    """
    rng = random.Random(seed)
    entry = ENTRIES[MODELS[seed % len(MODELS)]]
    kind = rng.choice([memory for memory in MEMORIES if memory.startswith("mock")] if on_host else MEMORIES)
    floor, need = needs(entry.build(), tmp_path, kind)
    budget = rng.choice([floor, floor + rng.randrange(need - floor), floor + (need - floor) // 8, 2 * need])
    plain, paged = entry.build(), entry.build()
    checkpointing = rng.choice(entry.checkpointing)
    for model in (plain, paged):
        use_checkpointing(model, checkpointing)
    done = []
    with in_groups() if seed % 2 else nullcontext(), on_pages(paged, kind, budget, tmp_path, seed=seed) as engine:
        twins = Twins(entry, plain, paged, engine, rng)
        if on_host:
            chooser = random.Random(seed)
            twins.optimizer.on_host.chosen = lambda name: chooser.random() < 0.7
        for _ in range(ACTIONS):
            done.append(twins.act())
            # An update that is still pending holds its windows; after plain mode values stay until the next forward.
            held = engine.pages.executor.pending_updates is not None or engine.training.plain.graphs.values
            assert held or not engine.pool.tenants.pinned(), done
            if on_host:
                assert engine.pool.backing is not None
                engine.pool.backing.check_integrity()
            else:
                engine.check_integrity()
        values = paged.state_dict()
        assert all(same_bits(values[name], value) for name, value in plain.state_dict().items()), done
        del values
        twins.do_zero_grad()
    return twins.begun


UPDATE_IN_BACKWARD = (1, 3)
"""Seeds of which some updates begin in backward."""


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in (*UPDATE_IN_BACKWARD, 10) else pytest.mark.wide) for n in range(16)]
)
def test_any_order(seed: int, tmp_path: Path) -> None:
    begun = check(seed, tmp_path)
    assert begun or seed not in UPDATE_IN_BACKWARD


@pytest.mark.thinned(1)
@pytest.mark.parametrize("seed", range(1000, 1006))
def test_any_order_with_updates_on_the_cpu(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, on_host=True)


def test_a_pass_reads_what_the_cpu_has_updated_in_backward(tmp_path: Path) -> None:
    """It read NaN where other updates of the step were still pending."""
    check(1058, tmp_path, on_host=True)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1006, 1200))
def test_any_order_with_updates_on_the_cpu_at_length(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, on_host=True)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(16, 400))
def test_any_order_at_length(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
