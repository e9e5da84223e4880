"""`micro_batches: by_layer` in the Trainer: the log and the weights of the stock Trainer, and what is refused."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.transformers import Trainer
from ptm_accel.integrations.transformers.by_layer import refuse_by_layer
from transformers import TrainerCallback

from ptm_accel.engine import engine_of
from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.micro_batches.borders import Chunks
from ptm_accel.optim.updates import Updates

WAYS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "unclipped": {"max_grad_norm": 0.0},
    "checkpointed": {"gradient_checkpointing": True},
    "re-entrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "bf16": {"bf16": True},
    "smoothed": {"label_smoothing_factor": 0.1},
    # 40 samples, 2 a batch, 3 batches a step: the last step of an epoch has two.
    "uneven": {"max_steps": -1, "num_train_epochs": 2},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2},
    "one": {"gradient_accumulation_steps": 1},
    "sgd": {"optim": "sgd"},
}


def trained(cls: Any, tiny: ModuleType, folder: Path, model: Any, changes: dict[str, Any], **given: Any) -> Any:
    args = tiny.arguments(folder, **{"gradient_accumulation_steps": 3, **changes})
    trainer = cls(model=model, args=args, train_dataset=tiny.data(), eval_dataset=tiny.data(6), **given)
    trainer.train()
    return trainer


def by_layer(tiny: ModuleType, folder: Path, budget: str = "tight") -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {**tiny.budget(budget, folder), "micro_batches": "by_layer"}


@pytest.mark.parametrize("way", WAYS)
def test_the_log_and_the_weights_are_those_of_the_stock_trainer(way: str, tiny: ModuleType, tmp_path: Path) -> None:
    plain = trained(transformers.Trainer, tiny, tmp_path, tiny.model(), WAYS[way])
    options = by_layer(tiny, tmp_path / "disk")
    ours = trained(Trainer, tiny, tmp_path, tiny.model(), WAYS[way], ptm_config=options)
    assert tiny.history(ours) == tiny.history(plain)
    assert tiny.same(tiny.weights(ours.model), tiny.weights(plain.model))
    if way != "one":
        assert ours._by_layer is not None
        layers = [number for number, _ in ours._by_layer.order]
        assert layers == sorted(layers[: len(layers) // 2]) + sorted(layers[len(layers) // 2 :], reverse=True)


def test_the_log_says_it_once(tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ptm_accel"):
        trained(Trainer, tiny, tmp_path, tiny.model(), {}, ptm_config=by_layer(tiny, tmp_path / "disk"))
    # 3 micro-batches of 2 x 24 tokens, 3 layers and an output, 64 wide in fp32.
    said = "micro-batches by layer: 3 a step run through 3 layers together and keep up to 144.00 KiB of hidden states; "
    said += "weights come in 2 times a step instead of 6."
    assert [record.getMessage() for record in caplog.records].count(said) == 1


def test_chunks_of_a_step_change_no_bit(
    tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunks, "_fitting", lambda chunks, shapes: min(2, len(shapes)))
    plain = trained(transformers.Trainer, tiny, tmp_path, tiny.model(), {})
    with caplog.at_level("INFO", "ptm_accel"):
        ours = trained(Trainer, tiny, tmp_path, tiny.model(), {}, ptm_config=by_layer(tiny, tmp_path / "disk"))
    assert tiny.history(ours) == tiny.history(plain)
    assert tiny.same(tiny.weights(ours.model), tiny.weights(plain.model))
    assert [number for layer, number in ours._by_layer.order if layer == 0] == [0, 1, 0, 1, 2, 2]
    said = "3 a step run through 3 layers in 2 chunks and keep up to 96.00 KiB of hidden states; weights come in 4"
    assert said in caplog.text


def test_adapters(tiny: ModuleType, tmp_path: Path) -> None:
    found = []
    for cls, given in ((transformers.Trainer, {}), (Trainer, {"ptm_config": by_layer(tiny, tmp_path / "disk")})):
        model = peft.get_peft_model(tiny.model(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0))
        trainer = trained(cls, tiny, tmp_path, model, {"gradient_checkpointing": True}, **given)
        found.append((tiny.history(trainer), tiny.weights(trainer.model)))
    assert found[0][0] == found[1][0]
    assert tiny.same(found[1][1], found[0][1])


def test_masters_and_what_fits(tiny: ModuleType, tmp_path: Path) -> None:
    found = []
    for number, micro_batches in enumerate(("one_by_one", "by_layer")):
        folder = tmp_path / str(number)
        options = {**by_layer(tiny, folder, "roomy"), "micro_batches": micro_batches, "master_weights": "fp32"}
        trainer = trained(Trainer, tiny, folder, tiny.model().to(torch.bfloat16), {}, ptm_config=options)
        found.append((tiny.history(trainer), tiny.weights(trainer.model)))
    assert found[0][0] == found[1][0]
    assert tiny.same(found[1][1], found[0][1])


def test_a_run_resumes_in_the_middle(tiny: ModuleType, tmp_path: Path) -> None:
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    plain = trained(transformers.Trainer, tiny, tmp_path / "plain", tiny.model(), changes)
    options = by_layer(tiny, tmp_path / "disk")
    whole = trained(Trainer, tiny, tmp_path / "ours", tiny.model(), changes, ptm_config=options)
    assert tiny.same(tiny.weights(whole.model), tiny.weights(plain.model))
    args = tiny.arguments(tmp_path / "ours", gradient_accumulation_steps=3, **changes)
    resumed = Trainer(model=tiny.model(seed=1), args=args, train_dataset=tiny.data(), ptm_config=options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert tiny.same(tiny.weights(resumed.model), tiny.weights(plain.model))


def test_a_loss_of_the_users_own(tiny: ModuleType, tmp_path: Path) -> None:
    class Squared:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
            return model(**inputs).logits.square().mean()

    found = []
    for cls, given in ((transformers.Trainer, {}), (Trainer, {"ptm_config": by_layer(tiny, tmp_path / "disk")})):
        trainer = trained(type("Own", (Squared, cls), {}), tiny, tmp_path, tiny.model(), {}, **given)
        found.append((tiny.history(trainer), tiny.weights(trainer.model)))
    assert found[0][0] == found[1][0]
    assert tiny.same(found[1][1], found[0][1])


def test_callbacks_between_micro_batches_see_complete_gradients(tiny: ModuleType, tmp_path: Path) -> None:
    """A limit: as documented, the first of them comes after the last backward."""
    seen: list[bool] = []

    class Looks(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(all(param.grad is not None for param in given["model"].parameters()))

    trained(Trainer, tiny, tmp_path, tiny.model(), {}, ptm_config=by_layer(tiny, tmp_path / "d"), callbacks=[Looks()])
    assert seen
    assert all(seen)


def test_dropout_is_refused_before_anything_is_updated(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.model(attention_dropout=0.1)
    before = tiny.weights(model)
    with pytest.raises(UnsupportedError, match="Set dropout to 0, or micro_batches to by_layer_inexact"):
        trained(Trainer, tiny, tmp_path, model, {}, ptm_config=by_layer(tiny, tmp_path / "disk"))
    assert tiny.same(tiny.weights(model), before)
    options = {**by_layer(tiny, tmp_path / "disk"), "micro_batches": "by_layer_inexact"}
    trainer = trained(Trainer, tiny, tmp_path, tiny.model(attention_dropout=0.1), {}, ptm_config=options)
    assert len([line for line in trainer.state.log_history if "loss" in line]) == 5


def test_tied_embeddings(tiny: ModuleType, tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    args = tiny.arguments(tmp_path)
    with pytest.raises(UnsupportedError, match=r"input and output embeddings are one tensor .* by_layer_inexact"):
        Trainer(model=tiny.model(**tied), args=args, ptm_config={"micro_batches": "by_layer"})
    plain = trained(transformers.Trainer, tiny, tmp_path, tiny.model(**tied), {})
    options = {**by_layer(tiny, tmp_path / "disk"), "micro_batches": "by_layer_inexact"}
    ours = trained(Trainer, tiny, tmp_path, tiny.model(**tied), {}, ptm_config=options)
    for mine, theirs in zip(tiny.history(ours), tiny.history(plain), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"torch_compile": True}, "torch_compile"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise'"),
    ],
)
def test_arguments_that_are_refused(
    changes: dict[str, Any], name: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(model=tiny.model(), args=tiny.arguments(tmp_path), ptm_config={"micro_batches": "by_layer"})
    for argument, value in changes.items():
        setattr(trainer.args, argument, value)
    assert trainer.ptm_config is not None
    with pytest.raises(UnsupportedError, match=rf"by_layer is not known to give the numbers .* with {name}\. Leave"):
        refuse_by_layer(trainer, trainer.ptm_config)


def test_several_processes_are_refused(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PTMAccelerator, "num_processes", property(lambda self: 2))
    with pytest.raises(UnsupportedError, match=r"together with several processes\. Leave"):
        Trainer(model=tiny.model(), args=tiny.arguments(tmp_path), ptm_config={"micro_batches": "by_layer"})


def test_a_training_step_of_the_users_own_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    with pytest.raises(UnsupportedError, match=r"together with training_step\(\) of Own\. Leave"):
        Own(model=tiny.model(), args=tiny.arguments(tmp_path), ptm_config={"micro_batches": "by_layer"})


def test_a_training_step_over_that_of_trl_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(Trainer, self).training_step(*args, **kwargs)

    compared = type("Compared", (Trainer,), {"training_step": step, "__module__": "trl.trainer.sft_trainer"})
    given: dict[str, Any] = {"args": tiny.arguments(tmp_path), "ptm_config": {"micro_batches": "by_layer"}}
    compared(model=tiny.model(), **given)
    over = type("Over", (compared,), {"training_step": step})
    with pytest.raises(UnsupportedError, match=r"together with training_step\(\) of Over\. Leave"):
        over(model=tiny.model(), **given)


def test_a_loop_of_ones_own_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="needs the Trainer's gradient accumulation"):
        PTMAccelerator(cpu=True, ptm_config={"micro_batches": "by_layer"})
    with pytest.raises(ConfigError, match="micro_batches: got 'layers'"):
        PTMAccelerator(cpu=True, ptm_config={"micro_batches": "layers"})


# ---- updates in backward ---------------------------------------------------------------------------------------------


def begun_by_step(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many updates had begun as each step was asked for."""
    found: list[int] = []
    step = Updates.step

    def noted(self: Updates, *args: Any, **kwargs: Any) -> None:
        found.append(0 if self.early is None else len(self.early.work))
        step(self, *args, **kwargs)

    monkeypatch.setattr(Updates, "step", noted)
    return found


