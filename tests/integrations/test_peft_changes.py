"""What PEFT does to a model on pages before and after training, as in the plain run: merging, loading, resizing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

import ptm_accel
from ptm_accel.engine import Engine, engine_of
from tests.integrations.adapters import METHODS, Bench, lora, on


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
def test_merged_and_unmerged(method: str, compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = peft.get_peft_model(bench.read(), METHODS[method]())
        values: list[Any] = [bench.train(model), bench.loss(model)]
        model.merge_adapter()
        values.append(bench.loss(model))
        model.unmerge_adapter()
        values.append(bench.loss(model))
        with model.disable_adapter():
            values.append(bench.loss(model))
        values.append(bench.loss(model))
        return model, values

    compare(story)


@pytest.mark.thinned(5)
@on(
    lora_before_training=False,
    lora_after_training=True,
    dora_after_training=False,
    ia3_before_training=True,
    embeddings_before_training=False,
    embeddings_after_training=True,
    modules_to_save_before_training=False,
    modules_to_save_after_training=True,
    pissa_after_training=False,
)
def test_merged_for_good(case: str, compare: Callable[..., None]) -> None:
    """The merged model is saved, byte for byte, and can be trained in full."""
    method, trained = re.fullmatch(r"(\w+)_(after|before)_training", case).groups()  # type: ignore[union-attr]

    def story(bench: Bench) -> tuple[Any, Any]:
        model = peft.get_peft_model(bench.read(), METHODS[method]())
        values: list[Any] = []
        if trained == "after":
            values.append(bench.train(model))
        else:
            for name, param in model.named_parameters():
                if "lora_B" in name or "ia3" in name:
                    # On pages only once it is trained: a plain parameter until then.
                    nn.init.normal_(param)
        merged = model.merge_and_unload(safe_merge=method == "lora")
        assert type(merged) is transformers.LlamaForCausalLM
        values += [bench.loss(merged), bench.saved(merged, "merged"), merged.config.tie_word_embeddings]
        values.append(bench.train(merged.requires_grad_(True)))
        return merged, values

    # Embeddings that have come apart are one more to train.
    apart = case in ("embeddings_after_training", "modules_to_save_after_training")
    compare(story, room=1.2 if apart else 1.0)


def test_unloaded_without_a_merge(compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = peft.get_peft_model(bench.read(), lora())
        values: list[Any] = [bench.train(model)]
        base = model.unload()
        values.append(bench.loss(base))
        again = peft.get_peft_model(base, lora(r=2))
        return again, [*values, bench.train(again)]

    compare(story)


@on(as_ever=True, low_cpu_mem_usage=False)
def test_adapters_are_loaded_added_and_deleted(case: str, compare: Callable[..., None]) -> None:
    low_cpu_mem_usage = case == "low_cpu_mem_usage"

    def story(bench: Bench) -> tuple[Any, Any]:
        model = peft.get_peft_model(bench.read(), lora())
        values: list[Any] = [bench.train(model), bench.saved(model, "first")]
        bench.end()
        options = {"is_trainable": True, "low_cpu_mem_usage": low_cpu_mem_usage}
        model = peft.PeftModel.from_pretrained(bench.read(), bench.folder / "first", **options)
        values += [bench.loss(model), bench.train(model)]
        model.load_adapter(bench.folder / "first", "second", low_cpu_mem_usage=low_cpu_mem_usage)
        model.set_adapter("second")
        values.append(bench.loss(model))
        model.add_adapter("third", lora(r=2, modules_to_save=["lm_head"]))
        model.set_adapter("third")
        values.append(bench.train(model))
        model.delete_adapter("second")
        return model, [*values, bench.train(model)]

    compare(story)


def _transformers_takes_peft() -> bool:
    """Some transformers ask for a PEFT that is not out yet; a model's own `add_adapter` is an error with them then."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        return False
    return True


@pytest.mark.skipif(
    not _transformers_takes_peft(),
    reason=f"transformers {transformers.__version__} refuses PEFT {peft.__version__}: it wants {MIN_PEFT_VERSION}",
)
def test_adapters_of_transformers(compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = bench.read()
        model.add_adapter(lora(task_type=None))
        values: list[Any] = [bench.train(model), bench.saved(model, "adapter")]
        model.disable_adapters()
        values.append(bench.loss(model))
        model.enable_adapters()
        return model, [*values, bench.loss(model)]

    compare(story)


def _pissa_again(adapter: Path) -> None:
    """As adapters are saved that are to meet the same base: it is split anew when they are loaded."""
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "init_lora_weights": "pissa"}), encoding="utf-8")


