"""Saving and resuming through the Trainer: bit for bit, whole directories or none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from ptm_accel.checkpoint.manifest import MANIFEST_NAME
from ptm_accel.checkpoint.plain_state import write_plain_state
from ptm_accel.engine import engine_of
from ptm_accel.errors import CheckpointError, DiskError
from tests.prepared import run_prepared

CHILD = Path(__file__).with_name("trainer_child.py")
SIZES = {"attention_dropout": 0.1}
CHANGES = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}


def _child(job: dict[str, Any], folder: Path) -> tuple[int, Any]:
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    job = {"sizes": SIZES, "changes": CHANGES, "result": str(result), **job}
    done = run_prepared(CHILD, json.dumps(job), cwd=folder)
    assert done.code in (0, -signal.SIGKILL), done.err[-4000:]
    return done.code, json.loads(result.read_text()) if result.exists() else None


def _build(tiny: ModuleType, cls: Any, folder: Path, options: Any = None, given: Any = None, **changes: Any) -> Any:
    extra = {"ptm_config": options} if options is not None else {}
    model = (given or {}).pop("model", None)
    return cls(
        model=model or tiny.model(**SIZES),
        args=tiny.arguments(folder, **{**CHANGES, **changes}),
        train_dataset=tiny.data(),
        eval_dataset=tiny.data(6),
        **extra,
        **(given or {}),
    )


@pytest.fixture(scope="module")
def uninterrupted(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ten steps of the plain Trainer in one go."""
    trainer = _build(tiny, transformers.Trainer, tmp_path_factory.mktemp("plain"), max_steps=10)
    trainer.train()
    return {"history": tiny.history(trainer), "weights": tiny.digest(trainer.model)}


@pytest.fixture
def tight(tiny: ModuleType, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "scratch").mkdir()
    return tiny.budget("tight", tmp_path / "scratch")


