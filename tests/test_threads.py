"""A second thread that uses a model on pages: it is refused or waits, and training keeps plain's numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.accelerate import PTMAccelerator
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import ptm_accel
from ptm_accel.errors import PagedModelError
from ptm_accel.model import forwards
from tests.plain_loop import adamw

STEPS = 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, first: int = 0) -> list[float]:
    """Trains; what meets a forward of another thread is done again."""
    losses: list[float] = []
    for step in range(first, steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))

        def backward(x: torch.Tensor = x) -> float:
            loss = model(x).square().mean()
            loss.backward()
            return loss.item()

        losses.append(insist(backward))
        insist(optimizer.step)
        insist(optimizer.zero_grad)
    return losses


def insist(do: Callable[[], Any], met: str = "met a forward that") -> Any:
    while True:
        try:
            return do()
        except PagedModelError as error:
            if met not in str(error):
                raise


USES: dict[str, Callable[[nn.Module], object]] = {
    "state_dict": lambda model: [value.sum().item() for value in model.state_dict().values()],
    "norm": lambda model: [param.norm().item() for param in model.parameters()],
    "gradients": lambda model: [param.grad for param in model.parameters()],
    "forward": torch.no_grad()(lambda model: model(torch.ones(2, 64)).sum().item()),
    "gathered": lambda model: _gathered(model[3]),
    "copy": ptm_accel.plain_copy,
}


def _gathered(part: nn.Module) -> float:
    with ptm_accel.gathered(part):
        return part.weight.sum().item()


@pytest.mark.parametrize("memory", [160_000, 260_000], ids=["least", "half"])
@pytest.mark.parametrize("use", USES)
def test_training_keeps_its_numbers(use: str, memory: int, tmp_path: Path) -> None:
    plain = net()
    expected = train(plain, adamw(plain))
    model = net()
    engine = ptm_accel.Engine.attach(model, ptm_accel.PTMConfig(host_memory=memory, page_size=4096, disk=str(tmp_path)))
    optimizer = engine.bind_optimizer(adamw(model))
    done = threading.Event()
    seen: list[object] = []
    refused: list[tuple[type[BaseException], str]] = []

    def other() -> None:
        while not done.is_set():
            try:
                seen.append(USES[use](model))
            except BaseException as error:
                # Not the error: its frames hold views of what was read so far.
                refused.append((type(error), str(error)))
            time.sleep(1e-3)

    thread = threading.Thread(target=other, name="reader")
    thread.start()
    try:
        losses = train(model, optimizer)
    finally:
        done.set()
        thread.join()
    assert losses == expected
    assert [each for each in refused if each[0] is not PagedModelError] == []
    assert all("in thread 'reader' met" in text for _, text in refused), refused[:1]
    assert seen or refused
    engine.settle()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.detach(), theirs)
    engine.check_integrity()


@pytest.mark.parametrize("memory", [160_000, 260_000], ids=["least", "half"])
def test_nothing_is_used_in_the_middle_of_a_forward(memory: int, tmp_path: Path) -> None:
    model = net()
    engine = ptm_accel.Engine.attach(model, ptm_accel.PTMConfig(host_memory=memory, page_size=4096, disk=str(tmp_path)))
    optimizer = engine.bind_optimizer(adamw(model))
    train(model, optimizer, 2)
    model(torch.ones(2, 64)).sum().backward()
    param = model[5].weight
    gradient = param.grad
    assert gradient is not None
    uses: dict[str, Callable[[], object]] = {name: lambda use=use: use(model) for name, use in USES.items()} | {
        "data": lambda: param.data,
        "assign data": lambda: setattr(param, "data", torch.ones(64, 64)),
        "assign grad": lambda: setattr(param, "grad", None),
        "use a gradient": lambda: gradient.mul_(2),
        "norm of a gradient": lambda: torch.linalg.vector_norm(gradient),
        "data of a gradient": lambda: setattr(gradient, "data", torch.ones(64, 64)),
        "a layer": lambda: model[5](torch.ones(2, 64)),
        "zero_grad": optimizer.zero_grad,
        "step": optimizer.step,
        "clip": lambda: engine.clip_grad_norm_(1.0),
        "optimizer": optimizer.state_dict,
        "load": lambda: optimizer.load_state_dict(known),
        "save": lambda: engine.saving().__enter__(),
    }
    known, refused = optimizer.state_dict(), []

    def meanwhile(module: nn.Module, args: Any) -> None:
        with ThreadPoolExecutor(1) as threads:
            for name, use in uses.items():
                with pytest.raises(PagedModelError, match="met a forward"):
                    threads.submit(use).result(60)
                refused.append(name)

    hook = model[2].register_forward_pre_hook(meanwhile)
    model(torch.ones(2, 64))
    hook.remove()
    assert refused == list(uses)
    train(model, optimizer, 3, 2)
    engine.check_integrity()


def test_a_forward_whose_end_fails_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    engine = ptm_accel.Engine.attach(
        model, ptm_accel.PTMConfig(host_memory=160_000, page_size=4096, disk=str(tmp_path))
    )
    let_go = forwards._let_go

    def refused(frame: Any) -> None:
        let_go(frame)
        if frame.module is model:
            raise KeyError("what a parameter was given is refused")

    with monkeypatch.context() as patch:
        patch.setattr(forwards, "_let_go", refused)
        with pytest.raises(KeyError):
            model(torch.ones(2, 64))
    with ThreadPoolExecutor(1) as threads:
        threads.submit(model.state_dict).result(60)
    engine.check_integrity()


def test_a_save_is_of_one_step(tmp_path: Path) -> None:
    """Weights and optimizer state that another thread saves while the model trains belong together."""

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        moments = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
        return [value.clone() for value in [*model.state_dict().values(), *moments]]

    plain = net()
    oracle = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, oracle, 1)
    known = [states(plain, oracle)]
    for step in range(1, STEPS):
        train(plain, oracle, step + 1, step)
        known.append(states(plain, oracle))

    options = {"host_memory": 160_000, "page_size": 4096, "disk": str(tmp_path)}
    accelerator = PTMAccelerator(cpu=True, ptm_config=options)
    made = net()
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
    train(model, optimizer, 1)
    saved = threading.Event()

    def save() -> None:
        insist(lambda: accelerator.save_state(str(tmp_path / "state")), "met")
        saved.set()

    with ThreadPoolExecutor(1) as threads:
        saving = threads.submit(save)
        step = 1
        while step < STEPS or not saved.is_set():
            train(model, optimizer, step + 1, step)
            step += 1
        saving.result(60)
    accelerator.load_state(str(tmp_path / "state"))
    loaded = states(model, optimizer)
    for extra in range(STEPS, step):
        train(plain, oracle, extra + 1, extra)
        known.append(states(plain, oracle))
    assert sum(all(map(torch.equal, loaded, each)) for each in known) == 1


class Streamer(Queue[Any]):
    """As transformers' `TextIteratorStreamer`, without a tokenizer."""

    def end(self) -> None:
        self.put(None)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))


