"""Whatever is asked of a Trainer at once, and whatever its callbacks do between, one on pages does as the plain one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer, ptm_trainer
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from ptm_accel.engine import engine_of
from ptm_accel.outside import gathered
from tests.plain_loop import same_bits
from tests.tiers import PAGE, in_groups, needs
from tests.trainer_runs import samples
from tests.zoo import BATCH, ENTRIES, Entry

pytestmark = pytest.mark.usefixtures("all_cores")
MODELS = ("llama-tied", "gpt2", "t5", "bert", "gemma2", "lora")
"""None whose checkpoints have other names than its parameters: the stock Trainer does not load those."""

ROWS = 9
"""An odd number, so that the last batch and the last accumulation are short."""

ARGUMENTS: dict[str, tuple[dict[str, Any], ...]] = {
    "optim": tuple({"optim": name} for name in ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "rmsprop")),
    "schedule": (
        {"lr_scheduler_type": "linear"},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_steps": 1},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
    ),
    "clipping": ({"max_grad_norm": 0.0}, {"max_grad_norm": 1e-3}, {}),
    "accumulation": ({}, {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 3}),
    "length": ({"num_train_epochs": 3}, {"num_train_epochs": 2.5}, {"max_steps": 4}),
    "precision": ({}, {}, {"bf16": True}),
    "checkpointing": ({}, *({"gradient_checkpointing_kwargs": {"use_reentrant": kind}} for kind in (True, False))),
    "loss": ({}, {}, {"label_smoothing_factor": 0.1}, {"logging_nan_inf_filter": False, "learning_rate": 1e30}),
    "best": ({}, {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 1}),
}
"""What is drawn from, one of each."""

HOOKS = (
    "step_begin",
    "substep_end",
    "pre_optimizer_step",
    "optimizer_step",
    "step_end",
    "evaluate",
    "save",
    "epoch_end",
)


def parts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module._parameters]


def weights(model: nn.Module, optimizer: Any) -> Any:
    return [(name, value.clone()) for name, value in model.state_dict().items()]


def gradients(model: nn.Module, optimizer: Any) -> Any:
    found = []
    for part in parts(model):
        with gathered(part, grads=True):
            found += [p.grad if p.grad is None else p.grad.clone() for p in part.parameters(recurse=False)]
    return found


def moments(model: nn.Module, optimizer: Any) -> Any:
    state = optimizer.state_dict()["state"]
    return copy.deepcopy([(number, sorted(entry.items())) for number, entry in state.items()])


def halve_rate(model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def shrink(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for part in parts(model)[::3]:
            for name in [name for name, param in part._parameters.items() if param is not None]:
                getattr(part, name).data.mul_(0.99)


def halve_gradients(model: nn.Module, optimizer: Any) -> None:
    for part in parts(model)[::2]:
        with gathered(part, grads=True, write=True), torch.no_grad():
            for p in part.parameters(recurse=False):
                if p.grad is not None:
                    p.grad.mul_(0.5)


def forget_moments(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})


def freeze(model: nn.Module, optimizer: Any) -> None:
    parts(model)[-1].requires_grad_(False)


def unfreeze(model: nn.Module, optimizer: Any) -> None:
    model.requires_grad_(True)


def drop_gradients(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()


ACTIONS: tuple[Callable[[nn.Module, Any], Any], ...] = (
    weights,
    gradients,
    moments,
    halve_rate,
    shrink,
    halve_gradients,
    forget_moments,
    freeze,
    unfreeze,
    drop_gradients,
)


@dataclass
class Choices:
    """What is done, drawn by a seed."""

    seed: int
    entry: Entry = field(init=False)
    arguments: dict[str, Any] = field(init=False)
    actions: dict[str, dict[int, Callable[[nn.Module, Any], Any]]] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.entry = ENTRIES[MODELS[self.seed % len(MODELS)]]
        drawn = {name: rng.choice(options) for name, options in ARGUMENTS.items()}
        self.arguments = {key: value for option in drawn.values() for key, value in option.items()}
        self.arguments["gradient_checkpointing"] = bool(drawn["checkpointing"])
        if self.entry.name == "t5":
            # Smoothing takes the labels out of the batch, which T5 makes its inputs from.
            self.arguments.pop("label_smoothing_factor", None)
        self.actions = {hook: {} for hook in HOOKS}
        for _ in range(4):
            hook, action = rng.choice(HOOKS), rng.choice(ACTIONS)
            # What is left of gradients after a step is theirs who look: on pages it is used up.
            if hook != "optimizer_step" or action not in (gradients, halve_gradients):
                self.actions[hook][rng.randrange(1, 3)] = action


class Acting(TrainerCallback):
    """Does what was drawn when a hook is called for the n-th time, and records what it returns."""

    def __init__(self, choices: Choices, seen: list[Any]) -> None:
        self.choices, self.seen = choices, seen
        self.calls = dict.fromkeys(HOOKS, 0)

    def act(self, hook: str, model: nn.Module, optimizer: Any) -> None:
        self.calls[hook] += 1
        action = self.choices.actions[hook].get(self.calls[hook])
        # There is no optimizer where somebody only evaluates.
        if action is not None and optimizer is not None:
            self.seen.append((hook, self.calls[hook], action.__name__, action(model, optimizer)))


def _hook(hook: str) -> Callable[..., None]:
    def called(self: Acting, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act(hook, kwargs["model"], kwargs["optimizer"])

    return called


for _name in HOOKS:
    setattr(Acting, f"on_{_name}", _hook(_name))


def run(choices: Choices, folder: Path, options: dict[str, Any] | None) -> list[Any]:
    """Trains, resumes in the middle with another model, predicts; returns all that was seen on the way."""
    seen: list[Any] = []
    entry = choices.entry
    torch.manual_seed(11)
    for again in (False, True):
        trainer = _build(choices, folder, options, entry.build(seed=int(again)), seen)
        # Not from the last one: something shall be left to do.
        before = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        trainer.train(resume_from_checkpoint=str(before[0]) if again else None)
        engine = engine_of(trainer.model)
        seen.append(("log", _numbers(trainer.state.log_history)))
        seen.append(("state", trainer.state.global_step, trainer.state.best_metric, trainer.state.epoch))
        seen.append(("weights", weights(trainer.model, None)))
        seen.append(("moments", moments(trainer.model, trainer.optimizer)))
        seen.append(("rates", trainer.optimizer.state_dict()["param_groups"]))
        seen.append(("random numbers", torch.get_rng_state()))
        predicted = trainer.predict(trainer.eval_dataset)
        seen.append(("metrics", _numbers([predicted.metrics])))
        assert (engine is None) == (options is None)
        if engine is not None:
            engine.check_integrity()
            assert engine.pool.stats.evictions > 0
            engine.detach()
    return seen


def _build(
    choices: Choices, folder: Path, options: dict[str, Any] | None, model: nn.Module, seen: list[Any]
) -> transformers.Trainer:
    args = TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "metric_for_best_model": "eval_loss",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **choices.arguments,
        }
    )
    given: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": samples(choices.entry, ROWS),
        "eval_dataset": samples(choices.entry, BATCH + 1),
        "callbacks": [Acting(choices, seen)],
    }
    cls = random.Random(choices.seed).choice([Trainer, ptm_trainer(transformers.Trainer)])
    trainer = transformers.Trainer(**given) if options is None else cls(**given, ptm_config=options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is measured."""
    measured = ("ptm_", "runtime", "per_second", "preparation_time")
    return [{k: v for k, v in line.items() if not any(part in k for part in measured)} for line in lines]


