"""One of several processes: runs loops that do more than to train, in ordinary memory and on pages, and compares.

Started by torchrun with a folder for pages and names of `LOOPS`. After its first steps no loop may need agreement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from ptm_accel.integrations.accelerate import PagedGradScaler

from ptm_accel.engine import Engine
from tests.distributed.cases import SMALL_BYTES, Case
from tests.distributed.paged_ranks import attach, weights_of
from tests.distributed.twin import Twin
from tests.plain_loop import same_bits

CASE = Case()
STEPS, WARM_UP = 6, 3


class Training:
    """One model in training, on pages or not.

    Args:
        model: it.
        folder: for pages; None for ordinary memory.
        kib: the budget.

    Attributes:
        model, optimizer: see above; AdamW over what is trained.
        rank: of this process.
        engine: the model on pages; None in ordinary memory.
        numbers: what is to be the same on pages and in ordinary memory.
    """

    def __init__(self, model: nn.Module, folder: Path | None, kib: int) -> None:
        self.model: Any = model
        self.rank = dist.get_rank()
        self.engine: Engine | None = None
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if folder is not None:
            self.engine = attach(CASE, model, folder, host_memory=f"{kib}KiB")
            self.optimizer = self.engine.bind_optimizer(self.optimizer)
        self._twin = Twin(model, SMALL_BYTES)
        self.numbers: list[Any] = []
        self._agreed: list[int] = []

    def loss(self, number: int) -> torch.Tensor:
        """The loss of a batch, which is noted."""
        loss: torch.Tensor = self.model(**CASE.batch(number, self.rank)).loss
        self.numbers.append(loss.item())
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Afterwards `p.grad` is the mean over all processes, or a sum of such."""
        with self._twin.micro_batch(last=True) if self.engine is None else nullcontext():
            for param, total in self._twin.take().items():
                param.grad = None
                self._twin._sums[param] = total
            loss.backward()
        if self.engine is None:
            for param, total in self._twin._sums.items():
                param.grad = total

    def step(self) -> None:
        """An update; takes down how often ranks had to agree."""
        self.optimizer.step()
        self.end_step()

    def end_step(self) -> None:
        """Drops the gradients."""
        self._twin.take()
        self.optimizer.zero_grad()
        if self.engine is not None:
            assert self.engine.training.shards is not None
            self._agreed.append(self.engine.training.shards.stats.agreed)

    def weights(self) -> dict[str, torch.Tensor]:
        """All of them, whole."""
        if self.engine is not None:
            return weights_of(self.model)
        return {name: param.detach() for name, param in self.model.named_parameters()}

    def end(self) -> None:
        """Checks that ranks did the same, without asking one another."""
        assert self.engine is not None
        assert self.engine.training.shards is not None
        mine = (self._agreed, self.engine.training.shards.stats.sequence)
        everyone: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        assert all(other == mine for other in everyone), everyone
        late = self._agreed[WARM_UP:]
        assert len(set(late)) == 1, f"agreed so often by the end of each step: {self._agreed}"
        self.engine.check_integrity()
        self.engine.close()


def gradients_looked_at(training: Training) -> None:
    """Each gradient after each backward, by a function and by torch's clipping."""
    for step in range(STEPS):
        training.backward(training.loss(step))
        training.numbers += [param.grad.square().sum().item() for param in training.model.parameters()]
        training.numbers += [torch.linalg.vector_norm(param.grad).item() for param in training.model.parameters()]
        training.numbers.append(torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.5).item())
        training.step()


def unfrozen(training: Training) -> None:
    """A layer and the embeddings are trained from the third step on, and the layer rests in between."""
    for step in range(2 * STEPS):
        for name, param in training.model.named_parameters():
            if "layers.1." in name or "embed" in name:
                param.requires_grad_(step >= 2 and (step != 4 or "embed" in name))
        training.backward(training.loss(step))
        training.step()
        if step < STEPS:
            training._agreed.clear()