class _Ends(transformers.TrainerCallback):
    """Saves and ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = True
            control.should_training_stop = True


def _steps(outcome: dict[str, Any]) -> list[Any]:
    """The lines of the steps, without the one at the end, whose averages are over one call."""
    return [line for line in outcome["history"] if "loss" in line]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("first", "second"), [("tight", "roomy"), ("roomy", "tight")])
def test_ten_steps_are_five_and_five_in_a_new_process(
    first: str, second: str, tiny: ModuleType, tight: dict[str, Any], uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    options = {"tight": tight, "roomy": tiny.budget("roomy", tmp_path)}
    run = tmp_path / "run"
    trainer = _build(tiny, Trainer, run, options[first], {"callbacks": [_Ends(5)]}, max_steps=10, save_strategy="steps")
    trainer.train()
    assert trainer.state.global_step == 5
    names = {path.name for path in (run / "checkpoint-5").iterdir()}
    assert names >= {"model.safetensors", "optimizer.json", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert "optimizer.pt" not in names
    code, outcome = _child({"folder": str(run), "options": options[second], "resume": True}, tmp_path)
    assert code == 0
    assert _steps(outcome) == _steps(uninterrupted)
    assert outcome["weights"] == uninterrupted["weights"]


def test_killed_in_the_middle_of_a_save(
    tiny: ModuleType, tight: dict[str, Any], uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, _ = _child({"folder": str(run), "options": tight, "save_steps": 4, "kill_at": 8}, tmp_path)
    assert code == -signal.SIGKILL
    left = [path.name for path in run.iterdir() if path.name != "checkpoint-4"]
    assert len(left) == 1
    assert left[0].startswith("_incomplete-checkpoint-8-")
    assert get_last_checkpoint(str(run)) == str(run / "checkpoint-4")
    trainer = _build(tiny, Trainer, run, tight, max_steps=10)
    trainer.train(resume_from_checkpoint=True)
    assert [path.name for path in run.iterdir()] == ["checkpoint-4"]
    assert _steps({"history": tiny.history(trainer)}) == _steps(uninterrupted)
    assert tiny.digest(trainer.model) == uninterrupted["weights"]


def test_killed_in_the_middle_of_a_step(
    tiny: ModuleType, tight: dict[str, Any], uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, _ = _child({"folder": str(run), "options": tight, "save_steps": 4, "kill_in_step": 6}, tmp_path)
    assert code == -signal.SIGKILL
    assert [path.name for path in run.iterdir()] == ["checkpoint-4"]
    assert list((tmp_path / "scratch").iterdir()) == [], "a scratch file was left"
    trainer = _build(tiny, Trainer, run, tight, max_steps=10)
    trainer.train(resume_from_checkpoint=True)
    assert _steps({"history": tiny.history(trainer)}) == _steps(uninterrupted)
    assert tiny.digest(trainer.model) == uninterrupted["weights"]


def test_a_save_that_fails_leaves_the_one_before(tiny: ModuleType, tight: dict[str, Any], tmp_path: Path) -> None:
    class Fails(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 4:
                raise RuntimeError("as if")
            super()._save_rng_state(output_dir)

    trainer = _build(tiny, Fails, tmp_path / "run", tight, save_strategy="steps", save_steps=2)
    with pytest.raises(RuntimeError, match="as if"):
        trainer.train()
    assert os.listdir(tmp_path / "run") == ["checkpoint-2"]
    # Later saves of the same Trainer go where they belong.
    trainer.save_model(str(tmp_path / "run" / "whole"))
    assert (tmp_path / "run" / "whole" / "model.safetensors").is_file()
    assert trainer._get_output_dir(None) == str(tmp_path / "run")


@pytest.mark.parametrize("fails_in", ["_save_rng_state", "_name_best_checkpoint"])
def test_a_save_that_fails_is_not_the_best_one(
    fails_in: str, tiny: ModuleType, tight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    every_two = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = _build(tiny, Trainer, run, tight, **every_two, load_best_model_at_end=True)
    original = getattr(Trainer, fails_in)

    def full(*args: Any) -> None:
        original(*args)
        if trainer.state.global_step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, fails_in, full)
    with pytest.raises(DiskError):
        trainer.train()
    assert trainer.state.best_global_step == 4, "the second evaluation was the better one"
    assert os.listdir(run) == ["checkpoint-2"]
    assert trainer.state.best_model_checkpoint == str(run / "checkpoint-2")


def test_best_model_rotation_and_state_as_in_the_plain_trainer(
    tiny: ModuleType, tight: dict[str, Any], tmp_path: Path
) -> None:
    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, tight)):
        run = tmp_path / cls.__module__.partition(".")[0]
        trainer = _build(
            tiny,
            cls,
            run,
            config,
            max_steps=6,
            learning_rate=0.02,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=2,
            load_best_model_at_end=True,
        )
        trainer.train()
        states = {
            path.parent.name: json.loads(path.read_text()) for path in run.glob("checkpoint-*/trainer_state.json")
        }
        best = {name: Path(state["best_model_checkpoint"]) for name, state in states.items()}
        assert all(path.parent == run for path in best.values())
        assert Path(trainer.state.best_model_checkpoint).parent == run
        steps = {name: [tiny.history(trainer)[: len(s["log_history"])], s["best_metric"]] for name, s in states.items()}
        runs.append(
            (
                sorted(os.listdir(run)),
                {name: path.name for name, path in best.items()},
                steps,
                Path(trainer.state.best_model_checkpoint).name,
                tiny.history(trainer),
                tiny.digest(trainer.model),
            )
        )
    assert len(runs[0][0]) == 2
    assert runs[0] == runs[1]


def test_only_complete_checkpoints_are_resumed_from(
    tiny: ModuleType, tight: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    trainer = _build(tiny, Trainer, run, tight, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-7")
    (run / "checkpoint-7" / "trainer_state.json").unlink()
    again = _build(tiny, Trainer, run, tight, max_steps=4)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-7 is incomplete: it has \d+ files, and no trainer_state.json"
    ):
        again.train(resume_from_checkpoint=str(run / "checkpoint-7"))
    with pytest.raises(CheckpointError) as refused:
        again.train(resume_from_checkpoint=str(run))
    assert str(refused.value) == (
        f"{run} is not a checkpoint, but holds checkpoint-2. Resume from one of them: {run / 'checkpoint-2'}."
    )
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert "checkpoint-7 is incomplete (no trainer_state.json); it is not resumed from." in caplog.text
    shutil.rmtree(run / "checkpoint-2")
    with pytest.raises(
        CheckpointError,
        match=r"cannot resume: all 1 checkpoints in .* are incomplete \(no trainer_state.json\), such as checkpoint-7",
    ):
        again.train(resume_from_checkpoint=True)
    shutil.rmtree(run / "checkpoint-7")
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        again.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("first", ["plain", "paged"])
def test_runs_with_and_without_pages_resume_one_another(
    first: str, uninterrupted: dict[str, Any], tiny: ModuleType, tight: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    plain, paged = (transformers.Trainer, None), (Trainer, tight)
    (cls, options), (other, others) = (plain, paged) if first == "plain" else (paged, plain)
    changes = {"max_steps": 10, "save_strategy": "steps", "save_steps": 4}
    _build(tiny, cls, run, options, {"callbacks": [_Ends(4)]}, **changes).train()
    if first == "paged":
        assert not (run / "checkpoint-4" / "optimizer.pt").exists(), "nothing is pickled unasked"
        write_plain_state(run / "checkpoint-4", run / "checkpoint-4" / "optimizer.pt")
    resumed = _build(tiny, other, run, others, **changes)
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert _steps({"history": tiny.history(resumed)}) == _steps(uninterrupted)
    assert tiny.digest(resumed.model) == uninterrupted["weights"]


@pytest.mark.parametrize("last", ["plain", "ours"])
def test_of_two_states_in_a_checkpoint_the_last_counts(
    last: str, tiny: ModuleType, tight: dict[str, Any], tmp_path: Path
) -> None:
    """Runs of the same name, with other data, so that the state of each is its own."""
    run = tmp_path / "run"
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    kinds = [(Trainer, tight), (transformers.Trainer, None)]
    for cls, options in kinds if last == "plain" else reversed(kinds):
        trainer = _build(tiny, cls, run, options, {"callbacks": [_Ends(2)]}, **changes)
        trainer.train_dataset = tiny.data()[:: 1 if cls is Trainer else -1]
        trainer.train()
    names = os.listdir(run / "checkpoint-2")
    assert ("optimizer.json" in names, "optimizer.pt" in names) == (True, last == "plain")
    ours = _build(tiny, Trainer, run, tight, **changes, save_total_limit=2)
    ours.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    if last == "ours":
        write_plain_state(run / "checkpoint-2", run / "checkpoint-2" / "optimizer.pt")
    plain = _build(tiny, transformers.Trainer, run, **changes)
    plain.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert tiny.digest(ours.model) == tiny.digest(plain.model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 4}, "layers.3"),
        ({"num_hidden_layers": 2}, "layers.2"),
        ({"intermediate_size": 96}, "mlp"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    changes: dict[str, Any], named: str, tiny: ModuleType, tight: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    _build(tiny, Trainer, run, tight, max_steps=1, save_strategy="steps", save_steps=1).train()
    trainer = _build(tiny, Trainer, run, tight, {"model": tiny.model(**changes)}, max_steps=2)
    before = tiny.digest(trainer.model)
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")):
        trainer.train(resume_from_checkpoint=True)
    assert tiny.digest(trainer.model) == before


class _Headed(torch.nn.Module):
    """Its head is all that the optimizer has."""

    # The stock Trainer asks for it where weights are missing.
    _keys_to_ignore_on_save = None

    def __init__(self, *, more: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(512, 64)
        self.head = torch.nn.Linear(64, 512)
        self.more = torch.nn.Linear(64, 64) if more else None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        logits = self.head(hidden if self.more is None else hidden + self.more(hidden))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class _OfTheHead:
    """Makes an optimizer over the head alone; ours to come (`given`), or the Trainer's to make."""

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.head.parameters(), lr=1e-2)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer


