"""When the Trainer lets updates begin in backward, and that its numbers stay those of the plain one."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer, ptm_trainer
from ptm_accel.integrations.transformers.loop import known_loop, step_follows
from transformers import TrainerCallback

from ptm_accel.engine import engine_of
from ptm_accel.optim.updates import Updates
from ptm_accel.runtime.kinds import Place


class LooksBefore(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class LooksAfter(TrainerCallback):
    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


class StepOfOnesOwn(transformers.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


class OwnNorm(Trainer):
    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_grad_norm(*args, **kwargs)


class EarlyBackward(transformers.Trainer):
    """Has its backward in `compute_loss`, and looks at the model after it."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        with torch.no_grad():
            self.__dict__.setdefault("seen", []).append(model(**inputs).loss.item())
        return loss.detach().clone().requires_grad_()


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def build(tiny: ModuleType, folder: Path, cls: Any = Trainer, given: Any = None, **changes: Any) -> Any:
    """A Trainer that does not clip."""
    arguments = tiny.arguments(folder, **{"max_grad_norm": 0.0, **changes})
    return cls(model=tiny.model(), args=arguments, train_dataset=tiny.data(), **(given or {}))


def test_the_trainers_own_loop_without_clipping_is_known(tiny: ModuleType, tmp_path: Path) -> None:
    gone = build(tiny, tmp_path)
    gone._steps = 1
    asked = step_follows(gone)
    assert asked()
    del gone
    gc.collect()
    assert not asked(), "it is not kept alive"
    for cls in (Trainer, OwnLoss, ptm_trainer(transformers.Trainer)):
        trainer = build(tiny, tmp_path, cls, {"callbacks": [LooksAfter()]})
        assert known_loop(trainer)
        assert not step_follows(trainer)(), "it is in no step"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 1.0},
        {"gradient_accumulation_steps": 2},
        {"auto_find_batch_size": True},
        {"cls": OwnStep},
        {"cls": OwnNorm},
        {"cls": ptm_trainer(StepOfOnesOwn)},
        {"given": {"callbacks": [LooksBefore()]}},
    ],
    ids=["clipped", "accumulated", "batch size searched for", "own step", "own norm", "own step below", "callback"],
)
def test_what_comes_between_a_gradient_and_its_update_keeps_updates_out_of_backward(
    changes: dict[str, Any], tiny: ModuleType, tmp_path: Path
) -> None:
    trainer = build(tiny, tmp_path, **changes)
    assert not known_loop(trainer)


