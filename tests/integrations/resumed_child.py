"""Checkpoints of one process, resumed by several that each have a part of the model, beside the stock Trainer.

Started with a folder and what to do: `make` in one process, then others of `DOES` in several (by torchrun).
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from ptm_accel.integrations.accelerate import PTMAccelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
import ptm_accel
from ptm_accel.checkpoint.plain_state import write_plain_state
from ptm_accel.engine import engine_of
from ptm_accel.errors import CheckpointError
from tests.integrations.sharded_child import Texts, arguments, losses, model, trainer_of

SAVED, STEPS = 3, 6
ONE = {"page_size": "16KiB", "host_memory": "64MB"}
FULL = {"page_size": "16KiB", "host_memory": "10MB", "shard": "full"}
CALLS = "checkpoint-3"
SAVES = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": SAVED, "eval_strategy": "no"}


class Told(logging.Handler):
    """What was said of processes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("ptm_accel").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "was saved by" in record.getMessage():
            self.texts.append(record.getMessage())


def lora() -> nn.Module:
    """Adapters of an odd rank, large enough to be cut."""
    return get_peft_model(model(), LoraConfig(task_type="CAUSAL_LM", r=7, target_modules=["q_proj", "down_proj"]))


def other_shapes() -> nn.Module:
    """Of other shapes under the same names."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=131,
    )
    return LlamaForCausalLM(config)


def whole(trained: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, on all ranks together."""
    if engine_of(trained) is None:
        return {name: param.detach().clone() for name, param in trained.named_parameters()}
    with ptm_accel.gathered(trained):
        return {name: param.detach().clone() for name, param in trained.named_parameters()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether they are equal, and of the same names."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- in one process ----------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Checkpoints of the Trainer, stock and on pages, and states of accelerators."""
    for name, made in (("plain", model), ("pages", model), ("lora", lora), ("other-shapes", other_shapes)):
        options = {**ONE, "disk": str(folder)} if name == "pages" else None
        trainer_of(made(), arguments(folder / name, **SAVES), options).train()
    trainer_of(model(), arguments(folder / "other-optimizer", optim="sgd", **SAVES), None).train()
    for name, accelerator in (("plain", Accelerator(cpu=True)), ("pages", PTMAccelerator(cpu=True, ptm_config=ONE))):
        trained, optimizer, _ = prepared(accelerator)
        run(accelerator, trained, optimizer, 0)
        accelerator.save_state(str(folder / f"state-{name}"))
        accelerator.free_memory()


# ---- in several --------------------------------------------------------------------------------------------------


def resumed(folder: Path, name: str, made: Callable[[], nn.Module], options: dict[str, Any] | None) -> Any:
    """A Trainer that has gone on from a checkpoint."""
    torch.manual_seed(11)
    trainer = trainer_of(made(), arguments(folder / "run", max_steps=STEPS, eval_steps=STEPS), options)
    trainer.train(resume_from_checkpoint=str(folder / name / CALLS))
    return trainer


def trainers(folder: Path) -> None:
    """They go on as the stock one does, and say once that there are other processes."""
    options, told, count = {**FULL, "disk": str(folder)}, Told(), dist.get_world_size()
    for names, made in ((("plain", "pages"), model), (("lora",), lora)):
        stock = resumed(folder, names[0], made, None)
        expected, weights = losses(stock), whole(stock.model)
        for name in names:
            told.texts.clear()
            ours = resumed(folder, name, made, options)
            assert engine_of(ours.model).training.shards is not None
            # From three on, sums have another order than DDP's.
            bound = expected if count == 2 else pytest.approx(expected, rel=1e-5)
            assert losses(ours) == bound, (name, losses(ours), expected)
            assert count > 2 or same(whole(ours.model), weights), name
            text = (
                f"{folder / name / CALLS} was saved by 1 process, and {count} train now: a step has {count} x 2 = "
                f"{2 * count} samples instead of 1 x 2 = 2. To keep the old number, set the batch size or the "
                "accumulation."
            )
            assert told.texts == ([text] if dist.get_rank() == 0 else []), told.texts
            # As at the end of a training with `load_best_model_at_end`: the stock one reads the same.
            for trainer in (ours, stock):
                trainer.state.best_model_checkpoint = str(folder / name / CALLS)
                trainer._load_best_model()
            assert same(whole(ours.model), whole(stock.model)), name
            engine_of(ours.model).check_integrity()
            engine_of(ours.model).detach()


def as_many(folder: Path) -> None:
    """Nothing is said where as many have saved it; where a part does not fit, layers are cut as it is resumed."""
    told = Told()
    trainer_of(model(), arguments(folder / "several", **SAVES), None).train()
    stock = resumed(folder, "several", model, None)
    for options in ({**FULL, "disk": str(folder)}, {"page_size": "16KiB", "host_memory": "21MB"}):
        ours = resumed(folder, "several", model, options)
        assert losses(ours) == losses(stock), (losses(ours), losses(stock))
        assert same(whole(ours.model), whole(stock.model))
        assert engine_of(ours.model).training.shards is not None
        engine_of(ours.model).detach()
    assert not told.texts, told.texts


def replicas(folder: Path) -> None:
    """Processes that each have all of the model say it as well."""
    told = Told()
    ours = resumed(folder, "plain", model, ONE)
    assert engine_of(ours.model).training.shards is None
    assert len(told.texts) == (dist.get_rank() == 0), told.texts
    engine_of(ours.model).detach()


def save(folder: Path) -> None:
    """A checkpoint of several processes that each have a part of the model; plain state is written beside it."""
    options = {**FULL, "disk": str(folder)}
    trainer = trainer_of(model(), arguments(folder / "cut", **SAVES), options)
    trainer.train()
    assert engine_of(trainer.model).training.shards is not None
    engine_of(trainer.model).detach()
    if dist.get_rank() == 0:
        write_plain_state(folder / "cut" / CALLS, folder / "cut" / CALLS / "optimizer.pt")


def saved_by_two(folder: Path) -> None:
    """What two have saved is gone on from by as many, by more and by one, as the stock Trainer does."""
    told, count = Told(), dist.get_world_size() if dist.is_initialized() else 1
    stock = resumed(folder, "cut", model, None)
    ours = resumed(folder, "cut", model, {**(FULL if count > 1 else ONE), "disk": str(folder)})
    bound = losses(stock) if count < 3 else pytest.approx(losses(stock), rel=1e-5)
    assert losses(ours) == bound, (losses(ours), losses(stock))
    assert count > 2 or same(whole(ours.model), whole(stock.model))
    text = f"{folder / 'cut' / CALLS} was saved by 2 processes, and {count} train{'s' if count == 1 else ''} now"
    said = [each.split(":")[0] for each in told.texts]
    assert said == [text] * (count != 2 and (count == 1 or dist.get_rank() == 0)), told.texts
    engine_of(ours.model).detach()


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and its data."""
    trained = model()
    return accelerator.prepare(trained, torch.optim.AdamW(trained.parameters(), lr=1e-3), DataLoader(Texts(), 2))


def run(accelerator: Accelerator, trained: Any, optimizer: Any, start: int) -> list[float]:
    """A few steps on batches of this process."""
    found = []
    for step in range(start, start + SAVED):
        rows = [Texts()[(5 * step + number + accelerator.process_index) % 22] for number in range(2)]
        loss = trained(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def accelerators(folder: Path) -> None:
    """`load_state`, and steps after it."""
    stock, told, count = Accelerator(cpu=True), Told(), dist.get_world_size()
    trained, optimizer, _ = prepared(stock)
    stock.load_state(str(folder / "state-plain"))
    expected = run(stock, trained, optimizer, SAVED)
    weights = whole(stock.unwrap_model(trained))
    for name in ("plain", "pages"):
        told.texts.clear()
        source = folder / f"state-{name}"
        accelerator = PTMAccelerator(cpu=True, ptm_config={**FULL, "disk": str(folder)})
        trained, optimizer, _ = prepared(accelerator)
        run(accelerator, trained, optimizer, 0)
        accelerator.load_state(str(source))
        text = (
            f"{source} was saved by 1 process, and {count} train now: a step has the batches of {count} instead of 1."
        )
        assert [each.split(" To keep ")[0] for each in told.texts] == [text] * (dist.get_rank() == 0), told.texts
        found = run(accelerator, trained, optimizer, SAVED)
        assert found == (expected if count == 2 else pytest.approx(expected, rel=1e-5)), (found, expected)
        assert count > 2 or same(whole(trained), weights), name
        engine_of(trained).check_integrity()
        accelerator.free_memory()
        engine_of(trained).detach()


def refusals(folder: Path) -> None:
    """All processes refuse what cannot be resumed from, with the same text, and nothing is changed."""
    rank, options = dist.get_rank(), {**FULL, "disk": str(folder)}
    lacking, elsewhere, weights = (folder / name / CALLS for name in ("lacking", "elsewhere", "weights"))
    if rank == 0:
        copies = ((lacking, "pages", "model.safetensors"), (elsewhere, "pages", "scheduler.pt"))
        for path, source, file in (*copies, (weights, "other-shapes", "optimizer.pt")):
            shutil.copytree(folder / source / CALLS, path)
            (path / file).unlink()
    dist.barrier()
    asked: dict[str, Path] = {
        "has 'exp_avg' of shape": folder / "other-shapes" / CALLS,
        "is of shape": weights,
        "it is of another optimizer": folder / "other-optimizer" / CALLS,
        "model.safetensors.*is missing": lacking,
        "": folder / "nowhere",
        r"scheduler\.pt has \d+ bytes on rank 0 and no such file on rank 1": (
            folder / "pages" / CALLS if rank == 0 else elsewhere
        ),
    }
    for match, path in asked.items():
        trained = model()
        before = whole(trained)
        trainer = trainer_of(trained, arguments(folder / "run", max_steps=1, eval_strategy="no"), options)
        kind: Any = ValueError if "nowhere" in path.name else CheckpointError
        with pytest.raises(kind, match="find a valid checkpoint" if kind is ValueError else match) as caught:
            trainer.train(resume_from_checkpoint=str(path))
        every: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(every, str(caught.value))
        assert len({text.replace(str(elsewhere), str(folder / "pages" / CALLS)) for text in every}) == 1, every
        assert same(whole(trained), before), match
        trainer.train()
        engine_of(trained).detach()


def states_refused(folder: Path) -> None:
    """`load_state` does so as well."""
    rank, source = dist.get_rank(), folder / "state-pages"
    lacking, elsewhere = folder / "state-lacking", folder / "state-elsewhere"
    if rank == 0:
        for path, file in ((lacking, "optimizer.json"), (elsewhere, "model.safetensors")):
            shutil.copytree(source, path)
            (path / file).unlink()
    dist.barrier()
    accelerator = PTMAccelerator(cpu=True, ptm_config={**FULL, "disk": str(folder)})
    trained, optimizer, _ = prepared(accelerator)
    run(accelerator, trained, optimizer, 0)
    before = whole(trained)
    for match, path in {
        r"optimizer\.json is damaged: it is missing": lacking,
        r"model\.safetensors has \d+ bytes on rank 0 and no such file on rank 1": elsewhere if rank else source,
    }.items():
        with pytest.raises(CheckpointError, match=match) as caught:
            accelerator.load_state(str(path))
        every: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(every, str(caught.value))
        assert len({text.replace(str(elsewhere), str(source)) for text in every}) == 1, every
        assert same(whole(trained), before), match
    run(accelerator, trained, optimizer, SAVED)
    accelerator.free_memory()
    engine_of(trained).detach()


DOES: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (make, save, trainers, as_many, replicas, saved_by_two, accelerators, refusals, states_refused)
}


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    for does in sys.argv[2:]:
        sys.stderr.write(f"{does}\n")
        DOES[does](Path(sys.argv[1]))
        sys.stdout.write(f"{does}\n")
        sys.stdout.flush()
