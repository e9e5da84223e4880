"""What a pipeline cannot do is refused by name, before anything is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.accelerate.pipelines import PipelineAccelerator
from ptm_accel.integrations.transformers.pipelines import refuse_with_pipeline

import ptm_accel
from ptm_accel.config import PTMConfig
from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.pipeline.ranks import Ranks
from ptm_accel.pipeline.stage import Stage
from ptm_accel.pipeline.staged import StagedModel
from tests.pipeline.models import VOCABULARY, build
from tests.pipeline.test_trained import CHILD, ENVIRONMENT, staged
from tests.prepared import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Ranks]:
    """A pipeline of one stage, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Ranks(1, CPU)
    dist.destroy_process_group()


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(1))


def test_a_staged_model_is_called_as_ever(alone: Ranks) -> None:
    """Its loss and gradients, scaled as the caller scales the loss, are those of the model."""
    plain, model = build("llama"), build("llama")
    StagedModel(model, alone, CPU)
    given = {"input_ids": ids(), "labels": ids()}
    loss = model(**given).loss
    (loss * 3).backward()
    wanted = plain(**given, num_items_in_batch=torch.tensor(94)).loss
    (wanted * 3).backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        # The model's own loss is in float32.
        assert torch.allclose(param.grad, other.grad, rtol=1e-4, atol=1e-8), name
    model.zero_grad()
    model(**given, num_items_in_batch=188).loss.backward()
    assert torch.allclose(model.lm_head.weight.grad * 6, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-8)
    with torch.no_grad():
        assert model(**given)[0].item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": None}, "it was given no labels"),
        ({"input_ids": None}, "it was given no input_ids"),
        ({"position_ids": torch.arange(48)[None]}, r"it was given position_ids \(packed sequences among them\)"),
        ({"shift_labels": ids()}, "it was given shift_labels"),
        ({"inputs_embeds": torch.zeros(2, 48, 32)}, "it was given inputs_embeds"),
        ({"attention_mask": torch.tensor([[0] * 4 + [1] * 44] * 2)}, "pad on the right"),
        ({"attention_mask": torch.ones(2, 1, 48, 48)}, "pad on the right"),
    ],
)
def test_batches(given: dict[str, Any], message: str, alone: Ranks) -> None:
    model = build("llama")
    StagedModel(model, alone, CPU)
    with pytest.raises(UnsupportedError, match=message):
        model(**{"input_ids": ids(), "labels": ids(), **given})


def test_what_only_the_last_stage_has(alone: Ranks, tmp_path: Path) -> None:
    model = build("llama")
    StagedModel(model, alone, CPU)
    output = model(input_ids=ids(), labels=ids())
    for read in (lambda: output.logits, lambda: output["logits"], lambda: output[1]):
        with pytest.raises(UnsupportedError, match="returns its loss alone, and .* was asked for"):
            read()
    assert not hasattr(output, "_private")
    with pytest.raises(UnsupportedError, match=r"stage 0 of 1, which is not the whole model; call trainer.save_model"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t.args, "label_smoothing_factor", 0.1), "label_smoothing_factor"),
        (lambda t: setattr(t, "compute_loss_func", print), "compute_loss_func"),
        (lambda t: setattr(t, "compute_metrics", print), r"compute_metrics \(it reads logits\)"),
        (lambda t: setattr(t.args, "torch_compile", True), "torch_compile"),
        (lambda t: setattr(t, "model_init", print), "model_init"),
        (lambda t: setattr(t.args, "auto_find_batch_size", True), "auto_find_batch_size"),
        (lambda t: setattr(t.args, "neftune_noise_alpha", 5.0), r"NEFTune \(neftune_noise_alpha\)"),
        (lambda t: setattr(t.model, "peft_config", {}), "a PEFT model"),
        (lambda t: setattr(t, "prediction_step", print), "a Trainer with a prediction_step of its own"),
    ],
)
def test_the_trainer(change: Any, message: str, tmp_path: Path) -> None:
    trainer = transformers.Trainer(build("llama"), transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    refuse_with_pipeline(trainer)
    change(trainer)
    with pytest.raises(UnsupportedError, match=f"leave out {message}, or pipeline"):
        refuse_with_pipeline(trainer)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pipeline": 1}, ConfigError, r"pipeline.stages: got 1; write how many stages there are, at least 2"),
        ({"pipeline": "two"}, ConfigError, r"pipeline.stages: got 'two'"),
        ({"pipeline": True}, ConfigError, r"pipeline.stages: got True"),
        ({"pipeline": {}}, ConfigError, "pipeline: it has no stages"),
        ({"pipeline": {"stage": 2}}, ConfigError, "pipeline: unknown key 'stage'; did you mean 'stages'"),
        ({"pipeline": 2, "pseudo_to_real": "auto"}, ConfigError, "pipeline: .* with pseudo_to_real; leave"),
        ({"pipeline": 2, "token_slices": 4}, ConfigError, "pipeline: .* with token_slices; leave"),
        ({"pipeline": 2}, ConfigError, "2 stages, and 1 processes; start 2 of them"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        ptm_accel.Trainer(
            build("llama"), transformers.TrainingArguments(str(tmp_path), use_cpu=True), ptm_config=options
        )


@pytest.mark.parametrize("name", ["FSDP", "DeepSpeed"])
def test_a_pipeline_with_other_plugins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(UnsupportedError, match=f"{name} is switched on"):
        PipelineAccelerator(cpu=True, ptm_config=PTMConfig(pipeline=2))


def test_nccl_without_gpus(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    with pytest.raises(ConfigError, match="talk by NCCL, which needs a GPU in each"):
        Ranks(1, CPU)


def test_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="a pipeline is trained by the Trainer"):
        PTMAccelerator(cpu=True, ptm_config=PTMConfig(pipeline=2))
    monkeypatch.setattr(PipelineAccelerator, "scaler", object(), raising=False)
    monkeypatch.setattr(PTMAccelerator, "__init__", lambda self, **given: None)
    with pytest.raises(UnsupportedError, match="with fp16 each stage would skip other steps"):
        PipelineAccelerator(cpu=True, ptm_config=PTMConfig(pipeline=2))


def test_reentrant_checkpoints(alone: Ranks) -> None:
    model: Any = build("llama")
    StagedModel(model, alone, CPU)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UnsupportedError, match="re-entrant checkpoints have no graph"):
        model(input_ids=ids(), labels=ids())


class OfTheirOwn(transformers.LlamaForCausalLM):
    """Somebody's own, whose forward may be as well."""


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mistral", lambda m: setattr(m.config, "sliding_window", 8), "windows of 8 tokens"),
        ("llama", lambda m: setattr(m, "__class__", OfTheirOwn), "its forward is not that of transformers"),
        ("llama", lambda m: setattr(m, "forward", m.forward), "its forward is not that of transformers"),
        ("llama", lambda m: setattr(m, "loss_function", print), "its loss_function is not that of causal"),
        ("llama", lambda m: m.config.rope_parameters.update(rope_type="dynamic"), "rope_type dynamic"),
        ("llama", lambda m: m.config.rope_parameters.update(rope_type="longrope"), "rope_type longrope"),
        ("llama", lambda m: m.set_output_embeddings(None), "it has no head that predicts tokens"),
    ],
)
def test_models(kind: str, change: Any, message: str, alone: Ranks) -> None:
    model: Any = build(kind)
    change(model)
    with pytest.raises(UnsupportedError, match=rf"{message}.*leave pipeline out"):
        StagedModel(model, alone, CPU)


