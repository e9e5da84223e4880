"""TRL's Trainers on pages against the plain ones, bit for bit, at the least budget: pages of the model must move."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from ptm_accel.integrations.transformers import PTMTrainerMixin, ptm_trainer
from ptm_accel.integrations.trl import refuse_arguments
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl.trainer import utils as trl_utils

import ptm_accel
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import UnsupportedError
from ptm_accel.plain_mode import PlainMode
from tests.integrations.least import least_options
from tests.plain_loop import same_bits

SENTENCE = "the quick brown fox jumps over the lazy dog while many people look at the sky and wonder what comes next"
WORDS = SENTENCE.split()
MEASURED = ("ptm_", "time", "per_second")


def phrase(start: int, count: int) -> str:
    return " ".join((WORDS * 2)[start : start + count])


TEXTS = [{"text": phrase(i, 12)} for i in range(16)]
PAIRS = [{"prompt": f"{phrase(i, 4)} ", "chosen": phrase(i + 4, 5), "rejected": phrase(i + 1, 4)} for i in range(16)]
JUDGED = [{"prompt": f"{phrase(i, 4)} ", "completion": phrase(i + 4, 5), "label": i % 2 == 0} for i in range(16)]
PROMPTS = [{"prompt": phrase(i, 5)} for i in range(16)]


def variety(completions: list[str], **rest: Any) -> list[float]:
    """A reward."""
    return [float(len(set(completion))) for completion in completions]


@dataclass(frozen=True)
class Case:
    """A Trainer of TRL and what it is given.

    Attributes:
        trainer: its class.
        config: the class of its arguments.
        rows: its data.
        arguments: more of its arguments.
        lora: whether it makes adapters.
        reference: whether it is given a reference model.
        given: what it is given besides.
    """

    trainer: Any
    config: Any
    rows: list[dict[str, Any]]
    arguments: tuple[tuple[str, Any], ...] = ()
    lora: bool = False
    reference: bool = False
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def models(self) -> int:
        """How many are on pages: the one that is trained, and its reference where there is one during training."""
        arguments = dict(self.arguments)
        alone = self.lora or arguments.get("precompute_ref_log_probs", False)
        return 2 if not alone and (self.trainer in (trl.DPOTrainer, trl.KTOTrainer) or arguments.get("beta")) else 1

    @property
    def auto_cls(self) -> Any:
        return AutoModelForSequenceClassification if self.trainer is trl.RewardTrainer else AutoModelForCausalLM

    @property
    def options(self) -> dict[str, Any]:
        return {"num_labels": 1, "pad_token_id": 0} if self.trainer is trl.RewardTrainer else {}


_SFT = functools.partial(Case, trl.SFTTrainer, trl.SFTConfig, TEXTS)
_DPO = functools.partial(Case, trl.DPOTrainer, trl.DPOConfig, PAIRS)
_KTO = functools.partial(Case, trl.KTOTrainer, trl.KTOConfig, JUDGED)
_REWARD = functools.partial(Case, trl.RewardTrainer, trl.RewardConfig, PAIRS)
_SAMPLED = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
_GRPO = functools.partial(Case, trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, given=(("reward_funcs", variety),))

CASES = {
    "sft": _SFT(),
    "sft_accumulated": _SFT(arguments=(("gradient_accumulation_steps", 2),)),
    "sft_lora_accumulated": _SFT(
        lora=True, arguments=(("gradient_accumulation_steps", 3), ("gradient_checkpointing", True))
    ),
    "sft_autocast": _SFT(arguments=(("bf16", True),)),
    "sft_lora": _SFT(lora=True),
    "sft_lora_checkpointed": _SFT(lora=True, arguments=(("gradient_checkpointing", True),)),
    "dpo": _DPO(),
    "dpo_reference": _DPO(reference=True),
    "dpo_precomputed": _DPO(arguments=(("precompute_ref_log_probs", True),)),
    "dpo_lora": _DPO(lora=True),
    "dpo_accumulated": _DPO(arguments=(("gradient_accumulation_steps", 2),)),
    "dpo_lora_accumulated": _DPO(lora=True, arguments=(("gradient_accumulation_steps", 3),)),
    "kto": _KTO(),
    "kto_lora": _KTO(lora=True),
    "reward": _REWARD(),
    "reward_lora": _REWARD(lora=True),
    "grpo": _GRPO(arguments=tuple(_SAMPLED.items())),
    "grpo_reference": _GRPO(arguments=(*_SAMPLED.items(), ("beta", 0.1))),
    "grpo_lora": _GRPO(arguments=(*_SAMPLED.items(), ("beta", 0.1)), lora=True),
}

ROWS = [
    ("sft", "class"),
    ("sft", "enabled"),
    ("sft", "read onto pages"),
    ("sft_accumulated", "class"),
    ("sft_autocast", "class"),
    ("sft_lora", "enabled"),
    ("sft_lora", "read onto pages"),
    ("sft_lora_checkpointed", "read onto pages"),
    ("dpo", "class"),
    ("dpo", "enabled"),
    ("dpo_reference", "read onto pages"),
    ("dpo_precomputed", "read onto pages"),
    ("dpo_lora", "class"),
    ("dpo_lora", "read onto pages"),
    ("reward", "class"),
    ("reward", "enabled"),
    ("reward_lora", "read onto pages"),
    ("grpo", "class"),
    ("grpo", "enabled"),
    ("grpo_reference", "class"),
    ("grpo_lora", "read onto pages"),
]
"""Each Trainer, and the ways to have it on pages."""


@dataclass(frozen=True)
class Bench:
    """A saved model with its tokenizer, and the least options for it."""

    tiny: ModuleType
    base: Path
    tokenizer: Any
    ptm_options: dict[str, Any]

    def read(self, case: Case, paged: bool) -> Any:
        if paged:
            return ptm_accel.from_pretrained(case.auto_cls, self.base, self.options_of(case), **case.options)
        return case.auto_cls.from_pretrained(self.base, **case.options)

    def options_of(self, case: Case) -> dict[str, Any]:
        """The least options for all models of a case, which share them."""
        return {**self.ptm_options, "host_memory": self.ptm_options["host_memory"] * case.models}

    def run(self, case: Case, way: str, folder: Path, ptm_options: dict[str, Any] | None = None) -> Any:
        """The Trainer after a short training; under the least options if others are not given."""
        torch.manual_seed(5)
        paged = way == "read onto pages"
        fixed = {"max_steps": 3, "learning_rate": 1e-2, "disable_tqdm": True, "gradient_checkpointing": False}
        options = {**fixed, "bf16": False, **dict(case.arguments)}
        if case.trainer is not trl.GRPOTrainer:
            options["max_length"] = 64
        given: dict[str, Any] = {
            "model": self.read(case, paged),
            "args": self.tiny.arguments(folder, case.config, **options),
            "train_dataset": Dataset.from_list(case.rows),
            "processing_class": self.tokenizer,
            **dict(case.given),
        }
        if case.lora:
            kind = "SEQ_CLS" if case.trainer is trl.RewardTrainer else "CAUSAL_LM"
            given["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type=kind)
        if case.reference:
            given["ref_model"] = self.read(case, paged)
        if way == "plain":
            trainer = case.trainer(**given)
        elif way == "enabled":
            with ptm_accel.enable(self.options_of(case)):
                trainer = case.trainer(**given)
        else:
            trainer = ptm_trainer(case.trainer)(ptm_config=ptm_options or self.options_of(case), **given)
        assert isinstance(trainer, PTMTrainerMixin) == (way != "plain")
        trainer.train()
        return trainer


@pytest.fixture(scope="module")
def bench(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    base = tmp_path_factory.mktemp("base")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(WORDS, vocab_size=300, special_tokens=["<pad>", "<end>"], show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.save_pretrained(base)
    tiny.model(num_hidden_layers=2).save_pretrained(base)
    return Bench(tiny, base, fast, least_options(base, tmp_path_factory.mktemp("scratch")))


def figures(trainer: transformers.Trainer) -> list[dict[str, Any]]:
    """The log without what is measured."""
    log = trainer.state.log_history
    return [{k: v for k, v in line.items() if not any(part in k for part in MEASURED)} for line in log]


@pytest.fixture(scope="module")
def plain(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, ...]]:
    """The plain Trainer's outcome for a case, run once: its log, and the weights before and after."""

    @functools.cache
    def run(name: str) -> tuple[Any, ...]:
        trainer = bench.run(CASES[name], "plain", tmp_path_factory.mktemp("plain"))
        assert engine_of(trainer.model) is None
        return str(figures(trainer)), bench.tiny.weights(trainer.model)

    return run


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    ptm_accel.disable()