def trained(model: nn.Module, folder: Path, **more: Any) -> list[float]:
    rows = [{"input_ids": [i, i + 1, i + 2], "labels": [i, i + 1, i + 2]} for i in range(24)]
    args = TrainingArguments(
        str(folder), max_steps=3, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = (ptm_accel.Trainer if more else transformers.Trainer)(model, args, train_dataset=rows, **more)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_trainer_and_generation_in_threads(tmp_path: Path) -> None:
    """Whole calls of other threads, none of which meet: a demo that trains, then streams what it generates."""
    plain, model = llama(), llama()
    options = {"host_memory": "200KiB", "page_size": 4096, "disk": str(tmp_path)}
    with ThreadPoolExecutor(1) as threads:
        losses = threads.submit(lambda: trained(model, tmp_path, ptm_config=options)).result(100)
    assert losses == trained(plain, tmp_path)
    given = {"input_ids": torch.arange(4)[None], "max_new_tokens": 8, "do_sample": False}
    streamer = Streamer()
    thread = threading.Thread(target=lambda: model.generate(**given, streamer=streamer))
    thread.start()
    tokens = torch.cat([each.reshape(-1) for each in iter(lambda: streamer.get(timeout=60), None)])
    thread.join(60)
    assert torch.equal(tokens, plain.generate(**given)[0])
