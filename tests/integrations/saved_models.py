"""Tiny models saved in several shards, budgets that make them page, and comparisons with the plain call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from ptm_accel.engine import engine_of
from tests.plain_loop import same_bits
from tests.tiers import PAGE
from tests.zoo import ENTRIES

Save = Callable[..., Path]

ARCHITECTURES: dict[str, Any] = {
    "llama": AutoModelForCausalLM,
    "llama-tied": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "mixtral": AutoModelForCausalLM,
    "qwen2-moe": AutoModelForCausalLM,
    "t5": AutoModelForSeq2SeqLM,
    "bert": AutoModelForMaskedLM,
    "vit": AutoModelForImageClassification,
    "mamba": AutoModelForCausalLM,
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Saves a tiny model of an architecture, in several shards, once."""
    made: dict[tuple[str, str], Path] = {}

    def save(name: str, shard: str = "60KB") -> Path:
        if (name, shard) not in made:
            directory = tmp_path_factory.mktemp(name)
            model = ENTRIES[name].build(seed=3)
            nn.init.normal_(next(p for p in model.parameters() if p.dim() == 1))
            model.save_pretrained(directory, max_shard_size=shard)  # type: ignore[operator]
            made[name, shard] = directory
        return made[name, shard]

    return save


LEAST = {"mixtral": 1_090_000, "qwen2-moe": 380_000, "mamba": 470_000}
"""Budgets a little above the floor, where it is high."""


def options(directory: Path, budget: int | None = None, name: str = "mixtral") -> dict[str, Any]:
    """A budget so small that parameters must leave."""
    return {"host_memory": budget or LEAST.get(name, 230_000), "disk": str(directory), "page_size": PAGE}


def assert_same_model(ours: nn.Module, plain: nn.Module) -> None:
    mine, other = ours.state_dict(), plain.state_dict()
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert same_bits(mine[name], value), name
    assert dict(ours.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert same_bits(ours.get_buffer(name), buffer), name
    assert names_of_ties(ours) == names_of_ties(plain)
    assert [n for n, p in ours.named_parameters() if p.requires_grad] == [
        n for n, p in plain.named_parameters() if p.requires_grad
    ]
    assert ours.training == plain.training
    assert ours.config.to_dict() == plain.config.to_dict()  # type: ignore[union-attr,operator]
    assert type(ours) is type(plain)


def names_of_ties(model: nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def close(model: nn.Module) -> None:
    engine = engine_of(model)
    assert engine is not None
    engine.check_integrity()
    engine.close()


def remove_a_shard(directory: Path) -> None:
    sorted(directory.glob("model-*.safetensors"))[1].unlink()


def truncate_a_shard(directory: Path) -> None:
    file = sorted(directory.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-8])


def break_the_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": []}')


def name_a_path(directory: Path) -> None:
    """The same files, by way of the folder above."""
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', f'"../{directory.name}/model-'))


def remove_all(directory: Path) -> None:
    for file in directory.glob("model*"):
        file.unlink()


DAMAGE = [
    (remove_a_shard, r"lacks 1 of its \d+ files: model-00002-of-\d+.safetensors. Copy or download the model again"),
    (truncate_a_shard, r"model-00002-of-\d+.safetensors \(\S+ \S+\) is damaged: .*Copy or download the model again"),
    (break_the_index, r"model.safetensors.index.json is damaged: .*Copy or download the model again"),
    (
        name_a_path,
        r"index.json is damaged: it names '\.\./.*/model-00001-of-\d+.safetensors', which is not a file in its folder.",
    ),
    (
        remove_all,
        r"has no model.safetensors and no model.safetensors.index.json. Only safetensors can be read onto pages",
    ),
]