def test_parts_that_share_parameters() -> None:
    model: Any = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(UnsupportedError, match=r"model.embed_tokens.weight and lm_head.weight are one parameter"):
        Stage(model, 0, 2)


def test_forwards_and_their_backwards(alone: Ranks) -> None:
    """Losses of several forwards may be added up; each has one backward."""
    plain, model = build("llama"), build("llama")
    StagedModel(model, alone, CPU)
    first, second = ({"input_ids": part, "labels": part} for part in (ids(), ids().flip(0, 1)))
    loss = model(**first).loss + 2 * model(**second).loss
    with torch.no_grad():
        model(**first)
    loss.backward()
    (plain(**first).loss + 2 * plain(**second).loss).backward()
    wanted, found = plain.lm_head.weight.grad, model.lm_head.weight.grad
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-8)
    loss = model(**first).loss
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="a second backward through the same forward"):
        loss.backward()


def test_measuring_loses_no_gradients(alone: Ranks) -> None:
    """Of a step whose first batch is too short to be measured, the second one is not measured either."""
    plain, model = build("llama"), build("llama")
    stage = StagedModel(model, alone, CPU)
    long = ids().repeat(1, 2)
    stage.measure_first(model, lambda: any(p.grad is not None for p in model.parameters()), model.zero_grad)
    for step, batches in enumerate([(ids(), long), (long, ids())]):
        for batch in batches:
            for each in (plain, model):
                each(input_ids=batch, labels=batch).loss.backward()
        assert bool(stage._cutting._costs) == bool(step)
        assert torch.allclose(model.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-8)
        plain.zero_grad()
        model.zero_grad()


def test_stages_are_measured_as_they_will_run(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").float()
    stage = StagedModel(model, alone, CPU)
    seen = []
    forward = stage._pipeline.stage.forward

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return forward(*args, **kwargs)

    monkeypatch.setattr(stage._pipeline.stage, "forward", spy)
    stage.measure_first(model, lambda: False, model.zero_grad, lambda: torch.autocast("cpu", torch.bfloat16))
    long = ids().repeat(1, 2)
    model(input_ids=long, labels=long)
    # The last ones are of the batch itself, whose caller has no autocast here.
    assert seen[0]
    assert seen.count(True) >= 4
    assert not seen[-1]


def test_a_stage_with_nothing_to_train(alone: Ranks) -> None:
    accelerator = object.__new__(PipelineAccelerator)
    accelerator.ranks = alone
    with pytest.raises(UnsupportedError, match="stage 0 of 1 has nothing to train: all its parameters are frozen"):
        accelerator.prepare_optimizer(torch.optim.SGD([{"params": []}], lr=1.0))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"differs": True}, "the 2 processes of a pipeline have different batches"),
        pytest.param(
            {"fails": "save"}, ", and another process is not: all of them take part", marks=pytest.mark.process
        ),
        pytest.param({"predicts": True}, "returns its loss alone, and no predictions", marks=pytest.mark.process),
        pytest.param(
            {"options": {"pipeline": {"stages": 4}}, "count": 4},
            "4 stages of 3 layers; set it to at most 3",
            marks=pytest.mark.process,
        ),
    ],
)
def test_in_processes(asked: dict[str, Any], message: str, tmp_path: Path) -> None:
    for run in staged(tmp_path, 2, kind="llama", **asked):
        assert run.code != 0
        assert message in run.err


@pytest.mark.process
def test_as_many_processes_as_stages_times_replicas(tmp_path: Path) -> None:
    asked = json.dumps({"kind": "llama", "out": str(tmp_path), "options": {"pipeline": 2}})
    for run in run_ranks(CHILD, asked, count=3, cwd=tmp_path, env=ENVIRONMENT):
        assert run.code != 0
        assert "pipeline.stages: 2 stages, and 3 processes; start 2 of them, or a multiple" in run.err
