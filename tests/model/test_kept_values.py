"""Views of a parameter's values that are kept show what it had, whatever data it is given afterwards, as in torch."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ptm_accel
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError
from ptm_accel.memory.block import PART_ALIGN
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.transfer import round_up
from tests.plain_loop import adamw, same_bits
from tests.tiers import AMPLE, at_floor, in_groups, members, needs, on_pages

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def net(blocks: bool, layers: int = 6) -> nn.Sequential:
    """Parameters that move alone, or blocks whose parameters move together."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() if blocks else nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def evict(engine: Engine) -> None:
    for slot in engine.slots:
        if slot.value.block in engine.pool.eviction:
            engine.pool.admission.evict(slot.value.block)


def used_bytes(engine: Engine) -> int:
    """What is charged for values."""
    engine.pool.admission.released.settle()
    return engine.pool.budget.used_by_tag()[Tag.PARAM]


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        assert same_bits(ours[name], value), name


# ---- ways to keep and to give ----------------------------------------------------------------------------------------

KEEPS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "slice": lambda p: p.data[1:],
    "view of a view": lambda p: p.detach().view(-1)[2:].view(-1, 2)[:, 0],
    "numpy": lambda p: p.detach().numpy(),
    "storage": lambda p: (p.data.untyped_storage(), p.shape, p.stride(), p.data.storage_offset()),
    "graph": lambda p: p.data.requires_grad_().sin(),
}


def seen(kept: Any) -> torch.Tensor:
    """What is kept shows now."""
    if isinstance(kept, tuple):
        storage, shape, stride, offset = kept
        return torch.empty(0).set_(storage).as_strided(shape, stride, offset).clone()
    if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
        (slope,) = torch.autograd.grad(kept.sum(), kept.grad_fn.next_functions[0][0].variable, retain_graph=True)
        return slope
    return torch.as_tensor(kept).detach().clone()


GIVES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "full": lambda p: torch.full(p.shape, 0.5),
    "scaled": lambda p: p.data * 0.5,
    "turned": lambda p: p.data.flip(0),
    "strided": lambda p: torch.stack([p.data, p.data + 1.0], -1)[..., 1],
    "lazy": lambda p: torch._neg_view(p.data),
}


PAIRS = [(keep, list(GIVES)[number % len(GIVES)]) for number, keep in enumerate(KEEPS)]
PAIRS += [("data", give) for give in GIVES]
KINDS = ("host+disk", "mock+host+disk")


@pytest.mark.thinned(16)
@pytest.mark.parametrize("memory", KINDS)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("keep", "give"), dict.fromkeys(PAIRS))
def test_what_is_kept_shows_what_the_parameter_had(
    keep: str, give: str, blocks: bool, memory: str, tmp_path: Path
) -> None:
    """An average of the weights goes in for an evaluation, and out again."""
    model, plain = net(blocks, 3), net(blocks, 3)
    with in_groups() if blocks else contextlib.nullcontext(), on_pages(model, memory, AMPLE, tmp_path) as engine:
        before, found = used_bytes(engine), list[list[torch.Tensor]]()
        for either in (model, plain):
            weight = dict(either.named_parameters())["1.up.weight" if blocks else "1.weight"]
            kept, values = KEEPS[keep](weight), weight.data.clone()
            weight.data = GIVES[give](weight)
            found.append([seen(kept), either(inputs()).detach()])
            assert either is plain or used_bytes(engine) >= before + weight.nbytes
            weight.data = values
            found[-1] += [seen(kept), either(inputs()).detach()]
            if keep == "data":
                weight.data = weight.data * 2.0
                weight.data = kept
            del kept
        assert all(same_bits(ours, theirs) for ours, theirs in zip(*found, strict=True))
        for either in (model, plain):
            either(inputs())
        assert used_bytes(engine) == before
        evict(engine)
        assert_same(model.state_dict(), plain.state_dict())


# ---- programs that people write --------------------------------------------------------------------------------------


class Loop:
    """A training loop, plain or on pages."""

    def __init__(self, model: nn.Module, engine: Engine | None) -> None:
        self.model, self.engine = model, engine
        self.params = dict(model.named_parameters())
        optimizer = adamw(model)
        self.optimizer = optimizer if engine is None else engine.bind_optimizer(optimizer)
        self.steps = 0
        self.seen: list[torch.Tensor] = []

    def see(self, value: torch.Tensor) -> None:
        self.seen.append(value.detach().clone())

    def train(self, before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None) -> None:
        """A step: `before` comes before its forward, `after` behind its backward."""
        before()
        loss = self.model(inputs(self.steps)).square().mean()
        loss.backward()
        after()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.see(loss)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.see(self.model.eval()(inputs(100)))
        self.model.train()


