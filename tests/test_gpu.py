"""The small equality matrix on a real card, and what may not happen there."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ptm_accel.integrations.transformers import Trainer as PagedTrainer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.optim.units import Entry as Update
from ptm_accel.pages import Pages
from ptm_accel.runtime.run_ahead import RunAhead
from ptm_accel.units import GIB, MIB
from tests.tiers import needs
from tests.zoo import ENTRIES, Entry

pytestmark = pytest.mark.gpu

STEPS = 5
"""Of the first, no update can wait for the next forward; plans are made from what the second and the third show."""


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages keep what `device_memory` says, whatever else is free on the card: tiny models fit any."""
    monkeypatch.setattr(Pages, "watch_activations", lambda self, card: None)


@pytest.fixture
def repeating_kernels() -> Iterator[None]:
    """Kernels that repeat themselves, where torch has them: sums in an order of the card's own differ in each run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def options(name: str, folder: Path, page_size: str) -> dict[str, Any]:
    """Device memory that a model has to move through."""
    folder.mkdir()
    floor, need = needs(ENTRIES[name].build(), folder, "mock+host")
    return {"device_memory": max(floor * 3 // 2, need * 2 // 5), "host_memory": "2GiB", "page_size": page_size}


class Batches(torch.utils.data.Dataset[dict[str, Any]]):
    """The zoo's batches, one a step."""

    def __init__(self, entry: Entry) -> None:
        self.batches = [entry.batch_at(step) for step in range(STEPS)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.batches[index])


def train(name: str, directory: Path, ptm_config: dict[str, Any] | None, **arguments: Any) -> tuple[list[Any], Any]:
    entry = ENTRIES[name]
    model = entry.build(0)
    options = TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    # Of several cards the plain run would use all.
    options._n_gpu = 1
    common: dict[str, Any] = {
        "model": model,
        "args": options,
        "train_dataset": Batches(entry),
        "data_collator": lambda rows: rows[0],
    }
    trainer = Trainer(**common) if ptm_config is None else PagedTrainer(**common, ptm_config=ptm_config)
    trainer.train()
    # In words: a norm that is NaN, with a loss scale that is still too large, equals itself there.
    log = [repr((e["loss"], e.get("grad_norm"))) for e in trainer.state.log_history if "loss" in e]
    weights = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
    engine = engine_of(model)
    if engine is not None:
        engine.check_integrity()
        assert engine.pool.stats.evictions > len(engine.slots), "pages moved in more than one step"
    return log, weights