@pytest.mark.parametrize("made", ["given", "in create_optimizer"])
@pytest.mark.parametrize("more", [False, True], ids=["the same model", "one with more modules"])
def test_an_optimizer_over_a_part_resumes_also_where_weights_are_new(
    more: bool, made: str, tiny: ModuleType, tight: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for host in (transformers.Trainer, Trainer):
        cls = host if made == "given" else type("OfTheHead", (_OfTheHead, host), {})
        for steps, last in ((2, False), (4, True)):
            model = _Headed(more=more and last)
            given: dict[str, Any] = {"model": model}
            if made == "given":
                given["optimizers"] = (torch.optim.AdamW(model.head.parameters(), lr=1e-2), None)
            options = tight if host is Trainer else None
            changes = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2}
            trainer = _build(tiny, cls, tmp_path / host.__module__.partition(".")[0], options, given, **changes)
            trainer.train(resume_from_checkpoint=last)
        found.append((tiny.digest(trainer.model), tiny.history(trainer)))
    assert found[0] == found[1]


def test_save_only_model(
    tiny: ModuleType, tight: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, tight)):
        run = tmp_path / cls.__module__.partition(".")[0]
        changes = {"save_only_model": True, "save_strategy": "steps", "save_steps": 1}
        _build(tiny, cls, run, config, max_steps=1, **changes).train()
        trainer = _build(tiny, cls, run, config, max_steps=2, **changes)
        trainer.train(resume_from_checkpoint=True)
        runs.append((sorted({*os.listdir(run / "checkpoint-2"), MANIFEST_NAME}), tiny.digest(trainer.model)))
    assert runs[0] == runs[1]
    assert "checkpoint-1 has no optimizer state: only its weights are loaded, and training continues" in caplog.text