def average_of_the_weights(loop: Loop) -> None:
    shadow = {name: p.data.clone() for name, p in loop.params.items()}
    for _ in range(3):
        loop.train()
        loop.train()
        for name, p in loop.params.items():
            shadow[name] = 0.1 * p.data + 0.9 * shadow[name]
        backup = {}
        for name, p in loop.params.items():
            backup[name] = p.data
            p.data = shadow[name]
        loop.evaluate()
        for name, p in loop.params.items():
            p.data = backup[name]
        del backup


def binary_weights(loop: Loop) -> None:
    """As BinaryConnect, which keeps what the signs stand for."""
    for _ in range(4):
        kept = {}

        def binarize() -> None:
            for name, p in loop.params.items():
                kept[name], p.data = p.data, p.data.sign()  # noqa: B023

        def restore() -> None:
            for name, p in loop.params.items():
                p.data = kept.pop(name)  # noqa: B023

        loop.train(binarize, restore)


def old_values(loop: Loop) -> None:
    for _ in range(3):
        loop.train()
        for p in loop.params.values():
            old = p.data
            p.data = p.data * 2
            loop.see(old)
            loop.see(p)
            p.data = old
        del old


def exchanged(loop: Loop) -> None:
    for _ in range(3):
        loop.train()
        matrices = [p for p in loop.params.values() if p.shape == (WIDTH, WIDTH)]
        for one, other in itertools.pairwise(matrices):
            one.data, other.data = other.data, one.data
        loop.evaluate()


def turned_around(loop: Loop) -> None:
    """Given a view of what it has, or of what another has."""
    for _ in range(3):
        loop.train()
        matrices = [p for p in loop.params.values() if p.shape == (WIDTH, WIDTH)]
        for one, other in itertools.pairwise(matrices):
            kept = one.data
            one.data = kept.t()
            loop.see(kept)
            other.data = kept.t()
            loop.see(other)
            other.data = kept.flip(0)
            loop.see(kept)
            # torch's fused kernels take no heed of strides.
            one.data = one.data.contiguous()
        del kept
        loop.evaluate()


def one_of_a_block(loop: Loop) -> None:
    """Only one member of a block gets other data; the others are what they were."""
    for _ in range(3):
        loop.train()
        for p in list(loop.params.values())[1::3]:
            kept = p.detach()[..., 1:]
            p.data = p.data + 0.25
            loop.see(kept)
            del kept
        loop.evaluate()


def in_a_forward(loop: Loop) -> None:
    kept: list[torch.Tensor] = []

    def exchange(module: nn.Module, args: object) -> None:
        kept[:] = [next(module.parameters()).data]
        next(module.parameters()).data = kept[0] * 0.5

    def restore(module: nn.Module, args: object, output: object) -> None:
        next(module.parameters()).data = kept.pop()

    layer = loop.model[2]  # type: ignore[index]
    handles = [layer.register_forward_pre_hook(exchange), layer.register_forward_hook(restore)]
    for _ in range(4):
        loop.evaluate()
    for handle in handles:
        handle.remove()
    for _ in range(3):
        loop.train()
        loop.evaluate()


def beside_a_living_graph(loop: Loop) -> None:
    for _ in range(4):
        x = inputs().requires_grad_()
        graph = loop.model(x)
        for p in list(loop.params.values())[::2]:
            p.data = p.data * 0.9
        loop.see(loop.model(x))
        loop.see(graph)
        del graph
        loop.train()


def gathered(loop: Loop) -> None:
    for _ in range(4):
        loop.train()
        together = loop.model[1]  # type: ignore[index]
        with ptm_accel.gathered(together, write=True) if loop.engine else contextlib.nullcontext():
            kept = [p.data for p in together.parameters()]
            for p in list(together.parameters())[:-1]:
                p.data = p.data * 0.5
            last = together.down if isinstance(together, Block) else together
            last.weight.data.mul_(0.5)
        for before in kept[:-1]:
            loop.see(before)
        del kept, before
        loop.evaluate()