def engines(trainer: Any) -> list[Engine]:
    found = [engine_of(model) for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    return [engine for engine in found if engine is not None]


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("name", "way"), ROWS, ids=lambda value: value.replace(" ", "_"))
def test_same_numbers_as_the_plain_trainer(
    name: str, way: str, bench: Bench, plain: Callable[[str], tuple[Any, ...]], tmp_path: Path
) -> None:
    log, weights = plain(name)
    trainer = bench.run(CASES[name], way, tmp_path)
    assert str(figures(trainer)) == log
    assert log.count("'loss'") == 3
    assert bench.tiny.same(bench.tiny.weights(trainer.model), weights)
    start = bench.tiny.weights(bench.read(CASES[name], paged=False))
    moved = [key for key, value in weights.items() if key not in start or not torch.equal(value, start[key])]
    assert moved
    on_pages = engines(trainer)
    assert len(on_pages) == CASES[name].models
    given = bench.options_of(CASES[name])["host_memory"]
    [budget] = {engine.pool.budget for engine in on_pages}
    assert budget.peak_bytes <= budget.capacity_bytes == given
    for engine in on_pages:
        assert engine.pool.stats.evictions > 0
        engine.check_integrity()
    for engine in on_pages:
        engine.close()


@pytest.mark.parametrize("name", ["sft_accumulated", "sft_lora_accumulated", "dpo_accumulated", "dpo_lora_accumulated"])
def test_micro_batches_by_layer_have_the_numbers_of_the_plain_trainer(
    name: str, bench: Bench, plain: Callable[[str], tuple[Any, ...]], tmp_path: Path
) -> None:
    log, weights = plain(name)
    options = {**bench.options_of(CASES[name]), "micro_batches": "by_layer"}
    trainer = bench.run(CASES[name], "class", tmp_path, options)
    assert trainer._by_layer.order, "micro-batches ran one by one"
    assert str(figures(trainer)) == log
    assert bench.tiny.same(bench.tiny.weights(trainer.model), weights)
    for engine in engines(trainer):
        engine.check_integrity()
        engine.close()


