"""Parameters are there while a forward uses them, whoever reads them, and free to leave when it has returned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.memory.block import Place
from tests.plain_loop import same_bits
from tests.tiers import at_floor, on_pages
from tests.zoo import ENTRIES

WIDTH = 64


def linear(bias: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def inputs(seed: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


class Mixer(nn.Module):
    """Computes with its children's parameters itself, as state-space mixers and `nn.MultiheadAttention` do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.a, self.b, self.c = linear(bias=True), linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.a.weight, self.b.weight
        x = F.linear(self.c(x) * self.scale, first, self.a.bias)
        return F.linear(torch.tanh(x), second) + first.sum()


class Table(nn.Module):
    """Gives its parameter itself to whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Any:
        return self.rows


class Tables(Table):
    def forward(self) -> Any:
        return {"rows": (self.rows, 1)[0], "other": None}


class Caller(nn.Module):
    """Uses what a module returned after other modules have run."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.ModuleList(linear() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table()
        rows = rows["rows"] if isinstance(rows, dict) else rows
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ rows


class Several(nn.Module):
    """Calls one module several times, and ties another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.tied = linear(bias=True), linear(), linear()
        self.tied.weight = self.other.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
            x = self.other(x) + x
        return self.tied(x)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(linear(bias=True) for _ in range(5)))
        for layer in self.layers[::2]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """torch's own attention reads the weights of a projection that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[None]
        return self.norm(self.attention(y, y, y)[0] + y)


class Recurrent(nn.Module):
    """cuDNN-style modules hold their parameters in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x[None])[0])


class Computed(nn.Module):
    """A weight computed from parameters at every use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(linear())
        self.after = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.layer(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixer": lambda: nn.Sequential(Mixer(), linear(), Mixer()),
    "a returned parameter": lambda: Caller(Table()),
    "a returned dictionary": lambda: Caller(Tables()),
    "called several times": Several,
    "frozen": Frozen,
    "attention": Attention,
    "lstm": Recurrent,
    "weight norm": Computed,
}


