"""Lock-free updating in the Trainer: exact without staleness, and checkpoints that any run goes on from."""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.transformers import Trainer
from safetensors.torch import load_file

from ptm_accel.checkpoint.plain_state import write_plain_state
from ptm_accel.engine import engine_of
from ptm_accel.errors import UnsupportedError
from ptm_accel.optim.lock_free import LockFreeUpdates
from tests.lazy_updates import lazily
from tests.prepared import run_prepared


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"host_memory": 5 << 20, "page_size": 4096, "disk": str(folder), **more}


def _lora(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize("adapter", [False, True], ids=["all", "lora"])
def test_without_staleness_a_trainer_has_the_plain_numbers(adapter: bool, tiny: ModuleType, tmp_path: Path) -> None:
    """With clipping, a schedule, accumulation, evaluations and checkpoints."""
    found = []
    for paged in (False, True):
        model = _lora(tiny.model()) if adapter else tiny.model()
        arguments = tiny.arguments(
            tmp_path / str(paged),
            max_grad_norm=0.3,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=3,
            lr_scheduler_type="cosine",
        )
        given: dict[str, Any] = {"train_dataset": tiny.data(), "eval_dataset": tiny.data(4)}
        if paged:
            asked = options(tmp_path, update="lock_free", max_staleness=0)
            trainer: transformers.Trainer = Trainer(model, arguments, ptm_config=asked, **given)
        else:
            trainer = transformers.Trainer(model, arguments, **given)
        trainer.train()
        if paged:
            engine = engine_of(model)
            assert engine is not None
            assert engine.optimizer is not None
            updates = engine.optimizer.updates
            assert isinstance(updates, LockFreeUpdates)
            assert updates._sweeps.count
        found.append((tiny.history(trainer), tiny.weights(model)))
    (plain, weights), (ours, our_weights) = found
    assert ours == plain
    assert tiny.same(our_weights, weights)


def test_a_checkpoint_is_of_all_steps_and_an_exact_run_goes_on_from_it(tiny: ModuleType, tmp_path: Path) -> None:
    """To the bits of a plain Trainer that resumes from it."""

    most = []

    def run(folder: Path, steps: int, asked: dict[str, Any] | None, resume: Path | None = None) -> Any:
        model = tiny.model(seed=0 if resume is None else 5)
        arguments = tiny.arguments(folder, max_steps=steps, save_strategy="steps", save_steps=3, eval_strategy="no")
        arguments.lr_scheduler_type = "constant"
        kind = transformers.Trainer if asked is None else Trainer
        given = {} if asked is None else {"ptm_config": asked}
        trainer = kind(model, arguments, train_dataset=tiny.data(), **given)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        found, engine = tiny.weights(model), engine_of(model)
        if engine is not None:
            updates = engine.optimizer.updates  # type: ignore[union-attr]
            most.append(updates._sweeps.most if isinstance(updates, LockFreeUpdates) else 0)
            engine.detach()
        return found

    lagging = options(tmp_path, update="lock_free", max_staleness=3)
    with lazily():
        run(tmp_path / "lagging", 5, lagging)
    assert most.pop() > 1, "no step has waited for another"
    checkpoint = tmp_path / "lagging" / "checkpoint-3"
    write_plain_state(checkpoint, checkpoint / "optimizer.pt")
    plain = run(tmp_path / "plain", 6, None, checkpoint)
    for asked in (options(tmp_path), options(tmp_path, update="lock_free", max_staleness=0)):
        assert tiny.same(run(tmp_path / "ours", 6, asked, checkpoint), plain)


CHILD = Path(__file__).with_name("trainer_child.py")
CHANGES = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "save_total_limit": 3}


def _child(folder: Path, **job: Any) -> tuple[int, Any]:
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    (folder / "disk").mkdir(exist_ok=True)
    lagging = options(folder / "disk", update="lock_free", max_staleness=4)
    run = {"folder": str(folder / "run"), "options": lagging, "sizes": {}, "result": str(result), "save_steps": 3}
    done = run_prepared(CHILD, json.dumps({"changes": CHANGES, **run, **job}), cwd=folder)
    assert done.code in (0, -signal.SIGKILL), done.err[-4000:]
    return done.code, json.loads(result.read_text()) if result.exists() else None


@pytest.mark.thinned(2)
@pytest.mark.parametrize("seed", range(20))
def test_the_last_checkpoint_before_a_kill_is_what_training_had(seed: int, tiny: ModuleType, tmp_path: Path) -> None:
    """Killed at a random moment; weights and optimizer state to the bit, and a run with `exact` goes on from them."""
    rng = random.Random(seed)
    (tmp_path / "digests").mkdir()
    killed = {"kill_in_step": rng.randrange(4, 20), "kill_after_s": rng.random() * 0.2}
    code, _ = _child(tmp_path, steps=1000, digests=str(tmp_path / "digests"), **killed)
    assert code == -signal.SIGKILL
    assert not list((tmp_path / "disk").iterdir()), "a scratch file was left"
    # The process may have been killed between the save and its digest.
    last = max(int(file.name.split("-")[1]) for file in (tmp_path / "digests").glob("checkpoint-*"))
    checkpoint = tmp_path / "run" / f"checkpoint-{last}"
    weights, state = json.loads((tmp_path / "digests" / checkpoint.name).read_text())
    saved = load_file(checkpoint / "model.safetensors")
    assert tiny.digest_of(saved) == {name: weights[name] for name in saved}
    write_plain_state(checkpoint, tmp_path / "optimizer.pt")
    assert tiny.state_digest(torch.load(tmp_path / "optimizer.pt")) == state
    model = tiny.model()
    arguments = tiny.arguments(tmp_path / "run", **{**CHANGES, "max_steps": last + 2})
    Trainer(model, arguments, train_dataset=tiny.data(), ptm_config=options(tmp_path / "disk")).train(
        resume_from_checkpoint=str(checkpoint)
    )


@pytest.mark.slow
def test_runs_that_were_killed_and_resumed_end_about_where_others_do(tmp_path: Path) -> None:
    """Mean difference of the loss of the last steps, over five seeds: at most 1%."""

    def last(outcome: Any) -> float:
        losses = [line["loss"] for line in outcome["history"] if "loss" in line]
        return statistics.fmean(losses[-10:])

    differences = []
    for seed in range(5):
        changes = {**CHANGES, "seed": seed}
        outcomes = []
        for name in ("whole", "killed"):
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            if name == "killed":
                code, _ = _child(folder, steps=120, changes=changes, save_steps=20, kill_in_step=50 + 7 * seed)
                assert code == -signal.SIGKILL
            code, outcome = _child(folder, steps=120, changes=changes, save_steps=20, resume=name == "killed")
            assert code == 0
            outcomes.append(last(outcome))
        whole, resumed = outcomes
        differences.append(resumed / whole - 1)
    assert abs(statistics.fmean(differences)) <= 0.01, differences


def test_the_example_of_the_docs_trains(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lock-free.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].replace("/mnt/ssd", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": tiny.model().to(torch.bfloat16), "data": tiny.data()}
    exec(example, names)
    assert names["trainer"].state.global_step == 60
    engine = engine_of(names["model"])
    assert engine is not None
    assert engine.metrics.staleness is not None
    assert 0 < engine.metrics.staleness.most <= 2


def test_a_gradient_scaler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stock = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu")

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    with pytest.raises(UnsupportedError, match="lock_free cannot be used with mixed precision fp16"):
        PTMAccelerator(cpu=True, ptm_config=options(tmp_path, update="lock_free", max_staleness=1))