def first_difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """Where two records differ, by every bit of their tensors; None if they do not."""
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} and {len(theirs)} of them"
        pairs = (
            (a, b, f"{where}[{a[0] if isinstance(a, tuple) else n}]")
            for n, (a, b) in enumerate(zip(ours, theirs, strict=True))
        )
        return next((found for pair in pairs if (found := first_difference(*pair))), None)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return first_difference(sorted(ours.items(), key=str), sorted(theirs.items(), key=str), where)
    return None if same_bits(ours, theirs) else f"{where}: {ours!r:.200} and {theirs!r:.200}"


@pytest.mark.thinned(1)
@pytest.mark.parametrize("seed", range(24))
def test_any_choices(seed: int, tmp_path: Path) -> None:
    choices = Choices(seed)
    plain = run(choices, tmp_path / "plain", None)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    floor, need = needs(choices.entry.build(), scratch, "host+disk")
    # Less than the weights alone; or groups of many parameters in little more.
    budget = max(need // (3 if seed % 2 else 6), floor * 5 // 4)
    options = {"host_memory": budget, "page_size": PAGE, "disk": str(scratch)}
    with in_groups() if seed % 2 else nullcontext():
        ours = run(choices, tmp_path / "ours", options)
    assert not (found := first_difference(ours, plain)), (found, choices.arguments, choices.actions)


def test_a_difference_is_found() -> None:
    """Else all of the above would show nothing."""
    ones = [("weights", [("a", torch.ones(2)), ("b", {"c": float("nan")})])]
    assert first_difference(ones, [("weights", [("a", torch.ones(2)), ("b", {"c": float("nan")})])]) is None
    other = first_difference(ones, [("weights", [("a", torch.tensor([1.0, 1.0 + 2e-7])), ("b", {"c": float("nan")})])])
    assert other is not None
    assert "[weights][1][a]" in other
