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
from ptm_accel.integrations.transformers.loading import load_weights
from ptm_accel.integrations.transformers.own_loading import own_loading
from safetensors.torch import load_file, save_file

from ptm_accel.checkpoint.manifest import MANIFEST_NAME
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import CheckpointError, UnsupportedError
from tests.zoo import ENTRIES

OURS = ("optimizer.json", "optimizer-00001-of-00001.safetensors")


@pytest.fixture
def tight(tiny: ModuleType, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "scratch").mkdir()
    options: dict[str, Any] = tiny.budget("tight", tmp_path / "scratch")
    return options


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


def _run(tiny: ModuleType, cls: Any, run: Path, options: Any, **changes: Any) -> Any:
    extra = {} if options is None else {"ptm_config": options}
    every_two = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = tiny.arguments(run, max_steps=6, **every_two, load_best_model_at_end=True, **changes)
    return cls(model=tiny.model(), args=args, train_dataset=tiny.data(), eval_dataset=tiny.data(6), **extra)


def _story(tiny: ModuleType, cls: Any, run: Path, options: Any) -> dict[str, Any]:
    """Saves, resumes and loads the best, and gives all that must be the same."""
    first = _run(tiny, cls, run, options)
    first.train()
    for number in (4, 6):
        shutil.rmtree(run / f"checkpoint-{number}")
    resumed = _run(tiny, cls, run, options)
    resumed.train(resume_from_checkpoint=True)

    def plainly(names: list[str]) -> list[str]:
        return sorted({"optimizer.pt" if name in OURS else name for name in names} - {MANIFEST_NAME})

    noted = [(what, folder.partition("-")[0], plainly(names)) for what, folder, names in [*first.noted, *resumed.noted]]
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*.json") if path.name not in OURS}
    return {
        "noted": noted,
        "files": {path: text for path, text in files.items() if "own" in path.name or path.name == "extra.json"},
        "listed": {path.name: plainly(os.listdir(path)) for path in run.iterdir()},
        "history": [tiny.history(first), tiny.history(resumed)],
        "weights": [tiny.digest(first.model), tiny.digest(resumed.model)],
    }


@pytest.mark.thinned(1)
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


# ---- models that load in a way of their own --------------------------------------------------------------------------


