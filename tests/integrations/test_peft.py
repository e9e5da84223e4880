"""PEFT over a base on pages against the plain run, bit for bit, at the least budget: pages of the base must move."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer, ptm_trainer
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ptm_accel
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import PagedModelError, UnsupportedError
from tests.integrations.adapters import METHODS, Bases, Bench, lora


@pytest.mark.thinned(8)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("compare", [False, True], ids=["untied", "tied"], indirect=True)
def test_adapters_train_as_in_the_plain_trainer(method: str, compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = peft.get_peft_model(bench.read(), METHODS[method]())
        history = bench.train(model)
        return model, (history, bench.saved(model, "adapter"), bench.loss(model))

    compare(story)


@pytest.mark.parametrize("way", ["mixin", "checkpointed", "autocast", "bf16 base"])
def test_ways_to_train(way: str, compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = bench.read(dtype=torch.bfloat16) if way == "bf16 base" else bench.read()
        model = peft.get_peft_model(model, lora(use_dora=way == "bf16 base"))
        cls = ptm_trainer(transformers.Trainer) if way == "mixin" else Trainer
        return model, bench.train(model, cls, gradient_checkpointing=way == "checkpointed", bf16=way == "autocast")

    compare(story)


def with_reference(cls: Any) -> Any:
    """A Trainer whose loss needs the base's own, as DPO does."""

    class WithReference(cls):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> torch.Tensor:
            loss: torch.Tensor = model(**inputs).loss
            with torch.no_grad(), model.disable_adapter():
                other = model(**inputs).loss
            return loss + 0.1 * other

    return WithReference


