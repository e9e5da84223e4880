"""Trainers and models that save and load in a way of their own: it runs on pages as it does in the plain run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import PTMTrainerMixin, Trainer, enable, ptm_trainer
from ptm_accel.integrations.transformers.checkpoints import StockOnPages

OURS = ("optimizer.json", "optimizer-00001-of-00001.safetensors")


@pytest.fixture
def tight(tiny: ModuleType, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "scratch").mkdir()
    dials: dict[str, Any] = tiny.budget("tight", tmp_path / "scratch")
    return dials


class OwnParts(transformers.Trainer):
    """Adds something to each of the methods that save and load, around what the Trainer does."""

    def note(self, what: str, folder: str) -> None:
        self.__dict__.setdefault("noted", []).append((what, os.path.basename(folder), sorted(os.listdir(folder))))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        assert not os.path.exists(folder)
        super()._save_checkpoint(model, trial)
        # By the name of the directory, which must be there, and be complete, as after the Trainer's own method.
        self.note("saved", folder)
        Path(folder, "extra.json").write_text(json.dumps({"step": self.state.global_step}))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.note("saved optimizer", output_dir)
        Path(output_dir, "own_optimizer.json").write_text(str(self.optimizer.param_groups[0]["lr"]))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        extra = json.loads(Path(resume_from_checkpoint, "extra.json").read_text())
        # Something that losses show.
        with torch.no_grad():
            self.model.lm_head.weight.mul_(1 + extra["step"] / 8)
        self.note("loaded", resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        with torch.no_grad():
            self.model.lm_head.weight.mul_(2)
        self.note("loaded best", str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.5
            self.note("loaded optimizer", checkpoint)


def _run(tiny: ModuleType, cls: Any, run: Path, dials: Any, **changes: Any) -> Any:
    extra = {} if dials is None else {"ptm_config": dials}
    every_two = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = tiny.arguments(run, max_steps=6, **every_two, load_best_model_at_end=True, **changes)
    return cls(model=tiny.model(), args=args, train_dataset=tiny.data(), eval_dataset=tiny.data(6), **extra)


def _story(tiny: ModuleType, cls: Any, run: Path, dials: Any) -> dict[str, Any]:
    """Saves, resumes and loads the best, and gives all that must be the same."""
    first = _run(tiny, cls, run, dials)
    first.train()
    for number in (4, 6):
        shutil.rmtree(run / f"checkpoint-{number}")
    resumed = _run(tiny, cls, run, dials)
    resumed.train(resume_from_checkpoint=True)

    def plainly(names: list[str]) -> list[str]:
        return sorted({"optimizer.pt" if name in OURS else name for name in names})

    noted = [(what, folder.partition("-")[0], plainly(names)) for what, folder, names in [*first.noted, *resumed.noted]]
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*.json") if path.name not in OURS}
    return {
        "noted": noted,
        "files": {path: text for path, text in files.items() if "own" in path.name or path.name == "extra.json"},
        "listed": {path.name: plainly(os.listdir(path)) for path in run.iterdir()},
        "history": [tiny.history(first), tiny.history(resumed)],
        "weights": [tiny.digest(first.model), tiny.digest(resumed.model)],
    }


@pytest.mark.parametrize("way", ["ptm_trainer", "enable", "mixin"])
def test_what_a_trainer_adds_to_saving_and_loading_is_done(
    way: str, tiny: ModuleType, tight: dict[str, Any], tmp_path: Path
) -> None:
    expected = _story(tiny, OwnParts, tmp_path / "plain", None)
    assert len(expected["files"]) == 6
    assert {what for what, *_ in expected["noted"]} == {
        *("saved", "saved optimizer", "loaded", "loaded best", "loaded optimizer")
    }
    if way == "enable":
        with enable(tight):
            found = _story(tiny, OwnParts, tmp_path / "ours", None)
    elif way == "mixin":
        found = _story(tiny, type("Mine", (PTMTrainerMixin, OwnParts), {}), tmp_path / "ours", tight)
    else:
        found = _story(tiny, ptm_trainer(OwnParts), tmp_path / "ours", tight)
    assert found == expected


def test_only_classes_on_pages_are_changed() -> None:
    class Beside:
        pass

    class Another(transformers.Trainer):
        pass

    class Direct(PTMTrainerMixin, transformers.Trainer, Beside):
        pass

    class Both(ptm_trainer(OwnParts), Another):  # type: ignore[misc]
        pass

    for cls in (Trainer, ptm_trainer(OwnParts), Direct, Both):
        order = cls.__mro__
        assert order[order.index(transformers.Trainer) - 1] is StockOnPages
        assert order.count(StockOnPages) == 1
    assert Direct.__mro__[-2:] == (Beside, object), "what came after the Trainer still does"
    assert Both.__mro__.index(Another) < Both.__mro__.index(StockOnPages)
    assert StockOnPages not in OwnParts.__mro__
    assert StockOnPages not in Another.__mro__
    assert "_save_checkpoint" in vars(transformers.Trainer)
    assert vars(transformers.Trainer)["_save_checkpoint"].__module__ == "transformers.trainer"