@pytest.mark.usefixtures("small_card", "repeating_kernels")
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_card_with_little_memory_gives_the_same_numbers(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {} if precision == "fp32" else {precision: True}
    plain_log, plain_weights = train(name, tmp_path / "plain", None, **arguments)
    again_log, _ = train(name, tmp_path / "again", None, **arguments)
    assert plain_log == again_log, "the plain run does not repeat itself"

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the whole device was synchronised")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    # The CPU's kernels may round otherwise.
    monkeypatch.setattr(RunAhead, "updates_on_host", lambda self, parameter: False)
    log, weights = train(name, tmp_path / "paged", options(name, tmp_path / "probe", "4KiB"), **arguments)
    assert log == plain_log
    assert all(torch.equal(weights[key], plain_weights[key]) for key in plain_weights)


@pytest.mark.usefixtures("small_card")
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_updates_on_the_cpu_beside_a_card_are_those_of_the_card(
    clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last bits: the CPU's kernel may round otherwise."""
    taken: list[bool] = []
    original = HostUpdates.take

    def take(self: HostUpdates, entry: Update) -> bool:
        taken.append(original(self, entry))
        return taken[-1]

    monkeypatch.setattr(HostUpdates, "take", take)
    monkeypatch.setattr(RunAhead, "updates_on_host", lambda self, parameter: True)
    _, plain = train("llama", tmp_path / "plain", None, max_grad_norm=clip)
    paged = options("llama", tmp_path / "probe", "16KiB")
    _, weights = train("llama", tmp_path / "paged", paged, max_grad_norm=clip)
    assert any(taken)
    for key, value in plain.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


def test_a_run_on_a_card_is_shown_beside_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the time of a step goes is told by the card itself, and nobody waits for it to tell."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the whole device was synchronised")

    # With its states the model takes 552 MiB, and 40 are the least.
    memory = build_memory(Capacities(page_bytes=MIB, host_bytes=4 * GIB, device_bytes=448 * MIB), torch.device("cuda"))
    model = net()
    engine = Engine.attach(model, PTMConfig(page_size=MIB), memory=memory)
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    ahead, tally = engine.run_ahead, engine.run_ahead.tally
    assert ahead.rates is not None
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    for _ in range(12):
        loss = model(torch.randn(16, 2048, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    engine.settle()
    ahead.end()
    assert tally.passes >= 11
    assert tally.foretold > 0
    assert 0 < tally.compute_s < tally.passes_s
    assert 0 < tally.beside_s < tally.update_s
    assert ahead.link_use is not None
    use = ahead.link_use()
    assert 0 < use.read_bytes <= engine.pool.stats.loaded_bytes
    assert 0 < use.written_bytes <= engine.pool.stats.stored_bytes + MIB
    # No link moves more than a terabyte a second, or less than a hundred megabytes.
    assert 1e8 < (use.read_bytes + use.written_bytes) / use.busy_s < 1e12
    assert "times that" in engine.metrics.summary()
    engine.check_integrity()
    engine.close()


def test_pages_and_activations_share_a_card_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit on what torch reserves, batches that become longer, and an evaluation that takes more."""
    # Attention has a backward that repeats itself only where torch refuses all others.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

    def net() -> LlamaForCausalLM:
        torch.manual_seed(0)
        shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
        config = LlamaConfig(vocab_size=8192, num_hidden_layers=12, use_cache=False, **shape)
        model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def run(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> list[float]:
        seen = []
        for step, length in enumerate([256, 1024, 512, 2048, 1024, 2048, 2048]):
            ids = torch.randint(0, 8192, (1, length), generator=torch.Generator().manual_seed(step)).cuda()
            loss = model.train()(input_ids=ids, labels=ids).loss
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            if step == 4:
                with torch.no_grad():
                    seen += [model.eval()(input_ids=ids.repeat(6, 1)).logits.float().sum().item() for _ in range(2)]
        return seen

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    try:
        plain = net()
        expected = run(plain, adamw(plain))
        states = 4 * sum(p.nbytes for p in plain.parameters())
        del plain
        again = net()
        assert run(again, adamw(again)) == expected, "the plain run does not repeat itself"
        del again
        gc.collect()
        torch.cuda.empty_cache()
        model = net()
        given = states * 3 // 4 + 600 * MIB
        engine = Engine.attach(model, PTMConfig(device_memory=given, host_memory="8GiB", page_size=MIB))
        try:
            assert run(model, engine.bind_optimizer(adamw(model))) == expected
            assert torch.cuda.memory_reserved() <= given
            assert engine.pool.stats.evictions > 0
            engine.check_integrity()
        finally:
            engine.close()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_card_that_is_full_is_listed(tmp_path: Path) -> None:
    def too_much(*args: Any) -> None:
        torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")

    entry = ENTRIES["llama"]
    model = entry.build(0)
    model.model.layers[1].register_forward_pre_hook(too_much)
    arguments = TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", report_to=[], disable_tqdm=True)
    trainer = PagedTrainer(
        model=model, args=arguments, train_dataset=Batches(entry), data_collator=lambda rows: rows[0], ptm_config={}
    )
    file = tmp_path / "out_of_memory-0.json"
    with pytest.raises(torch.OutOfMemoryError, match=f"is listed in {file}"):
        trainer.train()
    found = json.loads(file.read_text())
    assert found["budgets"]["device"]["used_bytes"] > 0
    assert (
        sum(segment["total_size"] for segment in found["segments"]) == found["statistics"]["reserved_bytes.all.current"]
    )