def test_without_a_scheduler_the_optimizer_begins_anew_as_well(
    tiny: ModuleType, tight: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the stock Trainer, which takes the two together or neither; some delete the one to get a new schedule."""
    runs = []
    for cls, config in ((transformers.Trainer, None), (Trainer, tight)):
        run = tmp_path / cls.__module__.partition(".")[0]
        changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        _build(tiny, cls, run, config, **changes).train()
        (run / "checkpoint-2" / "scheduler.pt").unlink()
        resumed = _build(tiny, cls, run, config and {**config, "checkpoint_hashes": False}, **changes)
        resumed.train(resume_from_checkpoint=str(run / "checkpoint-2"))
        runs.append((_steps({"history": tiny.history(resumed)}), tiny.digest(resumed.model)))
    assert runs[0] == runs[1]
    assert "checkpoint-2 has no scheduler.pt: only its weights are loaded" in caplog.text


def test_uploads_begin_when_the_checkpoint_has_its_name(
    tiny: ModuleType, tight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = []

    def push(self: Any, folder: str) -> None:
        pushed.append((folder, sorted(os.listdir(folder))))

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    trainer = _build(tiny, Trainer, tmp_path / "run", tight, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.args.push_to_hub = True
    monkeypatch.setattr(transformers.Trainer, "push_to_hub", lambda *args, **kwargs: None)
    trainer.train()
    assert [Path(folder).name for folder, _ in pushed] == ["checkpoint-1", "checkpoint-2"]
    assert all(Path(folder).parent == tmp_path / "run" and "trainer_state.json" in names for folder, names in pushed)


def test_fused_experts_resume_exactly(tiny: ModuleType, tmp_path: Path) -> None:
    def mixtral() -> MixtralForCausalLM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": tiny.VOCABULARY}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads))

    options = {"host_memory": "1MiB", "page_size": 4096, "disk": str(tmp_path)}
    plain = _build(tiny, transformers.Trainer, tmp_path / "plain", given={"model": mixtral()}, max_steps=4)
    plain.train()
    run = tmp_path / "run"
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    _build(tiny, Trainer, run, options, {"model": mixtral()}, **changes).train()
    shutil.rmtree(run / "checkpoint-4")
    resumed = _build(tiny, Trainer, run, options, {"model": mixtral()}, **changes)
    resumed.train(resume_from_checkpoint=True)
    assert engine_of(resumed.model).pool.stats.evictions > 0
    assert tiny.digest(resumed.model) == tiny.digest(plain.model)
    # A checkpoint of the plain Trainer as well, which itself leaves the experts as they were.
    stock = tmp_path / "stock"
    ends = {"model": mixtral(), "callbacks": [_Ends(2)]}
    _build(tiny, transformers.Trainer, stock, given=ends, **changes).train()
    resumed = _build(tiny, Trainer, stock, options, {"model": mixtral()}, **changes)
    resumed.train(resume_from_checkpoint=str(stock / "checkpoint-2"))
    assert tiny.digest(resumed.model) == tiny.digest(plain.model)


def test_adapters_resume_and_load_the_best(tiny: ModuleType, tight: dict[str, Any], tmp_path: Path) -> None:
    def lora() -> Any:
        torch.manual_seed(0)
        base = tiny.model()
        torch.manual_seed(0)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))

    changes = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    changes |= {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.05}
    plain = _build(tiny, transformers.Trainer, tmp_path / "plain", given={"model": lora()}, **changes)
    plain.train()
    run = tmp_path / "run"
    first = _build(tiny, Trainer, run, tight, {"model": lora()}, **changes)
    first.train()
    assert tiny.digest(first.model) == tiny.digest(plain.model)
    assert tiny.history(first) == tiny.history(plain)
    shutil.rmtree(run / "checkpoint-4")
    resumed = _build(tiny, Trainer, run, tight, {"model": lora()}, **changes)
    resumed.train(resume_from_checkpoint=True)
    assert _steps({"history": tiny.history(resumed)}) == _steps({"history": tiny.history(plain)})
    assert tiny.digest(resumed.model) == tiny.digest(plain.model)


def test_a_tied_model_saves_as_the_plain_trainer_does(tiny: ModuleType, tight: dict[str, Any], tmp_path: Path) -> None:
    saved = []
    for cls, config in ((transformers.Trainer, None), (Trainer, tight)):
        folder = tmp_path / cls.__module__.partition(".")[0]
        model = tiny.model(tie_word_embeddings=True)
        trainer = _build(tiny, cls, folder, config, {"model": model}, max_steps=2)
        trainer.train()
        trainer.save_model()
        saved.append((folder / "model.safetensors").read_bytes())
    assert saved[0] == saved[1]


class _Loads(torch.nn.Module):
    """A model whose buffer grows, and that knows how to load it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("seen", torch.empty(0))

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.seen = torch.cat([self.seen, x.detach()[:, 0]])
        return {"loss": self.layer(x).square().mean()}


def test_a_model_that_loads_its_state_in_its_own_way(tiny: ModuleType, tight: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(8), "labels": torch.zeros(1)} for _ in range(16)]
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run = tmp_path / "run"

    def build() -> Any:
        torch.manual_seed(1)
        args = tiny.arguments(run, **changes)
        return Trainer(model=_Loads(), args=args, train_dataset=rows, ptm_config=tight)

    whole = build()
    whole.train()
    resumed = build()
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert torch.equal(resumed.model.seen, whole.model.seen)
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)