PROGRAMS = [
    average_of_the_weights,
    binary_weights,
    old_values,
    exchanged,
    turned_around,
    one_of_a_block,
    in_a_forward,
    beside_a_living_graph,
    gathered,
]


@contextlib.contextmanager
def loops(
    blocks: bool, memory: str, budget: str, directory: Path, *, keeps_all: bool = False
) -> Iterator[tuple[Loop, Loop, Engine]]:
    """The same loop on pages and plain, compared at the end; what it keeps at once is beside what training needs."""
    plain, model = net(blocks), net(blocks)
    with in_groups() if blocks else contextlib.nullcontext():
        floor, need = needs(net(blocks), directory, memory, optimizer=adamw)
        floor += keeps_all * 8 * sum(round_up(p.numel(), PART_ALIGN) for p in plain.parameters())
        size = {"floor": floor, "half": max(need // 2, floor), "fits": AMPLE}[budget]
        with on_pages(model, memory, size, directory) as engine:
            ours, theirs = Loop(model, engine), Loop(plain, None)
            yield ours, theirs, engine
            assert len(ours.seen) == len(theirs.seen)
            for number, (one, other) in enumerate(zip(ours.seen, theirs.seen, strict=True)):
                assert same_bits(one, other), number
            assert_same(model.state_dict(), plain.state_dict())
            engine.settle()
            model(inputs())
            used_bytes(engine)
            assert engine.pool.admission.released.nbytes == 0
            assert not any(slot.apart for slot in engine.slots)
            assert engine.pool.budget.peak_bytes <= engine.pool.budget.capacity_bytes


@pytest.mark.thinned(20)
@pytest.mark.parametrize("memory", KINDS)
@pytest.mark.parametrize("budget", ["floor", "half", "fits"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program(program: Callable[[Loop], None], blocks: bool, budget: str, memory: str, tmp_path: Path) -> None:
    keeps_all = program in (average_of_the_weights, binary_weights, gathered)
    with loops(blocks, memory, budget, tmp_path, keeps_all=keeps_all) as (ours, theirs, _):
        program(theirs)
        program(ours)


# ---- programs that nobody writes -------------------------------------------------------------------------------------


class Chance:
    """Does to a loop what the same seed does to every other."""

    def __init__(self, loop: Loop, seed: int, most: int) -> None:
        self.loop, self.rng, self.most = loop, random.Random(seed), most
        self.kept: list[tuple[str, Any]] = []
        self.graphs: list[torch.Tensor] = []

    def draw(self) -> nn.Parameter:
        return self.loop.params[self.rng.choice(list(self.loop.params))]

    def keep(self) -> None:
        """Other data is given at once: without that, torch shows in what is kept what a step makes of the values."""
        while len(self.kept) >= self.most:
            self.kept.pop(self.rng.randrange(len(self.kept)))
        kind, p = self.rng.choice(list(KEEPS)), self.draw()
        self.kept.append((kind, KEEPS[kind](p)))
        self.give(p)

    def give(self, p: nn.Parameter | None = None) -> None:
        p = self.draw() if p is None else p
        # torch's fused kernels take no heed of strides, and no lazy negation.
        p.data = GIVES[self.rng.choice(["full", "scaled", "turned"])](p)

    def put_back(self) -> None:
        """Maybe to another parameter. Who keeps what is given shares its memory with the parameter in torch."""
        whole = [number for number, (kind, _) in enumerate(self.kept) if kind in ("data", "detach")]
        if whole:
            _, data = self.kept.pop(self.rng.choice(whole))
            fitting = [p for p in self.loop.params.values() if p.shape == data.shape]
            self.rng.choice(fitting).data = data

    def exchange(self) -> None:
        one = self.draw()
        other = self.rng.choice([p for p in self.loop.params.values() if p.shape == one.shape])
        one.data, other.data = other.data, one.data

    def look(self) -> None:
        for _, kept in self.kept:
            self.loop.see(seen(kept))
        self.loop.see(self.draw())

    def drop(self) -> None:
        self.kept.clear()
        self.graphs.clear()

    def train(self) -> None:
        self.graphs.clear()
        self.loop.train(after=self.rng.choice([self.keep, self.give, self.put_back, self.exchange, self.drop]))

    def leave_a_graph(self) -> None:
        self.graphs.append(self.loop.model(inputs().requires_grad_()))

    def gather(self) -> None:
        part = self.loop.model[self.rng.randrange(3)]  # type: ignore[index]
        with ptm_accel.gathered(part, write=True) if self.loop.engine else contextlib.nullcontext():
            for p in part.parameters():
                if self.rng.random() < 0.5:
                    self.kept.append(("slice", p.data[1:]))
                    p.data = p.data * 0.5
        del self.kept[: -self.most]

    def in_a_forward(self) -> None:
        layer = self.loop.model[self.rng.randrange(3)]  # type: ignore[index]
        change = self.rng.choice([self.keep, self.give, self.exchange, self.put_back])
        handle = layer.register_forward_pre_hook(lambda module, args: change())
        self.loop.evaluate()
        handle.remove()

    def run(self, count: int) -> None:
        one, two = [self.leave_a_graph, self.gather, self.in_a_forward, self.drop], [self.look, self.loop.evaluate]
        for _ in range(count):
            self.rng.choice([self.train, self.keep, self.give, self.put_back, self.exchange] * 2 + one + two * 2)()
        self.look()
        self.drop()
        self.loop.train()


@pytest.mark.thinned(6)
@pytest.mark.parametrize("seed", range(12))
def test_programs_by_chance(seed: int, tmp_path: Path) -> None:
    budget, blocks, memory = ("floor", "half", "fits")[seed % 3], seed // 3 % 2 == 1, KINDS[seed // 6 % 2]
    with loops(blocks, memory, budget, tmp_path, keeps_all=True) as (ours, theirs, engine):
        for loop in (theirs, ours):
            Chance(loop, seed, most=3 if budget == "floor" else 6).run(40)
        assert not blocks or members(engine) > 1


# ---- beside them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", KINDS)
def test_all_values_that_are_kept_one_after_another_are_charged_once(memory: str, tmp_path: Path) -> None:
    model, plain = net(True), net(True)
    with in_groups(), on_pages(model, memory, AMPLE, tmp_path) as engine:
        assert members(engine) > 1
        before, values = used_bytes(engine), sum(round_up(p.nbytes) for p in plain.parameters())
        kept = []
        for p in model.parameters():
            kept.append(p.data)
            p.data = torch.zeros(p.shape)
        assert used_bytes(engine) == before + values
        assert model(inputs()).equal(inputs())
        for p in model.parameters():
            p.data = kept.pop(0)
        assert same_bits(model(inputs()), plain(inputs()))
        assert used_bytes(engine) == before
        assert not any(slot.apart for slot in engine.slots)


@pytest.mark.parametrize("steps", [0, 3])
def test_views_of_others_in_a_group_see_and_change_them_still(steps: int, tmp_path: Path) -> None:
    model, plain = net(True, 2), net(True, 2)
    with in_groups(), on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        ours, theirs = Loop(model, engine), Loop(plain, None)
        for loop in (ours, theirs):
            for _ in range(steps):
                loop.train()
            assert loop is theirs or engine.training.plain.active == bool(steps)
            block = loop.model[1]  # type: ignore[index]
            kept, view = block.up.weight.data, block.down.weight.data
            block.up.weight.data = kept * 0.5
            view.mul_(3.0)
            loop.evaluate()
            view.mul_(0.5)
            loop.see(block.down.weight)
            loop.see(kept)
            del kept
            loop.evaluate()
        assert all(same_bits(one, other) for one, other in zip(ours.seen, theirs.seen, strict=True))


@pytest.mark.parametrize("blocks", [False, True])
def test_without_room_for_both_all_stays_as_it_was(blocks: bool, tmp_path: Path) -> None:
    model, plain = net(blocks), net(blocks)
    with in_groups() if blocks else contextlib.nullcontext(), at_floor(model, tmp_path) as engine:
        weights = [p for p in model.parameters() if p.dim() > 1]
        kept = []

        def keep_all() -> None:
            for p in weights:
                kept.append(p.data)
                p.data = torch.zeros(p.shape)

        with pytest.raises(BudgetError, match=r"cannot place .* set host_memory higher.* a view is alive"):
            keep_all()
        assert 1 <= len(kept) < len(weights)
        originals = [p for p in plain.parameters() if p.dim() > 1]
        for data, p in zip(kept, originals, strict=False):
            assert same_bits(data, p.detach())
        del data, p
        given = len(kept) - 1
        kept.clear()
        for number, p in enumerate(weights):
            assert p.detach().any() == (number >= given)
        engine.check_integrity()


def test_what_does_not_fit_where_all_did_is_as_it_was(tmp_path: Path) -> None:
    """The hooks are on again, and the others have what they were given."""
    model, plain = net(True), net(True)
    with in_groups(), on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        ours, theirs = Loop(model, engine), Loop(plain, None)
        for loop in (ours, theirs):
            for _ in range(3):
                loop.train()
        assert engine.training.plain.active
        kept = [p.data for p in model.parameters()]
        model[0].up.weight.data = torch.zeros(WIDTH, WIDTH)
        model[1].up.weight.data = torch.zeros(WIDTH, WIDTH)
        with pytest.MonkeyPatch.context() as patched:
            make = engine.pool.admission.make

            def out_of_room(tensor: Any, **options: Any) -> Any:
                if tensor.name == "0.up.weight":
                    raise BudgetError("no room")
                return make(tensor, **options)

            patched.setattr(engine.pool.admission, "make", out_of_room)
            with pytest.raises(BudgetError, match="no room"):
                model(inputs())
        assert not engine.training.plain.active
        engine.abort()
        del kept
        plain[1].up.weight.data = torch.zeros(WIDTH, WIDTH)
        for loop in (ours, theirs):
            loop.train()
        assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("blocks", [False, True])
def test_a_graph_from_before_has_what_it_saved(blocks: bool, tmp_path: Path) -> None:
    """Where everything fits autograd has saved what torch has it save."""
    model, plain = net(blocks), net(blocks)
    with in_groups() if blocks else contextlib.nullcontext(), on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        ours, theirs = Loop(model, engine), Loop(plain, None)
        for loop in (ours, theirs):
            for _ in range(3):
                loop.train()
            for goes_on in (False, True):
                x = inputs().requires_grad_()
                graph = loop.model(x).square().mean()
                for p in list(loop.params.values())[::3]:
                    p.data = p.data * 0.5
                if goes_on:
                    loop.evaluate()
                graph.backward()
                assert x.grad is not None
                loop.see(x.grad)
                for p in loop.params.values():
                    assert p.grad is not None
                    loop.see(p.grad.clone())
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                del graph
                loop.train()
        for number, (one, other) in enumerate(zip(ours.seen, theirs.seen, strict=True)):
            assert same_bits(one, other), number
        assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("memory", KINDS)
def test_a_model_comes_off_its_pages_while_values_are_kept(memory: str, tmp_path: Path) -> None:
    model, plain = net(True), net(True)
    with in_groups(), on_pages(model, memory, AMPLE, tmp_path) as engine:
        kept = []
        for p in [*model.parameters(), *plain.parameters()]:
            kept.append(p.data)
            p.data = p.data * 0.5
        assert all(slot.apart for slot in engine.slots)
        engine.detach()
        assert_same(model.state_dict(), plain.state_dict())
        count = len(list(plain.parameters()))
        assert all(same_bits(one, other) for one, other in zip(kept[:count], kept[count:], strict=True))


def test_data_of_another_shape_while_it_is_kept(tmp_path: Path) -> None:
    model, plain = net(True), net(True)
    with in_groups(), on_pages(model, "host+disk", AMPLE, tmp_path):
        found = []
        for either in (model, plain):
            last, kept = either[5].down, either[5].down.weight.data
            last.weight.data = kept * 0.5
            last.weight.data = last.weight.data[:, : WIDTH // 2].clone()
            either[5].up.weight.data = either[5].up.weight.data[: WIDTH // 2].clone()
            either[5].up.bias.data = either[5].up.bias.data[: WIDTH // 2].clone()
            found.append([kept.clone(), either(inputs()).detach()])
            del kept
        assert all(same_bits(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_masters_follow_what_is_put_back(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        return net(True).to(torch.bfloat16)

    found = []
    for budget in ("half", "fits"):
        model = build()
        _, need = needs(model, tmp_path, "host+disk", master_weights="fp32")
        size = {"half": need * 2 // 3, "fits": AMPLE}[budget]
        with in_groups(), on_pages(model, "host+disk", size, tmp_path, master_weights="fp32") as engine:
            loop = Loop(model, engine)
            for number in range(4):
                for way in ("copied", "kept"):
                    if (number + (way == "kept")) % 2 == (budget == "half"):
                        continue
                    for p in loop.params.values():
                        values = p.data.clone() if way == "copied" else p.data
                        p.data = p.data * 0.5
                        p.data = values
                    del values
                loss = model(inputs(number).bfloat16()).float().square().mean()
                loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same(*found)