@pytest.mark.thinned(3)
@pytest.mark.parametrize("room", [10.0, 2.5, 1.0], ids=["fits", "half", "least"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_layers_are_recomputed_after_a_forward_with_the_adapter_off(
    reentrant: bool, room: float, tiny: ModuleType, bases: Bases, tmp_path: Path
) -> None:
    base, least = bases[False]
    options = {**least, "host_memory": int(least["host_memory"] * room)}
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    outcomes = []
    classes = {"cls": with_reference(Trainer), "plain": with_reference(transformers.Trainer)}
    for paged in (False, True):
        bench = Bench(tiny, tmp_path, paged, False, base, options)
        model = peft.get_peft_model(bench.read(), lora(target_modules="all-linear"))
        history = bench.train(model, max_steps=4, **classes, **given)
        outcomes.append((history, bench.loss(model), {k: v.tolist() for k, v in bench.tiny.weights(model).items()}))
    assert outcomes[0] == outcomes[1]
    [engine] = bench.engines
    assert (engine.pool.stats.evictions > 0) == (room < 10)
    bench.end()


def test_eva_initialises_from_activations(compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        config = lora(init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0), lora_dropout=0.0)
        model = peft.get_peft_model(bench.read(), config)
        rows = [row["input_ids"] for row in bench.tiny.data(8)]
        batches = [{"input_ids": torch.stack(rows[i : i + 4])} for i in (0, 4)]
        peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
        return model, bench.loss(model)

    compare(story)


def test_generation(compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = peft.get_peft_model(bench.read(), lora())
        bench.train(model)
        model.eval()
        start = bench.tiny.data(1)[0]["input_ids"][None, :5]
        return model, model.generate(input_ids=start, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()

    compare(story)


# ---- the disk and the memory -----------------------------------------------------------------------------------------


def _evict(engine: Engine) -> None:
    for slot in engine.slots:
        if slot.value.block in engine.pool.eviction:
            engine.pool.admission.evict(slot.value.block)
    # What is written counts once it has been.
    engine.pool.admission.released.settle()


class Written:
    """What an engine's disk is given from now on, by what it is of.

    Args:
        engine: with nothing but the base on pages.
        monkeypatch: undoes it.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = engine.memory.disk
        assert disk is not None
        _evict(engine)
        of_base = {
            id(slot.value.block.handle): slot.name for slot in engine.slots if slot.value.block.handle is not None
        }
        assert len(of_base) > 15
        store = disk.store
        self.bytes: Counter[str] = Counter()
        self.before = disk.bytes_written

        def counted(handle: Any, offset: int, source: torch.Tensor) -> Any:
            self.bytes[of_base.get(id(handle), "what is trained")] += source.numel()
            return store(handle, offset, source)

        monkeypatch.setattr(disk, "store", counted)
        self._disk = disk

    def is_of_what_is_trained(self) -> bool:
        """Whether nothing of the base was written, and the disk says the same."""
        return set(self.bytes) == {"what is trained"} and self.bytes.total() == self._disk.bytes_written - self.before


@pytest.mark.parametrize(
    ("method", "checkpointing"), [("lora", True), ("dora", False), ("modules_to_save", False), ("prompt", False)]
)
def test_the_base_is_never_written_again(
    method: str,
    checkpointing: bool,
    tiny: ModuleType,
    bases: Bases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once the base has been read, only what is trained and its state wear the disk."""
    base, options = bases[False]
    bench = Bench(tiny, tmp_path, True, False, base, options)
    model = bench.read()
    engine = bench.engines[0]
    disk = engine.memory.disk
    assert disk is not None
    _evict(engine)
    before = disk.bytes_written
    model = peft.get_peft_model(model, METHODS[method]())
    _evict(engine)
    # DoRA looks at `weight.data` as it is made, which counts as a change once.
    assert (disk.bytes_written == before) == (method != "dora")
    written = Written(engine, monkeypatch)

    read = disk.bytes_read
    bench.train(model, gradient_checkpointing=checkpointing)
    bench.loss(model)
    bench.saved(model, "adapter")
    with model.disable_adapter():
        bench.loss(model)
    assert disk.bytes_read - read > 2 * sum(slot.value.nbytes for slot in engine.slots)
    assert written.is_of_what_is_trained()
    engine.check_integrity()
    engine.close()


def test_lora_over_a_base_of_eight_times_the_memory(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen parameters take two bytes each on the disk, and never more room in memory than the budget."""
    base = tmp_path / "base"
    plain = tiny.model(num_hidden_layers=32).bfloat16()
    plain.save_pretrained(base)
    nbytes = sum(param.nbytes for param in plain.parameters())
    options = {"host_memory": nbytes // 8, "page_size": 4096, "disk": str(tmp_path)}
    stories = []
    for paged in (False, True):
        bench = Bench(tiny, tmp_path, paged, False, base, options)
        model = bench.read()
        if paged:
            written = Written(bench.engines[0], monkeypatch)
        model = peft.get_peft_model(model, lora())
        history = bench.train(model, gradient_checkpointing=True, max_steps=2)
        stories.append((history, bench.loss(model), bench.saved(model, "adapter")))
    assert stories[0] == stories[1]
    engine = bench.engines[0]
    assert written.is_of_what_is_trained()
    assert engine.pool.budget.peak_bytes <= nbytes // 8
    assert 8 * engine.pool.budget.capacity_bytes <= sum(slot.value.nbytes for slot in engine.slots)
    engine.check_integrity()
    engine.close()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_adalora_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_r=4, target_r=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.model(), config)
    trainer = Trainer(model=model, args=tiny.arguments(tmp_path), train_dataset=tiny.data())
    with pytest.raises(UnsupportedError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "the adapter 'default' (AdaLoraConfig) cannot be trained on pages: in each forward it goes through all of its "
        "parameters at once, and it chooses ranks by `p.grad`, which is empty outside backward on pages. Use LoRA or "
        "DoRA (LoraConfig, use_dora=True)."
    )
    assert engine_of(model) is None


class Params4bit(nn.Parameter):
    """As the parameters of bitsandbytes."""


def test_quantised_bases_are_refused(tiny: ModuleType, bases: Bases, tmp_path: Path) -> None:
    base, options = bases[False]
    quantised = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(UnsupportedError, match=r"(?s)not take quantization_config=.*quantised parameters cannot"):
        ptm_accel.from_pretrained(AutoModelForCausalLM, base, options, quantization_config=quantised)
    model = tiny.model()
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight
        layer.mlp.up_proj.weight = Params4bit(weight.detach().clone())
    model = peft.get_peft_model(model, lora())
    trainer = Trainer(model=model, args=tiny.arguments(tmp_path), train_dataset=tiny.data())
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight is a Params4bit, .*quantised and distributed"):
        trainer.train()
    assert engine_of(model) is None


def test_a_model_with_adapters_is_not_copied_whole(tiny: ModuleType, bases: Bases, tmp_path: Path) -> None:
    base, options = bases[True]
    bench = Bench(tiny, tmp_path, True, True, base, options)
    model = peft.get_peft_model(bench.read(), lora())
    with pytest.raises(PagedModelError, match=r"cannot be copied by copy\.deepcopy"):
        copy.deepcopy(model)
    copied = ptm_accel.plain_copy(model)
    assert tiny.same(tiny.weights(copied), tiny.weights(model))
    assert bench.loss(copied) == bench.loss(model)
    bench.engines[0].close()