class _Notes(transformers.TrainerCallback):
    """Puts files where the checkpoint will be, before it is saved."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        (folder / "predictions").mkdir(parents=True)
        (folder / "predictions" / "all.json").write_text("{}")
        (folder / "model.safetensors").write_text("of another time")


def test_files_that_others_put_into_a_checkpoint_stay(tiny: ModuleType, tight: dict[str, Any], tmp_path: Path) -> None:
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    found = {}
    for name, cls, options in (("plain", transformers.Trainer, None), ("paged", Trainer, tight)):
        trainer = _build(tiny, cls, tmp_path / name, options, {"callbacks": [_Notes()]}, **changes)
        trainer.train()
        saved = tmp_path / name / "checkpoint-2"
        assert [path.name for path in (tmp_path / name).iterdir()] == ["checkpoint-2"]
        assert (saved / "predictions" / "all.json").read_text() == "{}"
        assert (saved / "model.safetensors").stat().st_size > 1000
        ours = {path.name for path in saved.iterdir() if path.name.startswith("optimizer")} | {MANIFEST_NAME}
        found[name] = set(os.listdir(saved)) - ours
    assert found["paged"] == found["plain"]


@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3, 9])
@pytest.mark.parametrize("best", [None, 2, 4, 8])
def test_the_same_checkpoints_are_removed_as_by_the_stock_trainer(
    limit: int | None, best: int | None, tiny: ModuleType, tmp_path: Path
) -> None:
    left = []
    for name in ("stock", "ours"):
        # The highest number is not the newest after a rollback.
        for age, step in enumerate((2, 8, 4, 6)):
            folder = tmp_path / name / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            os.utime(folder, (1000 + age, 1000 + age))
        chosen = None if best is None else str(tmp_path / name / f"checkpoint-{best}")
        if name == "stock":
            rotate_checkpoints(str(tmp_path / name), limit, chosen, use_mtime=True)
        else:
            trainer = _build(tiny, Trainer, tmp_path / name, tiny.budget("roomy", tmp_path), save_total_limit=limit)
            trainer.state.best_model_checkpoint = chosen
            trainer._remove_surplus(tmp_path / name)
        left.append(sorted(path.name for path in (tmp_path / name).iterdir()))
    assert left[0] == left[1]


def test_a_checkpoint_that_cannot_be_removed_ends_no_training(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        (tmp_path / "run" / f"checkpoint-{step}" / "stage-1-of-2").mkdir(parents=True)
    trainer = _build(tiny, Trainer, tmp_path / "run", tiny.budget("roomy", tmp_path), save_total_limit=1)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr("shutil.rmtree", busy)
    trainer._remove_surplus(tmp_path / "run")
    assert "is one more than save_total_limit, and cannot be removed: [Errno 16] busy" in caplog.text
    assert len([path for path in (tmp_path / "run").iterdir() if path.name.startswith("checkpoint")]) == 1
