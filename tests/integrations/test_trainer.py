"""The Trainer on pages against the plain Trainer: the same numbers, bit for bit, and the same behaviour."""

from __future__ import annotations

import functools
import gc
import json
import logging
import re
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import PTMCallback, PTMTrainerMixin, Trainer, check_version, ptm_trainer
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

import ptm_accel
from ptm_accel.engine import engine_of
from ptm_accel.errors import ConfigError, PagedModelError, UnsupportedError
from tests.tiers import AMPLE, on_pages
from tests.tiers import config as small_pages

CASES: dict[str, dict[str, Any]] = {
    "simple": {},
    "accumulate_evaluate": {"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 2},
    "no_clipping": {"max_grad_norm": 0.0},
    "clips_much": {"max_grad_norm": 0.05, "gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine"},
    "dropout": {"sizes": {"attention_dropout": 0.2}, "gradient_accumulation_steps": 2},
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
    "tied": {"sizes": {"tie_word_embeddings": True}},
    "smoothed": {"label_smoothing_factor": 0.1},
    "adagrad": {"optim": "adagrad"},
    "adafactor": {"optim": "adafactor", "max_grad_norm": 0.5},
    "checkpointed": {"gradient_checkpointing": True},
}


def _build(
    tiny: ModuleType,
    cls: Any,
    folder: Path,
    options: Any = None,
    *,
    model: Any = None,
    given: Any = None,
    **changes: Any,
) -> transformers.Trainer:
    sizes = changes.pop("sizes", {})
    extra = {"ptm_config": options} if options is not None else {}
    return cls(
        model=model or tiny.model(**sizes),
        args=tiny.arguments(folder, **changes),
        train_dataset=tiny.data(),
        eval_dataset=tiny.data(6),
        **extra,
        **(given or {}),
    )


@pytest.fixture(scope="module")
def plain(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plain Trainer's outcome for a case, run once."""

    @functools.cache
    def run(name: str) -> tuple[Any, Any]:
        trainer = _build(tiny, transformers.Trainer, tmp_path_factory.mktemp(name), **CASES[name])
        trainer.train()
        return tiny.history(trainer), tiny.weights(trainer.model)

    return run


@pytest.fixture(params=["roomy", "tight"])
def options(request: pytest.FixtureRequest, tiny: ModuleType, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "scratch").mkdir()
    return tiny.budget(request.param, tmp_path / "scratch")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_the_plain_trainer(
    name: str, tiny: ModuleType, plain: Any, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history, weights = plain(name)
    before = tiny.weights(tiny.model(**CASES[name].get("sizes", {})))
    trainer = _build(tiny, Trainer, tmp_path, options, **CASES[name])
    trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    assert (engine.pool.stats.evictions > 0) == ("disk" in options)
    assert tiny.history(trainer) == history
    assert len(history) >= 5
    assert tiny.same(tiny.weights(trainer.model), weights)
    assert not tiny.same(weights, before)
    assert "was used up by the last step" not in caplog.text


def test_a_second_train_goes_on_as_in_the_plain_trainer(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, options)):
        trainer = _build(tiny, cls, tmp_path, config, max_steps=3)
        trainer.train()
        trainer.train()
        runs.append((tiny.history(trainer), tiny.weights(trainer.model)))
    assert runs[0][0] == runs[1][0]
    assert tiny.same(runs[1][1], runs[0][1])


def test_a_second_trainer_on_the_same_model_takes_over(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, options)):
        model = tiny.model()
        first = _build(tiny, cls, tmp_path, config, model=model, max_steps=3)
        first.train()
        second = _build(tiny, cls, tmp_path, config, model=model, max_steps=3, learning_rate=3e-3)
        second.train()
        runs.append((tiny.history(second), tiny.weights(model)))
    assert runs[0][0] == runs[1][0]
    assert tiny.same(runs[1][1], runs[0][1])
    with pytest.raises(UnsupportedError, match=r"state of this optimizer \(AdamW\) was given up, when another one"):
        first.train()


def test_a_trainer_whose_model_was_resized_is_told_why_its_optimizer_is_of_no_use(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    """In the plain Trainer AdamW fails on sizes that differ, in its step."""
    trainer = _build(tiny, Trainer, tmp_path, options, max_steps=1)
    trainer.train()
    trainer.model.resize_token_embeddings(tiny.VOCABULARY + 8)
    with pytest.raises(UnsupportedError, match=r"given up, .* some of its parameters were replaced or resized"):
        trainer.train()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()


def test_a_model_that_is_no_longer_used_takes_its_pages_with_it(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = _build(tiny, Trainer, tmp_path, options, max_steps=1)
    trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    memory, model = engine.memory, weakref.ref(trainer.model)
    assert list(memory.pool.tensors())
    del engine, trainer
    # As in a notebook: the name is given to the next Trainer.
    trainer = _build(tiny, Trainer, tmp_path, options, max_steps=1)
    trainer.train()
    assert model() is None
    assert memory.closed
    assert not list(memory.pool.tensors())


def test_model_init_frees_the_model_before(tiny: ModuleType, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = Trainer(
        model_init=lambda: tiny.model(),
        args=tiny.arguments(tmp_path, max_steps=2),
        train_dataset=tiny.data(),
        ptm_config=options,
    )
    trainer.train()
    first = weakref.ref(trainer.model)
    history = tiny.history(trainer)
    trainer.train()
    assert tiny.history(trainer) == history
    gc.collect()
    assert first() is None


def test_optimizers_that_are_given(tiny: ModuleType, options: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, options)):
        model = tiny.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        given = {"optimizers": (optimizer, schedule)}
        trainer = _build(tiny, cls, tmp_path, config, model=model, given=given)
        trainer.train()
        runs.append((tiny.history(trainer), tiny.weights(model)))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0][0]["learning_rate"] != runs[0][0][1]["learning_rate"]
    assert tiny.same(runs[1][1], runs[0][1])


def test_layers_frozen_and_unfrozen_between_two_trains(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, options)):
        model = tiny.model()
        model.model.layers[0].requires_grad_(False)
        trainer = _build(tiny, cls, tmp_path, config, model=model, max_steps=2)
        trainer.train()
        model.model.layers[0].requires_grad_(True)
        again = _build(tiny, cls, tmp_path, config, model=model, max_steps=2)
        again.train()
        runs.append((tiny.history(again), tiny.weights(model)))
    assert runs[0][0] == runs[1][0]
    assert tiny.same(runs[1][1], runs[0][1])


class _NotANumber(transformers.Trainer):
    """Its third loss is NaN."""

    calls = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.calls += 1
        return loss * float("nan") if self.calls == 3 else loss


def test_nan_gradients_as_the_plain_trainer_treats_them(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path
) -> None:
    runs = []
    for cls, config in ((_NotANumber, None), (ptm_trainer(_NotANumber), options)):
        trainer = _build(tiny, cls, tmp_path, config)
        trainer.train()
        runs.append((repr(tiny.history(trainer)), tiny.weights(trainer.model)))
    assert "nan" in runs[0][0]
    assert runs[0][0] == runs[1][0]
    assert tiny.same(runs[1][1], runs[0][1])


class _Stops(TrainerCallback):
    """Ctrl-C in the middle of the third step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


@pytest.mark.thinned(1)
@pytest.mark.parametrize("where", ["callback", "forward", "checkpointed forward"])
def test_save_and_train_on_after_ctrl_c(where: str, tiny: ModuleType, options: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"callbacks": [_Stops()]} if where == "callback" else {}
    changes = {
        "gradient_checkpointing": where == "checkpointed forward",
        "gradient_accumulation_steps": 2,
        "bf16": True,
    }
    trainer = _build(tiny, Trainer, tmp_path, options, given=given, **changes)
    calls = []

    def interrupt(module: torch.nn.Module, *rest: Any) -> None:
        calls.append(module)
        if len(calls) == 7:
            raise KeyboardInterrupt

    handle = None if given else trainer.model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    engine.check_integrity()
    trainer.save_model(str(tmp_path / "saved"))
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert tiny.same(tiny.weights(saved), tiny.weights(trainer.model))
    if handle is not None:
        handle.remove()
    trainer.callback_handler.remove_callback(_Stops)
    trainer.train()
    assert trainer.state.global_step == 5


def test_evaluate_and_predict_without_training(tiny: ModuleType, options: dict[str, Any], tmp_path: Path) -> None:
    def accuracy(given: Any) -> dict[str, float]:
        return {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())}

    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, options)):
        trainer = _build(tiny, cls, tmp_path, config, given={"compute_metrics": accuracy})
        metrics = trainer.evaluate()
        runs.append(
            (metrics["eval_loss"], metrics["eval_accuracy"], trainer.predict(tiny.data(4)).predictions.tolist())
        )
        trainer.train()
        runs[-1] += (trainer.evaluate()["eval_loss"],)
    assert runs[0] == runs[1]


def test_evaluation_in_another_dtype_is_refused_outside_of_training(
    tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trainer(model: Any) -> Any:
        arguments = tiny.arguments(tmp_path, max_steps=2, bf16_full_eval=True, eval_strategy="steps", eval_steps=1)
        return Trainer(model=model, args=arguments, train_dataset=tiny.data(), eval_dataset=tiny.data(), ptm_config={})

    ours = trainer(tiny.model())
    assert "bf16_full_eval casts the whole model for an evaluation outside of train()" in caplog.text
    ours.train()
    assert len([line for line in ours.state.log_history if "eval_loss" in line]) == 2
    for evaluate in (ours.evaluate, lambda: ours.predict(tiny.data())):
        with pytest.raises(PagedModelError, match=r"bf16_full_eval=True would cast the model from torch\.float32 to"):
            evaluate()
    assert "eval_loss" in trainer(tiny.model().to(torch.bfloat16)).evaluate()


def test_auto_find_batch_size(tiny: ModuleType, options: dict[str, Any], tmp_path: Path) -> None:
    def too_much(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if len(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, options)):
        trainer = _build(tiny, cls, tmp_path, config, auto_find_batch_size=True, per_device_train_batch_size=4)
        trainer.model.model.layers[2].mlp.register_forward_pre_hook(too_much, with_kwargs=True)
        trainer.train()
        runs.append((trainer._train_batch_size, tiny.history(trainer), tiny.weights(trainer.model)))
    assert runs[1][0] == runs[0][0] <= 2
    assert runs[1][1] == runs[0][1]
    assert tiny.same(runs[1][2], runs[0][2])


def test_a_card_that_is_full_is_listed(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.cuda, "memory_stats", dict)
    monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", list)
    trainer = _build(tiny, Trainer, tmp_path, options)
    hook = trainer.model.model.layers[2].mlp.register_forward_pre_hook(too_much)
    file = Path(trainer.args.output_dir) / "out_of_memory-0.json"
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory. Tried .* is listed in") as raised:
        trainer.train()
    assert str(raised.value).endswith(f" is listed in {file}.")
    assert json.loads(file.read_text())["budgets"]["host"]["used_by_tag"]["param"] > 0
    file.unlink()
    hook.remove()
    trainer.train()
    assert not file.exists()


class _Looks(TrainerCallback):
    """Looks at gradients before the step, and at parameters and gradients after it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with ptm_accel.gathered(kwargs["model"], grads=True) as model:
            self.seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.seen.append([p.grad for p in model.parameters()])
        self.seen.append([model.lm_head.weight.clone(), model.model.norm.weight.clone()])


def test_callbacks_see_what_they_see_in_the_plain_trainer(tiny: ModuleType, tmp_path: Path) -> None:
    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, {"host_memory": "64MiB"})):
        looks = _Looks()
        given = {"callbacks": [looks]}
        _build(tiny, cls, tmp_path, config, given=given, max_grad_norm=0.1, max_steps=2).train()
        runs.append(looks.seen)
    for ours, plains in zip(runs[1], runs[0], strict=True):
        for mine, theirs in zip(ours, plains, strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    assert runs[1][0][0] is not None


@pytest.mark.parametrize("budget", ["roomy", "tight"])
def test_seq2seq_with_generation(budget: str, tiny: ModuleType, tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    rows = [{**row, "labels": row["input_ids"][:6] % 96} for row in tiny.data(12, length=10)]
    rows = [{"input_ids": row["input_ids"] % 96, "labels": row["labels"]} for row in rows]
    options = tiny.budget(budget, tmp_path)
    if budget == "tight":
        options["host_memory"] = 600 << 10
    runs = []
    for cls, config in ((Seq2SeqTrainer, {}), (ptm_trainer(Seq2SeqTrainer), {"ptm_config": options})):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))
        args = tiny.arguments(
            tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=8, max_steps=3
        )
        trainer = cls(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4], **config)
        trainer.train()
        runs.append((tiny.history(trainer), trainer.predict(rows[:4]).predictions.tolist(), tiny.weights(model)))
        assert type(trainer).__name__ == "Seq2SeqTrainer"
        assert isinstance(trainer, Seq2SeqTrainer)
    assert runs[0][:2] == runs[1][:2]
    assert tiny.same(runs[1][2], runs[0][2])
    engine = engine_of(model)
    assert engine is not None
    assert (engine.pool.stats.evictions > 0) == (budget == "tight")