def step_of(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Output, loss and gradients of one forward and backward."""
    out = model(inputs(seed))
    loss = out.square().mean()
    loss.backward()
    return {"out": out.detach(), "loss": loss.detach()}


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def paged_grads(engine: Engine) -> dict[str, torch.Tensor]:
    """Gradients one at a time, as they do not all fit at once."""
    assert engine.gradients is not None
    found = {}
    for grad in engine.gradients.present():
        assert grad.value is not None
        found[grad.slot.name] = engine.pages.executor.snapshot(grad.value).clone()
    return found


def same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == plain.keys() and all(same_bits(ours[key], plain[key]) for key in plain)


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model twice."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    return plain, make()


@pytest.mark.parametrize("kind", ["host+disk", "mock+host"])
@pytest.mark.parametrize("name", MODELS)
def test_whoever_reads_a_parameter_gets_its_values(name: str, kind: str, tmp_path: Path) -> None:
    plain, paged = twins(MODELS[name])
    with at_floor(paged, tmp_path, kind) as engine:
        for seed in range(2):
            assert same(step_of(paged, seed), step_of(plain, seed))
            assert not engine.pool.tenants.pinned()
        assert same(paged_grads(engine), grads_of(plain))
        assert engine.pool.stats.evictions > 0
        for ours, theirs in zip(paged.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert theirs.grad is None or same_bits(ours.grad, theirs.grad)


def test_pins_last_as_long_as_the_forward_that_needs_them(tmp_path: Path) -> None:
    model = nn.Sequential(Mixer(), linear())
    seen: list[set[str]] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen.append({t.name for t in engine.pool.tenants.pinned()})

    with at_floor(model, tmp_path) as engine:
        model[0].c.register_forward_hook(look)
        model[1].register_forward_hook(look)
        step_of(model)
        # Hooks that come after ours see the module's own parameters free already.
        inside, after = seen
        assert inside == {"0.scale"}
        assert after == set()
        assert not engine.pool.tenants.pinned()


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_an_exception_in_a_forward_leaves_no_pins(checkpointing: bool | None, tmp_path: Path) -> None:
    plain, paged = twins(lambda: nn.Sequential(Mixer(), nn.Sequential(linear(), linear()), Mixer()))
    failing = itertools.count()

    def fail(module: nn.Module, args: Any) -> None:
        if next(failing) == 1:
            raise RuntimeError("the user's own")

    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        if checkpointing is None:
            return step_of(model)
        out = torch.utils.checkpoint.checkpoint(model, inputs().requires_grad_(), use_reentrant=checkpointing)
        loss = out.square().mean()
        loss.backward()
        return {"out": out.detach(), "loss": loss.detach()}

    with at_floor(paged, tmp_path) as engine:
        paged[1][1].register_forward_pre_hook(fail)
        if checkpointing is None:
            run(paged)
            engine.zero_grad()
        with pytest.raises(RuntimeError, match="the user's own"):
            run(paged)
        assert not engine.pool.tenants.pinned()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        engine.zero_grad()
        assert same(run(paged), run(plain))
        assert same(paged_grads(engine), grads_of(plain))


def test_forwards_cut_off_without_their_hooks_are_ended_by_abort(tmp_path: Path) -> None:
    """As Ctrl-C in the middle of a hook can do."""
    plain, paged = twins(lambda: nn.Sequential(linear(), linear()))
    with at_floor(paged, tmp_path) as engine:
        engine.residency.forwards.enter(paged)
        engine.residency.forwards.enter(paged[0])
        assert engine.pool.tenants.pinned()
        engine.abort()
        assert not engine.pool.tenants.pinned()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert same(step_of(paged), step_of(plain))


def test_closing_after_ctrl_c_in_a_forward_hides_nothing(tmp_path: Path) -> None:
    _, paged = twins(lambda: nn.Sequential(linear(), linear()))

    def press(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        try:
            step_of(paged)
        finally:
            assert engine.pool.tenants.pinned()
            engine.close()

    with at_floor(paged, tmp_path) as engine:
        paged[1].register_forward_pre_hook(press)
        with pytest.raises(KeyboardInterrupt):
            run()
        assert engine.pool.closed


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_training_goes_on_after_ctrl_c_in_a_forward(compiled: bool, tmp_path: Path) -> None:
    """In a loop of one's own, as in a notebook, nobody calls `abort`; nor does torch call the hooks at the end."""
    plain, paged = twins(lambda: nn.Sequential(Mixer(), nn.Sequential(linear(), linear()), Mixer()))
    pressed = [2]

    def press(module: nn.Module, args: Any) -> None:
        if step in pressed:
            pressed.remove(step)
            raise KeyboardInterrupt

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        found = step_of(model, step)
        optimizer.step()
        optimizer.zero_grad()
        return found

    with at_floor(paged, tmp_path) if not compiled else on_pages(paged, "host+disk", 8 << 20, tmp_path) as engine:
        paged[1][1].register_forward_pre_hook(press)
        ours, theirs = engine.bind_optimizer(adamw_of(paged)), adamw_of(plain)
        called = torch.compile(paged, backend="eager") if compiled else paged
        passes = []
        for step in range(6):
            if step in pressed:
                with pytest.raises(KeyboardInterrupt):
                    train(called, ours)
                assert engine.pool.tenants.pinned()
            assert same(train(called, ours), train(plain, theirs)), step
            assert not engine.pool.tenants.pinned()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            passes.append(engine.run_ahead.tally.passes)
        engine.check_integrity()
        # A model that is one compiled region is not followed.
        assert passes == [0 if compiled else number for number in range(1, 7)]
        assert same({n: p.clone() for n, p in paged.state_dict().items()}, plain.state_dict())


class Again(nn.Module):
    """Calls itself from within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        scale = self.scale
        x = self.inner(x)
        return (self(x, depth - 1) if depth else x) * scale


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_model_that_calls_itself_is_not_taken_for_one_that_was_torn_down(
    reentrant: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, paged = twins(Again)
    depths: list[int] = []
    with at_floor(paged, tmp_path) as engine:
        forwards = engine.residency.forwards
        monkeypatch.setattr(forwards, "abort", lambda: depths.append(len(forwards._running.frames)))
        paged.inner.register_forward_pre_hook(lambda *_: depths.append(len(forwards._running.frames)))

        def run(model: nn.Module) -> dict[str, torch.Tensor]:
            x = inputs().requires_grad_()
            out = (
                model(x) if reentrant is None else torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
            )
            out.square().mean().backward()
            return {"out": out.detach()}

        assert same(run(paged), run(plain))
        # A user's hook comes after ours: below the model's own forwards there is the inner one's. `abort` saw none.
        assert depths == [2, 3, 4] * (1 if reentrant is None else 2)
        assert same(paged_grads(engine), grads_of(plain))
        monkeypatch.undo()


def test_two_forwards_before_one_backward(tmp_path: Path) -> None:
    plain, paged = twins(Several)

    def run(model: nn.Module) -> torch.Tensor:
        loss = model(inputs(1)).square().mean() - model(inputs(2)).mean()
        loss.backward()
        return loss.detach()

    with at_floor(paged, tmp_path) as engine:
        assert same_bits(run(paged), run(plain))
        assert same(paged_grads(engine), grads_of(plain))


def test_a_graph_that_is_kept_can_be_walked_again(tmp_path: Path) -> None:
    plain, paged = twins(MODELS["mixer"])

    def run(model: nn.Module) -> None:
        loss = model(inputs()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    with at_floor(paged, tmp_path) as engine:
        run(plain)
        run(paged)
        assert same(paged_grads(engine), grads_of(plain))


def test_gradients_of_gradients(tmp_path: Path) -> None:
    plain, paged = twins(lambda: nn.Sequential(linear(bias=True), nn.Tanh(), linear(), nn.Tanh(), linear()))

    def run(model: nn.Module) -> torch.Tensor:
        x = inputs().requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        return slope.detach()

    with at_floor(paged, tmp_path) as engine:
        assert same_bits(run(paged), run(plain))
        assert same(paged_grads(engine), grads_of(plain))


def test_a_read_outside_a_forward(tmp_path: Path) -> None:
    plain, paged = twins(lambda: nn.Sequential(*(linear() for _ in range(6))))
    with at_floor(paged, tmp_path) as engine:
        for ours, theirs in zip(paged, plain, strict=True):
            assert same_bits(ours.weight.detach(), theirs.weight.detach())
        places = [slot.value.place for slot in engine.slots]
        assert Place.AWAY in places
        assert not engine.pool.tenants.pinned()


def test_counting_and_naming_bring_nothing_in(tmp_path: Path) -> None:
    model = nn.Sequential(*(linear() for _ in range(6)))
    with at_floor(model, tmp_path) as engine:
        before = engine.pool.stats.faults
        assert sum(p.numel() for p in model.parameters()) == 6 * WIDTH * WIDTH
        assert {p.shape for p in model.parameters()} == {torch.Size([WIDTH, WIDTH])}
        assert {p.dtype for _, p in model.named_parameters()} == {torch.float32}
        assert engine.pool.stats.faults == before


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "t5", "mixtral", "mamba", "lora"])
def test_evaluation_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    plain, paged = entry.build().eval(), entry.build().eval()
    with at_floor(paged, tmp_path) as engine, torch.no_grad():
        before = engine.pool.stats.stored_bytes
        for number in range(2):
            batch = entry.batch_at(number)
            ours, theirs = paged(**batch), plain(**batch)
            assert same_bits(ours.logits, theirs.logits)
            assert same_bits(ours.loss, theirs.loss)
        assert engine.pool.stats.stored_bytes - before <= sum(s.value.slot_bytes for s in engine.slots)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "t5", "qwen2-moe"])
def test_generation_gives_the_same_tokens(name: str, autocast: bool, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    plain, paged = entry.build().eval(), entry.build().eval()

    def tokens(model: Any) -> torch.Tensor:
        torch.manual_seed(3)
        ids = entry.batch_at(0)["input_ids"]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            made: torch.Tensor = model.generate(input_ids=ids, max_new_tokens=6, do_sample=True, use_cache=True)
        return made

    with at_floor(paged, tmp_path):
        assert same_bits(tokens(paged), tokens(plain))


def test_training_goes_on_between_evaluations(tmp_path: Path) -> None:
    """Two forwards in a graph, one of them without gradients, and modules in another mode meanwhile."""
    plain, paged = twins(MODELS["mixer"])

    def run(model: nn.Module) -> list[torch.Tensor]:
        out = model(inputs(1))
        model.eval()
        with torch.no_grad():
            seen = model(inputs(2))
        model.train()
        out.mean().backward()
        return [out.detach(), seen]

    with at_floor(paged, tmp_path) as engine:
        assert all(same_bits(a, b) for a, b in zip(run(paged), run(plain), strict=True))
        assert same(paged_grads(engine), grads_of(plain))


class Writes(nn.Module):
    """Changes its parameters in its forward, before they are used or after."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(40, 64, max_norm=0.5 if how == "max_norm" else None)
        self.own = nn.Parameter(torch.randn(64, 64) / 8)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.how = how
        if how == "hook":
            self.layers[1].register_forward_pre_hook(lambda module, args: self.shrink(module.weight))
        if how == "data in a hook":
            self.layers[1].register_forward_pre_hook(self.shrink_data)

    @staticmethod
    def shrink(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.9)

    @staticmethod
    def shrink_data(module: nn.Module, args: object) -> None:
        module.weight.data.mul_(0.9)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if self.how == "own":
            self.shrink(self.own)
        if self.how == "another's":
            self.shrink(self.layers[3].weight)
        if self.how == "own data":
            self.own.data.copy_(self.own.data.flip(0))
        if self.how == "another's data":
            self.layers[3].weight.data.mul_(0.9)
        out = self.layers(self.words(words) @ self.own)
        if self.how == "afterwards":
            self.shrink(self.layers[4].bias)
        if self.how == "data afterwards":
            self.layers[4].bias.data.mul_(0.9)
        return out


@pytest.mark.thinned(10)
@pytest.mark.parametrize("trains", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
@pytest.mark.parametrize(
    "how",
    [
        *("max_norm", "own", "another's", "afterwards", "hook"),
        *("own data", "another's data", "data afterwards", "data in a hook"),
    ],
)
def test_what_a_forward_writes_is_kept(how: str, kind: str, trains: bool, tmp_path: Path) -> None:
    def passes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        seen = []
        for number in range(4):
            words = torch.randint(0, 40, (4, 7), generator=torch.Generator().manual_seed(number))
            with torch.set_grad_enabled(trains):
                out = model(words)
            seen.append(out.detach().clone())
            if trains:
                out.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return seen

    plain, paged = Writes(how), Writes(how)
    expected = passes(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    with at_floor(paged, tmp_path, kind) as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(paged.parameters(), fused=True))
        assert all(same_bits(a, b) for a, b in zip(passes(paged, optimizer), expected, strict=True))
        assert same(dict(paged.state_dict()), dict(plain.state_dict()))
        assert engine.pool.stats.evictions > 0


def test_detaching_gives_the_plain_model_back(tmp_path: Path) -> None:
    model = Several()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    params = dict(model.named_parameters(remove_duplicate=False))
    hooks = {m: (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()}
    with at_floor(model, tmp_path) as engine:
        step_of(model)
        assert engine.detach() is model
    assert same(dict(model.state_dict()), values)
    assert all(param is params[name] for name, param in model.named_parameters(remove_duplicate=False))
    assert {m: (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()} == hooks
    assert all(type(m._parameters) is dict for m in model.modules())
    step_of(model)
    assert all(p.grad is not None for p in model.parameters())


def test_memory_that_grows_in_a_forward_takes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward whose pages are all there charges nothing; what grows beside them takes room from them all the same."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with on_pages(model, "host+disk", 4 << 20, tmp_path) as engine:
        pool = engine.pool

        class Grown:
            total_bytes = pool.budget.capacity_bytes
            looks = 0

            def begin_pass(self, *args: Any, **kwargs: Any) -> None:
                """The first forward."""

            def look(self) -> None:
                self.looks += 1
                if self.looks == 4:
                    pool.budget.capacity_bytes = pool.budget.used_bytes - (40 << 10)

        grown = Grown()
        monkeypatch.setattr(pool.admission, "activation_reserve", grown)
        with torch.no_grad():
            model(torch.ones(1, 64))
        monkeypatch.setattr(pool.admission, "activation_reserve", None)
        assert grown.looks >= 6
        assert pool.budget.free_bytes >= 0
        assert pool.stats.evictions >= 3