def parts_called(training: Training) -> None:
    """The layers and the head one after the other, by code of its own."""
    for step in range(STEPS):
        batch = CASE.batch(step, training.rank)
        hidden = training.model.model(input_ids=batch["input_ids"]).last_hidden_state
        logits = training.model.lm_head(hidden)[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
        training.numbers.append(loss.item())
        training.backward(loss)
        training.step()


def averages_and_evaluations(training: Training) -> None:
    """An average of all weights, evaluations, texts of other lengths on each rank, and an uneven last step."""
    averages = [param.detach().clone() for param in training.model.parameters()]
    for step in range(2 * STEPS):
        for micro in range(1 if step % 4 == 3 else 3):
            training.backward(training.loss(10 * step + micro))
        training.step()
        for average, param in zip(averages, training.model.parameters(), strict=True):
            average.lerp_(param.detach(), 0.1)
        training.model.eval()
        with torch.no_grad():
            training.loss(500 + step)
            ids = CASE.batch(step, training.rank)["input_ids"][:1]
            made = training.model.generate(ids, max_new_tokens=2 + 3 * training.rank, do_sample=False, use_cache=True)
        training.numbers += made.flatten().tolist()
        training.model.train()
    training.numbers += [average.sum().item() for average in averages]


def two_forwards(training: Training) -> None:
    """Before one backward, with a frozen model beside."""
    frozen = CASE.build().requires_grad_(False)
    engine = None
    if training.engine is not None:
        engine = Engine.attach(frozen, training.engine.asked, device=torch.device("cpu"), evaluates=True)
        engine.training.replicate()
    for step in range(STEPS):
        with torch.no_grad():
            reference = frozen(**CASE.batch(step, training.rank)).loss
        chosen, rejected = training.loss(step), training.loss(50 + step)
        training.backward((chosen - reference).square() + chosen - 0.1 * rejected)
        training.step()
    if engine is not None:
        engine.close()


def skipped_steps(training: Training) -> None:
    """Half precision, whose loss is infinite on one rank once: all of them skip that step."""
    kind = torch.amp.GradScaler if training.engine is None else PagedGradScaler
    scaler = kind("cpu", init_scale=2.0**8, growth_interval=3)
    for step in range(STEPS + 2):
        with torch.autocast("cpu", torch.float16):
            loss = training.loss(step)
        training.backward(scaler.scale(loss * (float("inf") if (step, training.rank) == (4, 1) else 1.0)))
        scaler.step(training.optimizer)
        scaler.update()
        training.end_step()
        training.numbers.append(scaler.get_scale())
    assert training.numbers[7::2][:2] == [512.0, 256.0], "a step was skipped"


def resized(training: Training) -> None:
    """More words than before, from the second step on."""
    for step in range(2 * STEPS):
        if step == 1:
            torch.manual_seed(3)
            training.model.resize_token_embeddings(300, mean_resizing=False)
            if training.engine is not None:
                training.engine.follow()
                training.optimizer = training.engine.bind_optimizer(
                    torch.optim.AdamW(training.model.parameters(), lr=1e-2)
                )
            else:
                training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
        training.backward(training.loss(step))
        training.step()


def taken_off(training: Training) -> None:
    """The model has left its pages in the end, between a backward and its step."""
    for step in range(STEPS):
        training.backward(training.loss(step))
        if step < STEPS - 1:
            training.step()
    if training.engine is not None:
        before = weights_of(training.model)
        training.engine.detach()
        assert all(torch.equal(param, before[name]) for name, param in training.model.named_parameters())
        training.engine = None
    training.numbers += [param.grad.sum().item() for param in training.model.parameters()]


class Kinds(nn.Module):
    """Parameters and buffers of all kinds of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.fp16 = nn.Parameter(torch.randn(64, 63).half())
        self.fp64 = nn.Parameter(torch.randn(64, 63).double())
        self.pairs = nn.Parameter(torch.randn(64, 65, dtype=torch.complex64))
        self.fp8 = nn.Parameter(torch.randn(64, 64).to(torch.float8_e4m3fn), requires_grad=False)
        self.flags = nn.Parameter(torch.randint(0, 2, (5000,)).bool(), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Parameter(torch.randn(311, 7))
        self.register_buffer("expanded", torch.full((3,), 1.0 + dist.get_rank()).expand(4, 3))
        self.register_buffer("turned", torch.randn(4, 3, dtype=torch.complex64).t())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = input_ids.float().mean(-1, keepdim=True).expand(-1, 64) / 257
        for layer in self.layers:
            x = torch.relu(layer(x))
        frozen = self.fp8.float().mean() + self.flags.float().mean() + self.turned.abs().mean()
        trained = self.fp16.float().square().mean() + self.pairs.abs().square().mean()
        return SimpleNamespace(loss=(x.sum() + self.fp64.square().mean()).float() * frozen + trained)


def kinds_of_numbers(training: Training) -> None:
    """Sums of gradients, moves of values, and the norm of all."""
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-2)
    if training.engine is not None:
        training.optimizer = training.engine.bind_optimizer(training.optimizer)
    for step in range(STEPS):
        training.backward(training.loss(step))
        training.step()
    assert training.engine is None or training.model.expanded.eq(1.0).all(), "buffers are the first rank's"


LOOPS: dict[str, tuple[Callable[[Training], None], int]] = {
    loop.__name__: (loop, kib)
    for loop, kib in {
        gradients_looked_at: 1536,
        unfrozen: 1536,
        parts_called: 1536,
        averages_and_evaluations: 1536,
        two_forwards: 4096,
        skipped_steps: 1536,
        resized: 2560,
        taken_off: 1536,
        kinds_of_numbers: 2560,
    }.items()
}
"""Each with its budget in KiB."""


def main(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    for name in names:
        sys.stderr.write(f"loop {name}\n")
        loop, kib = LOOPS[name]
        numbers, weights = [], []
        for where in (None, folder):
            torch.manual_seed(dist.get_rank() if loop is kinds_of_numbers and where is not None else 0)
            training = Training(Kinds() if loop is kinds_of_numbers else CASE.build(), where, kib)
            loop(training)
            numbers.append(training.numbers)
            weights.append(training.weights())
            if training.engine is not None:
                training.end()
        theirs, ours = numbers
        assert ours == theirs, f"{ours} and {theirs}"
        for key, weight in weights[0].items():
            assert same_bits(weights[1][key], weight), f"{key}: {weights[1][key]} and {weight}"
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