def test_a_step_that_was_put_on_the_trainer_itself_counts(tiny: ModuleType, tmp_path: Path) -> None:
    trainer = build(tiny, tmp_path)
    trainer.training_step = functools.partial(transformers.Trainer.training_step, trainer)
    assert not known_loop(trainer)
    callback = LooksAfter()
    callback.on_pre_optimizer_step = lambda *args, **kwargs: None  # type: ignore[assignment]
    assert not known_loop(build(tiny, tmp_path, given={"callbacks": [callback]}))


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_updates_begin_in_backward_with_the_same_numbers(
    clip: float, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    arrived: dict[Any, list[str]] = {}
    take = Updates.take

    def noted(self: Updates, grad: Any) -> None:
        take(self, grad)
        # Those of a group are updated when the last of them has come.
        arrived.setdefault(grad.slot.group, []).append(grad.slot.name)
        begun.extend(arrived[grad.slot.group] * grad.spent)

    monkeypatch.setattr(Updates, "take", noted)
    plain = build(tiny, tmp_path / "plain", transformers.Trainer, max_grad_norm=clip)
    plain.train()
    (tmp_path / "scratch").mkdir()
    options = {"ptm_config": tiny.budget("tight", tmp_path / "scratch")}
    paged = build(tiny, tmp_path / "paged", given=options, max_grad_norm=clip)
    paged.train()
    assert tiny.history(paged) == tiny.history(plain)
    weights = tiny.weights(paged.model)
    for name, value in tiny.weights(plain.model).items():
        assert torch.equal(weights[name], value), name
    movable = {slot.name for slot in engine_of(paged.model).slots if slot.group.movable}
    assert set(begun) == (movable if not clip else set())
    paged.model = paged.model_wrapped = paged.callback_handler.model = None


def test_a_backward_within_the_loss_is_not_the_one_that_the_step_follows(tiny: ModuleType, tmp_path: Path) -> None:
    plain = build(tiny, tmp_path / "plain", EarlyBackward)
    plain.train()
    (tmp_path / "scratch").mkdir()
    options = {"ptm_config": tiny.budget("tight", tmp_path / "scratch")}
    paged = build(tiny, tmp_path / "paged", ptm_trainer(EarlyBackward), options)
    paged.train()
    assert paged.seen == plain.seen
    paged.model = paged.model_wrapped = paged.callback_handler.model = None


@pytest.mark.parametrize("name", ["training_step", "_inner_training_loop", "_get_grad_norm"])
def test_a_method_that_somebody_has_put_on_the_class_counts(
    name: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = getattr(transformers.Trainer, name)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, *args, **kwargs)

    trainer = build(tiny, tmp_path)
    assert known_loop(trainer)
    monkeypatch.setattr(transformers.Trainer, name, patched)
    assert not known_loop(trainer)


@pytest.mark.parametrize("name", ["backward", "clip_grad_norm_"])
def test_a_method_that_somebody_has_put_on_the_accelerator_counts(
    name: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(tiny, tmp_path)
    monkeypatch.setattr(trainer.accelerator, name, getattr(trainer.accelerator, name))
    assert not known_loop(trainer)


def test_a_step_that_somebody_has_put_on_the_optimizer_counts(tiny: ModuleType, tmp_path: Path) -> None:
    trainer = build(tiny, tmp_path)
    trainer.create_optimizer_and_scheduler(8)
    assert known_loop(trainer), "a scheduler counts steps"
    trainer.optimizer.step = lambda *args, **kwargs: None
    assert not known_loop(trainer)


class Also(TrainerCallback):
    """Has a backward of its own with the Trainer's accelerator, at one of the events."""

    def __init__(self, event: str) -> None:
        self.trainer: Any = None
        setattr(self, event, self._backward)

    def _backward(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.trainer.accelerator.backward(_loss(model, 0.1))


class Gives(TrainerCallback):
    """Puts a gradient where the step has just used one up."""

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, 1e-3)


def _loss(model: Any, scale: float) -> torch.Tensor:
    # Of the shape of the batches: such a pass has been seen.
    tokens = torch.arange(48).reshape(2, 24)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss * scale
    return loss


def _twice(
    tiny: ModuleType,
    folder: Path,
    run: Callable[[Any], object],
    callback: Callable[[], Any] | None = None,
    **changes: Any,
) -> list[object]:
    """What `run` makes of a Trainer without pages, and of one on pages most of which are on the disk.

    Returns:
        of both, what it gives, the log, and a digest of each weight.
    """
    found = []
    for kind, cls in (("plain", transformers.Trainer), ("paged", Trainer)):
        (folder / kind).mkdir()
        given: dict[str, Any] = {"eval_dataset": tiny.data(4)}
        if kind == "paged":
            given["ptm_config"] = tiny.budget("tight", folder / kind)
        if callback is not None:
            given["callbacks"] = [callback()]
        trainer = build(tiny, folder / kind / "run", cls, given, **changes)
        for known in given.get("callbacks", []):
            known.trainer = trainer
        found.append((run(trainer), tiny.history(trainer), tiny.digest(trainer.model)))
        trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
    return found


@pytest.mark.thinned(3)
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_train_end"])
def test_a_backward_of_a_callback_is_not_the_one_that_the_step_follows(
    event: str, clip: float, tiny: ModuleType, tmp_path: Path
) -> None:
    plain, paged = _twice(
        tiny, tmp_path, lambda trainer: trainer.train() and None, lambda: Also(event), max_grad_norm=clip
    )
    assert paged == plain


def test_a_gradient_that_a_callback_gives_after_a_step_is_one_of_the_next(tiny: ModuleType, tmp_path: Path) -> None:
    plain, paged = _twice(tiny, tmp_path, lambda trainer: trainer.train() and None, Gives, max_grad_norm=1.0)
    assert paged == plain


def _trains_on(trainer: Any) -> None:
    trainer.train()


def _steps(trainer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.5)
    trainer.optimizer.step()


AFTERWARDS: dict[str, Callable[[Any], object]] = {
    "trains on": _trains_on,
    "steps": _steps,
    "drops": lambda trainer: trainer.model.zero_grad(),
    "evaluates": lambda trainer: trainer.evaluate()["eval_loss"],
    "looks": lambda trainer: float(trainer.model.state_dict()["lm_head.weight"].sum()),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("what", AFTERWARDS)
def test_a_backward_after_training_is_not_the_one_that_a_step_follows(
    what: str, tiny: ModuleType, tmp_path: Path
) -> None:
    def run(trainer: Any) -> object:
        trainer.train()
        model = trainer.model.train()
        trainer.accelerator.backward(_loss(model, 1.0))
        model.zero_grad()
        for scale in (1.0, 2.0):
            trainer.accelerator.backward(_loss(model, scale))
        return AFTERWARDS[what](trainer)

    plain, paged = _twice(tiny, tmp_path, run, max_steps=4)
    assert paged == plain


@pytest.mark.parametrize(
    ("micro", "places"), [(1, {Place.ONLY}), (3, {Place.FIRST, Place.MIDDLE, Place.LAST})], ids=["one", "three"]
)
def test_plans_know_the_place_of_a_micro_batch(
    micro: int, places: set[Place], tiny: ModuleType, tmp_path: Path
) -> None:
    arguments = tiny.arguments(tmp_path / "out", gradient_accumulation_steps=micro, max_steps=2)
    options = tiny.budget("tight", tmp_path)
    trainer = Trainer(model=tiny.model(), args=arguments, train_dataset=tiny.data(), ptm_config=options)
    trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    assert {key[0].place for key in engine.run_ahead.routes} == places