class Substeps(TrainerCallback):
    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("changes", "callbacks", "begin"),
    [
        ({"max_grad_norm": 0.0}, [], True),
        ({"max_grad_norm": 0.0, "optim": "sgd", "optim_args": "momentum=0.9"}, [], True),
        ({"max_grad_norm": 0.0, "bf16": True}, [], True),
        ({"max_grad_norm": 1.0}, [], False),
        ({"max_grad_norm": 0.0}, [Substeps()], False),
        ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 3}, [], True),
    ],
    ids=["adamw", "sgd", "bf16", "clipped", "callback", "uneven"],
)
def test_updates_begin_in_backward_where_the_loop_is_known(
    changes: dict[str, Any],
    callbacks: Any,
    begin: bool,
    tiny: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 40 samples, a step has 3 micro-batches of 2 (or of 3), the last of an epoch two: there none begins."""
    changes = {"max_steps": 9, **changes}
    plain = trained(transformers.Trainer, tiny, tmp_path, tiny.model(), changes)
    begun = begun_by_step(monkeypatch)
    options = by_layer(tiny, tmp_path / "disk")
    ours = trained(Trainer, tiny, tmp_path, tiny.model(), changes, ptm_config=options, callbacks=callbacks)
    assert tiny.history(ours) == tiny.history(plain)
    assert tiny.same(tiny.weights(ours.model), tiny.weights(plain.model))
    whole = sum(slot.group.movable for slot in engine_of(ours.model).slots) if begin else 0
    uneven = {6} if changes.get("per_device_train_batch_size") != 3 else {4}
    assert begun == [0 if step == 0 or step in uneven else whole for step in range(9)]


def test_ctrl_c_ends_training_after_the_step_whose_updates_have_begun(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pressed(Trainer):
        losses = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.losses += 1
            if self.losses == 3 * 3 + 1:
                signal.raise_signal(signal.SIGINT)
            return super().compute_loss(*args, **kwargs)

    changes = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    plain = trained(transformers.Trainer, tiny, tmp_path, tiny.model(), {**changes, "max_steps": 4})
    begun = begun_by_step(monkeypatch)
    args = tiny.arguments(tmp_path, gradient_accumulation_steps=3, **changes)
    options = by_layer(tiny, tmp_path / "disk")
    ours = Pressed(model=tiny.model(), args=args, train_dataset=tiny.data(), ptm_config=options)
    with pytest.raises(KeyboardInterrupt):
        ours.train()
    assert begun[3] > 0
    assert ours.state.global_step == 4
    assert tiny.same(tiny.weights(ours.model), tiny.weights(plain.model))
    assert ours.optimizer.state_dict()["state"]


def test_a_data_set_that_ends_in_the_middle_of_a_step_has_no_update_begun(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a data set without a length: gradients that are left at its end are added to those of the next epoch."""

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(tiny.data(10))

    args = tiny.arguments(tmp_path, gradient_accumulation_steps=3, max_grad_norm=0.0, max_steps=6)
    plain = transformers.Trainer(model=tiny.model(), args=args, train_dataset=Rows())
    plain.train()
    begun = begun_by_step(monkeypatch)
    options = by_layer(tiny, tmp_path / "disk")
    ours = Trainer(model=tiny.model(), args=args, train_dataset=Rows(), ptm_config=options)
    ours.train()
    assert tiny.history(ours) == tiny.history(plain)
    assert tiny.same(tiny.weights(ours.model), tiny.weights(plain.model))
    assert len(begun) == 6