FITS = {"lora": 2 << 20, "full": 3 << 20, "with a reference": 9 << 19}
"""Bytes in which all fits, while a layer is several groups."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["dpo_lora", "dpo", "dpo_precomputed", "kto_lora", "kto", "grpo_lora", "grpo"])
@pytest.mark.parametrize("budget", ["fits", "half", "least"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_layers_are_recomputed_as_in_the_plain_trainer(
    reentrant: bool, budget: str, name: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters, a forward with these off comes between each forward and its backward."""
    checkpoints = (("gradient_checkpointing", True), ("gradient_checkpointing_kwargs", {"use_reentrant": reentrant}))
    case = dataclasses.replace(CASES[name], arguments=(*CASES[name].arguments, *checkpoints))
    plain = bench.run(case, "plain", tmp_path / "plain")
    ptm_options = bench.options_of(case)
    fits = FITS["lora" if case.lora else "full" if case.models == 1 else "with a reference"]
    ptm_options["host_memory"] = {"fits": fits, "half": fits * 2 // 5, "least": ptm_options["host_memory"]}[budget]
    begins: list[PlainMode] = []
    begin = PlainMode._begin
    monkeypatch.setattr(PlainMode, "_begin", lambda mode, *given: (begins.append(mode), begin(mode, *given)))
    trainer = bench.run(case, "class", tmp_path, ptm_options)
    assert str(figures(trainer)) == str(figures(plain))
    assert bench.tiny.same(bench.tiny.weights(trainer.model), bench.tiny.weights(plain.model))
    # It is not entered beside another model.
    assert bool(begins) == (budget == "fits" and case.models == 1)
    on_pages = engines(trainer)
    assert sum(engine.pool.stats.evictions for engine in on_pages) > 0 or budget == "fits"
    layer = {slot.value.block for slot in on_pages[0].slots if "layers.1." in slot.name and slot.group.movable}
    assert len(layer) > 1
    for engine in on_pages:
        engine.check_integrity()
        engine.close()


@pytest.mark.skipif(not hasattr(trl_utils, "add_fused_lm_head"), reason="this TRL has no fused head")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_a_fused_head_finds_its_weight_in_forward_and_backward(
    autocast: bool, tied: bool, tiny: ModuleType, tmp_path: Path
) -> None:
    """It never calls `lm_head`, but reads its weight in the model's forward, and again in backward."""
    labels = tiny.data(2)[0]["input_ids"][None]
    tiny.model(tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    ptm_options = least_options(tmp_path / "base", tmp_path)

    def loss_of(model: Any) -> torch.Tensor:
        trl_utils.add_fused_lm_head(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model.train()(input_ids=labels, labels=labels, fused_lm_head=True)
        loss: torch.Tensor = out.loss
        return loss

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = loss_of(theirs)
    expected.backward()
    ours = ptm_accel.from_pretrained(AutoModelForCausalLM, tmp_path / "base", ptm_options)
    called: list[object] = []
    ours.lm_head.register_forward_hook(lambda *args: called.append(args))
    loss = loss_of(ours)
    assert loss.item() == expected.item()
    engine = engine_of(ours)
    assert engine is not None
    for slot in engine.slots:
        if slot.value.block in engine.pool.eviction:
            engine.pool.admission.evict(slot.value.block)
    engine.pool.admission.released.collect()
    assert engine.pool.admission.released.nbytes == 0
    loss.backward()
    assert not called
    assert engine.gradients is not None
    names = dict(theirs.named_parameters())
    assert {grad.slot.name for grad in engine.gradients.present()} == set(names)
    for grad in engine.gradients.present():
        assert grad.value is not None
        gradient = names[grad.slot.name].grad
        assert gradient is not None
        assert same_bits(engine.pages.executor.snapshot(grad.value), gradient), grad.slot.name
    engine.zero_grad()
    engine.close()


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (
            "sync_ref_model",
            "sync_ref_model=True does not work on pages: it changes all parameters of the reference model in place, "
            "which are on pages. Please leave it out; the reference model is then the one that training began with.",
        ),
        (
            "use_vllm",
            "use_vllm=True does not work on pages: it sends all parameters from memory to vLLM after each step, and "
            "they are on pages. Please leave it out; completions are then generated by the model on its pages.",
        ),
    ],
)
def test_what_cannot_work_is_refused(argument: str, text: str, tiny: ModuleType, tmp_path: Path) -> None:
    options = {"bf16": False, argument: True, **_SAMPLED}
    with pytest.raises(UnsupportedError) as caught:
        refuse_arguments(tiny.arguments(tmp_path, trl.GRPOConfig, **options))
    assert str(caught.value) == text
    refuse_arguments(tiny.arguments(tmp_path))


def test_it_is_refused_before_anything_is_on_pages(bench: Bench, tmp_path: Path) -> None:
    reference = bench.read(CASES["dpo"], paged=False)
    arguments = bench.tiny.arguments(tmp_path, trl.DPOConfig, sync_ref_model=True, bf16=False)
    with pytest.raises(UnsupportedError, match="sync_ref_model=True does not work on pages"):
        ptm_trainer(trl.DPOTrainer)(
            model=bench.read(CASES["dpo"], paged=False),
            ref_model=reference,
            args=arguments,
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=bench.tokenizer,
            ptm_config=bench.ptm_options,
        )
    assert engine_of(reference) is None