def test_logs_tell_what_was_used(tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ptm_accel")
    trainer = _build(
        tiny, Trainer, tmp_path, tiny.budget("tight", tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    lines = trainer.state.log_history
    training = [line for line in lines if "loss" in line]
    assert len(training) == 2
    for line in training:
        assert 0 < line["ptm_peak_host_gib"] * (1 << 30) <= tiny.TIGHT_BYTES + (1 << 16)
    # An update is carried out beside what comes after its step: which line, or evaluation, it falls on is open.
    for name in ("ptm_faults", "ptm_hits", "ptm_loaded_gib", "ptm_stored_gib", "ptm_disk_written_gib"):
        assert all(line[name] >= 0 for line in training)
    assert sum(line["ptm_disk_written_gib"] for line in training) > 0
    assert not any(key.startswith("ptm_") for line in lines if "loss" not in line for key in line)
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("2 steps\n  host ")]
    whole = engine_of(trainer.model).metrics.read()
    assert whole.steps == 2
    assert whole.faults + whole.hits > 0
    assert sum(line["ptm_faults"] + line["ptm_hits"] for line in training) <= whole.faults + whole.hits


def test_the_callback_is_there_once(tiny: ModuleType, tmp_path: Path) -> None:
    for given in ({}, {"callbacks": [PTMCallback()]}):
        trainer = _build(tiny, Trainer, tmp_path, given=given)
        assert sum(isinstance(c, PTMCallback) for c in trainer.callback_handler.callbacks) == 1
    stock = _build(tiny, transformers.Trainer, tmp_path, max_steps=1, given={"callbacks": [PTMCallback()]})
    stock.train()
    assert engine_of(stock.model) is None


def test_configurations_from_a_file_and_wrong_ones(tiny: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("host_memory: 64MiB\npage_size: 64KiB\n")
    trainer = _build(tiny, Trainer, tmp_path, str(file), max_steps=1)
    trainer.train()
    assert engine_of(trainer.model).config.page_bytes == 64 << 10
    with pytest.raises(ConfigError, match="unknown key 'host_memroy'"):
        _build(tiny, Trainer, tmp_path, {"host_memroy": "1GB"})
    other = _build(tiny, Trainer, tmp_path, {"host_memory": "32MiB"}, model=trainer.model, max_steps=1)
    with pytest.raises(ConfigError, match="this model is already on pages with"):
        other.train()


def test_the_factory() -> None:
    class Mine(transformers.Trainer):
        """My own."""

    made = ptm_trainer(Mine)
    assert made is ptm_trainer(Mine)
    assert (made.__name__, made.__doc__, made.__module__) == ("Mine", "My own.", __name__)
    assert issubclass(made, Mine)
    assert issubclass(made, PTMTrainerMixin)
    assert ptm_trainer(made) is made
    assert ptm_trainer(Trainer) is Trainer
    with pytest.raises(UnsupportedError, match=r"int is not a transformers.Trainer; pass a subclass of it"):
        ptm_trainer(int)  # type: ignore[arg-type]


@pytest.mark.parametrize("installed", ["5.16.9", "6.0.0", "4.57.1", "unknown"])
def test_other_versions_of_transformers_are_refused(installed: str) -> None:
    with pytest.raises(UnsupportedError, match=f"transformers {installed} is installed; ptm_accel works with 5.17"):
        check_version(installed)


def test_supported_versions_of_transformers() -> None:
    for installed in (None, "5.17.0", "5.23.0.dev0", "5.99"):
        check_version(installed)


class Looks(TrainerCallback):
    """Notes what was done to the collector by the beginning of each step."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.seen: list[list[str]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(list(self.calls))


@pytest.mark.parametrize(("kind", "frozen"), [("mock+host", ["freeze"]), ("host+disk", [])])
def test_the_collector_leaves_alone_what_there_is_beside_a_device(
    kind: str, frozen: list[str], tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not the collector's own: processes of tests have frozen what they were forked with.
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    model, looks = tiny.model(), Looks(calls)
    with on_pages(model, kind, AMPLE, tmp_path):
        trainer = _build(tiny, Trainer, tmp_path, small_pages(), model=model, given={"callbacks": [looks]})
        trainer.train()
        trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
    assert len(looks.seen) > 1
    assert looks.seen[0] == []
    assert all(seen == frozen for seen in looks.seen[1:])
    assert calls == frozen + ["unfreeze"] * len(frozen)


def test_tokens_of_text_are_counted(tiny: ModuleType, tmp_path: Path) -> None:
    arguments = tiny.arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2)
    trainer = Trainer(tiny.model(), arguments, train_dataset=tiny.data(length=24), ptm_config={"host_memory": "64MiB"})
    trainer.train()
    metrics = trainer._engine.metrics
    assert metrics.tokens.total == 4 * 2 * 2 * 24
    assert all(line["ptm_tokens_s"] > 0 for line in trainer.state.log_history[1:] if "loss" in line)
    assert re.search(r"^4 steps of .* s \(median .* s\), [\d,]+ tokens/s\n", metrics.summary())