class Plain(torch.nn.Module):
    """A model whose factor is saved under another name than it has, and of which the losses tell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(64, 64)
        self.other = torch.nn.Linear(64, 64)
        self.factor = 1.0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.other(self.layer(x).tanh()) * self.factor).square().mean()}


def _double(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
    """Loads twice the bias, which is given under another name, and a tensor that is no parameter."""
    state_dict[prefix + "bias"] = 2 * state_dict.pop(prefix + "bias")
    state_dict[prefix + "weight"] = state_dict.pop(prefix + "weight").flip(0)


class PreHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_load_state_dict_pre_hook(_double)


class PostHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.loaded)

    @staticmethod
    def loaded(module: Any, incompatible_keys: Any) -> None:
        module.factor = 0.5


class OwnLinear(torch.nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        _double(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        with torch.no_grad():
            self.weight.mul_(2)


class FromStateDict(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer = OwnLinear(64, 64)


class LoadStateDict(Plain):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.factor = 0.25
        return super().load_state_dict(state_dict, *args, **kwargs)


class ExtraState(Plain):
    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.factor / 2])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.factor = state.item()


OWN = {
    PreHook: r"a hook on load_state_dict\(\) of Linear layer",
    PostHook: r"a hook on load_state_dict\(\) of PostHook",
    FromStateDict: r"_load_from_state_dict\(\) of OwnLinear layer",
    LoadStateDict: r"LoadStateDict.load_state_dict",
    ExtraState: r"get_extra_state\(\) of ExtraState",
}
ROWS = [{"x": torch.randn(64, generator=torch.Generator().manual_seed(n)), "labels": torch.zeros(1)} for n in range(16)]


def _losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("model", OWN, ids=lambda model: model.__name__)
def test_a_model_that_loads_in_a_way_of_its_own_is_resumed_with_it(
    model: Any, tiny: ModuleType, tight: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    args = tiny.arguments(run, **changes)
    transformers.Trainer(model=model(), args=args, train_dataset=ROWS).train()
    resumed = []
    for cls, extra in ((transformers.Trainer, {}), (Trainer, {"ptm_config": tight})):
        trainer = cls(model=model(), args=args, train_dataset=ROWS, **extra)
        # Saved without pages both times.
        trainer.args.save_strategy = "no"
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
        resumed.append((_losses(trainer), tiny.digest(trainer.model), trainer.model.factor))
        assert (f"{model.__name__} customises load_state_dict" in caplog.text) == bool(extra)
    assert resumed[0] == resumed[1]
    again = Trainer(model=model(), args=args, train_dataset=ROWS, ptm_config=tight)
    again._attach()
    with pytest.raises(UnsupportedError, match=rf"{model.__name__} customises load_state_dict \({OWN[model]}"):
        load_weights(again.model, run / "checkpoint-2")


def test_what_torch_and_transformers_come_with_is_no_way_of_ones_own() -> None:
    assert own_loading(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(2, 2))) is None
    assert own_loading(ENTRIES["mamba"].build()) is None
    assert own_loading(torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))) is not None


class Described(Plain):
    """Its state dictionary has an entry that is no tensor of it, and that `load_state_dict` does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.describe)

    @staticmethod
    def describe(module: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        state_dict["described.by"] = torch.ones(2)


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_said(tight: dict[str, Any], tmp_path: Path) -> None:
    plain = Described()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "described.by"'):
        plain.load_state_dict(plain.state_dict())
    ours = Described()
    engine = Engine.attach(ours, PTMConfig.load(tight), device=torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"has, and the model has not, 1 tensors \(described.by\)"):
        load_weights(ours, tmp_path)
    engine.close()


# ---- checkpoints that lack tensors, or have others -------------------------------------------------------------------


class Ignoring(transformers.LlamaForCausalLM):
    """Has a weight that is made anew, and is not saved."""

    _keys_to_ignore_on_save = ("model.norm.weight",)


def _ignoring(tiny: ModuleType) -> Any:
    model = Ignoring(tiny.model().config)
    model.load_state_dict(tiny.model().state_dict())
    model.model.norm.weight.requires_grad_(False)
    return model


def _frozen(tiny: ModuleType) -> Any:
    model = tiny.model()
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def _without(directory: Path, name: str, **more: torch.Tensor) -> None:
    tensors = {**load_file(directory / "model.safetensors"), **more}
    tensors.pop(name, None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # As from an older version; a manifest would tell that the file is another.
    (directory / MANIFEST_NAME).unlink(missing_ok=True)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the Trainer warns of about the names of tensors; its logger hands nothing on."""
    found: list[str] = []
    logger = transformers.trainer.logger
    monkeypatch.setattr(logger, "warning", lambda text, *rest: found.append(text) if "keys in the" in text else None)
    return found


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("make", "lacks", "more"),
    [
        (_ignoring, "model.norm.weight", {}),
        (_frozen, "model.embed_tokens.weight", {}),
        (_frozen, "model.embed_tokens.weight", {"model.other.weight": torch.ones(2)}),
    ],
    ids=["ignored", "frozen", "unexpected"],
)
@pytest.mark.parametrize("saved", ["by ours", "by plain", "without optimizer"])
def test_what_a_checkpoint_lacks_is_told_of_as_in_the_plain_trainer(
    make: Any,
    lacks: str,
    more: Any,
    saved: str,
    told: list[str],
    tiny: ModuleType,
    tight: dict[str, Any],
    tmp_path: Path,
) -> None:
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def build(options: dict[str, Any] | None, run: Path) -> Any:
        cls, extra = (transformers.Trainer, {}) if options is None else (Trainer, {"ptm_config": options})
        args = tiny.arguments(run, **changes, save_only_model=saved == "without optimizer")
        return cls(model=make(tiny), args=args, train_dataset=tiny.data(), **extra)

    resumed = []
    for options in (None, tight):
        run = tmp_path / ("plain" if options is None else "ours")
        build(options if saved == "by ours" else None, run).train()
        _without(run / "checkpoint-2", lacks, **more)
        told.clear()
        trainer = build(options, run)
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
        resumed.append((list(told), tiny.history(trainer), tiny.digest(trainer.model)))
    assert len(resumed[0][0]) == (make is _frozen) + bool(more)
    assert resumed[1] == resumed[0]