@on(transformers_dora=True, transformers_pissa=False, peft_pissa=False, peft_modules_to_save=True)
def test_the_directory_of_an_adapter_is_read(case: str, compare: Callable[..., None]) -> None:
    """The adapter is put into a base that has its values, as some initialisations want them."""
    library, method = case.split("_", 1)
    auto_cls = AutoModelForCausalLM if library == "transformers" else peft.AutoPeftModelForCausalLM

    def story(bench: Bench) -> tuple[Any, Any]:
        model = peft.get_peft_model(bench.read(), METHODS[method]())
        bench.train(model)
        bench.saved(model, "adapter")
        bench.end()
        if method == "pissa":
            _pissa_again(bench.folder / "adapter")
        torch.manual_seed(5)
        if bench.paged:
            again = ptm_accel.from_pretrained(auto_cls, bench.folder / "adapter", bench.options)
            engine = engine_of(again)
            assert engine is not None
            assert all(engine.slots.of(param) is not None for param in again.parameters())
            bench.engines.append(engine)
        else:
            again = auto_cls.from_pretrained(bench.folder / "adapter")
        return again, bench.loss(again)

    compare(story)


@on(as_the_mean=True, at_random=False)
def test_more_tokens(case: str, compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = bench.read()
        model.resize_token_embeddings(530, mean_resizing=case == "as_the_mean")
        values: list[Any] = [bench.loss(model), bench.train(model)]
        model = peft.get_peft_model(model, lora())
        values.append(bench.train(model))
        return model, [*values, bench.saved(model, "adapter", save_embedding_layers=True)]

    compare(story, room=1.2)


def test_a_new_head(compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = bench.read(auto_cls=AutoModelForSequenceClassification, num_labels=3, pad_token_id=0)
        model = peft.get_peft_model(model, lora(task_type="SEQ_CLS"))
        rows = [{**row, "labels": torch.tensor(i % 3)} for i, row in enumerate(bench.tiny.data(16))]
        history = bench.train(model, data=rows)
        return model, (history, bench.saved(model, "adapter"))

    compare(story)


def test_another_head(compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        model = bench.read()
        model.lm_head = nn.Linear(64, 512, bias=False)
        model.config.tie_word_embeddings = False
        return model, bench.train(model)

    compare(story)


def test_resumed(compare: Callable[..., None]) -> None:
    def story(bench: Bench) -> tuple[Any, Any]:
        def adapted() -> Any:
            return peft.get_peft_model(bench.read(), lora(modules_to_save=["lm_head"]))

        model = adapted()
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        lines = bench.train(model, **saving)
        if bench.paged:
            shutil.rmtree(bench.folder / "run" / "checkpoint-4")
            bench.engines.pop().close()
            model = adapted()
            lines = bench.train(model, resume=True, **saving)
        return model, [line for line in lines if "train_loss" not in line]

    compare(story)


def test_a_merge_never_has_the_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT merges in place, reading each layer by its name; the pages follow."""
    width, layers, budget = 1024, 24, 24 << 20
    torch.manual_seed(0)
    base = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).requires_grad_(False)
    engine = Engine.attach(base, ptm_accel.PTMConfig(host_memory=budget, page_size="64KiB", disk=str(tmp_path)))
    config = peft.LoraConfig(r=2, target_modules=[str(i) for i in range(layers)], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    expected = [
        layer.base_layer.state_dict()["weight"].double().sum() + layer.get_delta_weight("default").double().sum()
        for layer in model.base_model.model
    ]
    before, grown = psutil.Process().memory_info().rss, []
    merge = peft.tuners.lora.layer.Linear.merge

    def merge_and_look(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        merge(layer, *args, **kwargs)
        grown.append(psutil.Process().memory_info().rss - before)

    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "merge", merge_and_look)
    merged = model.merge_and_unload(safe_merge=True)
    assert len(grown) == layers
    assert max(grown) < 40 << 20 < layers * width * width * 4 // 2
    assert engine.pool.budget.peak_bytes <= budget
    for layer, total in zip(merged, expected, strict=True):
        assert torch.isclose(layer.weight.detach().double().sum(), total.detach(), atol=1e-3)
    engine.check_integrity()
    engine.close()
