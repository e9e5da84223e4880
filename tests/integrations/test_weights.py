"""`load_weights` against the plain loader: the same values, and nothing changed where they do not fit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers.loading import from_config, from_pretrained, load_weights
from ptm_accel.integrations.transformers.weights import read_headers, weight_files
from torch import nn
from transformers import AutoModelForCausalLM, core_model_loading

import ptm_accel
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import CheckpointError, UnsupportedError
from tests.integrations.saved_models import (
    ARCHITECTURES,
    LEAST,
    Save,
    close,
    options,
)
from tests.plain_loop import same_bits
from tests.tiers import config, open_memory
from tests.zoo import ENTRIES


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("shard", ["60KB", "1GB"])
def test_saved_weights_are_read_into_a_model_on_pages(name: str, shard: str, saved: Save, tmp_path: Path) -> None:
    plain = ARCHITECTURES[name].from_pretrained(saved(name, shard)).train()
    ours = ENTRIES[name].build(seed=8)
    before = list(ours.parameters())
    engine = Engine.attach(ours, config(), memory=open_memory("host+disk", LEAST.get(name, 230_000), tmp_path))
    assert not same_bits(next(iter(ours.state_dict().values())), next(iter(plain.state_dict().values())))
    load_weights(ours, saved(name, shard))
    mine = ours.state_dict()
    for key, value in plain.state_dict().items():
        assert same_bits(mine[key], value), key
    assert all(a is b for a, b in zip(before, ours.parameters(), strict=True))
    assert not hasattr(ours, "_weight_conversions")
    ours.save_pretrained(tmp_path / "again", max_shard_size=shard)  # type: ignore[operator]
    if shard == "1GB":
        theirs = (saved(name, shard) / "model.safetensors").read_bytes()
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == theirs
    else:
        # Shards are cut by the memory under tensors, which is whole pages here.
        again = [read_headers(weight_files(folder)) for folder in (tmp_path / "again", saved(name, shard))]
        assert again[0].keys() == again[1].keys()
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("name", ["/etc/passwd", "../model", "a/b", "..", ".", "", "a\0b", 7])
def test_a_name_in_an_index_is_of_a_file_in_its_folder(name: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(CheckpointError, match="is damaged: it names .*, which is not a file in its folder. Copy or"):
        weight_files(tmp_path)


def test_files_that_are_links_are_read_as_in_the_cache_of_the_hub(saved: Save, tmp_path: Path) -> None:
    for file in saved("llama", "60KB").iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert read_headers(weight_files(tmp_path)).keys() == read_headers(weight_files(saved("llama", "60KB"))).keys()


def test_an_index_that_is_a_pipe_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="has no model.safetensors and no model.safetensors.index.json"):
        weight_files(tmp_path)


def test_masters_follow_weights_that_are_read(saved: Save, tmp_path: Path) -> None:
    ours = from_pretrained(
        AutoModelForCausalLM, saved("llama"), {**options(tmp_path), "master_weights": "fp32"}, dtype=torch.bfloat16
    )
    engine = engine_of(ours)
    assert engine is not None
    optimizer = engine.bind_optimizer(torch.optim.SGD(ours.parameters(), lr=0.0))
    embedding = ours.state_dict()["model.embed_tokens.weight"].clone()
    with ptm_accel.gathered(ours, write=True), torch.no_grad():
        ours.model.embed_tokens.weight.zero_()
    for _ in range(2):
        ours(**ENTRIES["llama"].batch_at(0)).loss.backward()
        optimizer.step()
        load_weights(ours, saved("llama"))
    ours(**ENTRIES["llama"].batch_at(0)).loss.backward()
    optimizer.step()
    assert same_bits(ours.state_dict()["model.embed_tokens.weight"], embedding)
    close(ours)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.c = nn.Linear(8, 8)
        self.c.weight = self.a.weight


def test_a_model_that_is_not_from_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    plain, ours = Small(), Small()
    plain.b.running_mean.fill_(3.0)  # type: ignore[union-attr,operator]
    tensors = {name: value.clone() for name, value in plain.state_dict().items() if name != "c.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    engine = Engine.attach(ours, config(), memory=open_memory("host+disk", 8 << 20, tmp_path))
    load_weights(ours, tmp_path)
    assert all(same_bits(value, plain.state_dict()[name]) for name, value in ours.state_dict().items())
    del tensors["a.bias"]
    save_file({**tensors, "d": torch.ones(1), "c.bias": torch.ones(9)}, tmp_path / "model.safetensors")
    message = (
        r"the weights in .* are not of this Small: c.bias is of shape \(9,\) there and of \(8,\) in the model, it "
        r"lacks 1 tensors \(a.bias\), it has, and the model has not, 1 tensors \(d\). Nothing was changed. Resume from"
    )
    with pytest.raises(CheckpointError, match=message):
        load_weights(ours, tmp_path)
    assert all(same_bits(value, plain.state_dict()[name]) for name, value in ours.state_dict().items())
    engine.close()


class Tied(nn.Module):
    """Two tied weights and two tied buffers, whose names are not in the order of the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.a = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.weight = self.z.weight
        self.register_buffer("y", torch.zeros(4))
        self.register_buffer("b", self.y)


def test_of_different_values_for_tied_weights_the_last_in_the_model_counts(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    torch.manual_seed(4)
    tensors = {name: torch.randn_like(value) for name, value in Tied().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    plain, ours = Tied(), Tied()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    engine = Engine.attach(ours, config(), memory=open_memory("host+disk", 8 << 20, tmp_path))
    load_weights(ours, tmp_path)
    assert all(same_bits(value, plain.state_dict()[name]) for name, value in ours.state_dict().items())
    assert same_bits(ours.state_dict()["z.weight"], tensors["a.weight"])
    engine.close()


def test_of_different_values_for_tied_embeddings_the_last_in_the_model_counts(saved: Save, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(saved("llama-tied", "1GB"), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    plain, ours = (AutoModelForCausalLM.from_pretrained(saved("llama-tied", "1GB")) for _ in range(2))
    plain.load_state_dict(tensors)
    engine = Engine.attach(ours, config(), memory=open_memory("host+disk", 230_000, tmp_path))
    load_weights(ours, tmp_path / "model")
    assert all(same_bits(value, plain.state_dict()[name]) for name, value in ours.state_dict().items())
    assert same_bits(ours.state_dict()["model.embed_tokens.weight"], tensors["lm_head.weight"])
    engine.close()


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        (
            "llama",
            "gpt2",
            r"are not of this LlamaForCausalLM: it lacks \d+ tensors \(.* and \d+ more\), it has, and the",
        ),
        (
            "mixtral",
            "llama",
            r"are not of this MixtralForCausalLM: it lacks \d+ tensors \(model.layers.0.mlp.experts.down",
        ),
        ("llama", "qwen2", r"it has, and the model has not, \d+ tensors \(model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_weights_of_another_model_are_refused(name: str, other: str, message: str, saved: Save, tmp_path: Path) -> None:
    ours = from_pretrained(ARCHITECTURES[name], saved(name), options(tmp_path))
    before = {key: value.clone() for key, value in ours.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_weights(ours, saved(other))
    assert all(same_bits(value, before[key]) for key, value in ours.state_dict().items())
    close(ours)


def test_weights_of_another_size_are_refused(saved: Save, tmp_path: Path) -> None:
    configuration = transformers.AutoConfig.from_pretrained(saved("mixtral"))
    configuration.num_local_experts = 6
    ours = from_config(AutoModelForCausalLM, configuration, options(tmp_path, 4 << 20))
    message = r"experts.\w+ is of shape \(4, \d+, \d+\) there and of \(6, \d+, \d+\) in the model"
    with pytest.raises(CheckpointError, match=message):
        load_weights(ours, saved("mixtral"))
    close(ours)


def test_a_model_that_is_not_on_pages_is_refused(saved: Save) -> None:
    with pytest.raises(UnsupportedError, match=r"this Linear is not on pages. Use model.load_state_dict\(\)"):
        load_weights(nn.Linear(2, 2), saved("llama"))


def test_a_tensor_that_cannot_be_made_is_said(saved: Save, tmp_path: Path) -> None:
    """An expert is missing: what is stacked of the others is too small."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path / "model"
    shutil.copytree(saved("mixtral", "1GB"), directory)
    tensors = load_file(directory / "model.safetensors")
    lost = next(name for name in tensors if "experts.1.w1" in name or "experts.1.gate_proj" in name)
    del tensors[lost]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ours = from_pretrained(AutoModelForCausalLM, saved("mixtral"), options(tmp_path))
    with pytest.raises(CheckpointError, match="are not of this MixtralForCausalLM"):
        load_weights(ours, directory)
    close(ours)


@pytest.mark.parametrize(
    ("on_meta", "with_values", "message"),
    [
        (
            "Traceback ...\nRuntimeError: sizes differ",
            "",
            "a.weight cannot be made: RuntimeError: sizes differ. Nothing was changed",
        ),
        (
            "NotImplementedError: Cannot copy out of meta tensor",
            "Traceback ...\nRuntimeError: sizes differ\n",
            "a.weight cannot be made from the saved tensors: RuntimeError: sizes differ",
        ),
    ],
)
def test_a_tensor_that_only_fails_with_its_values_is_named(
    on_meta: str, with_values: str, message: str, saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an operation cannot run without values, the comparison beforehand does not see what is wrong."""
    ours = from_pretrained(AutoModelForCausalLM, saved("llama"), options(tmp_path))
    stock = core_model_loading.convert_and_load_state_dict_in_model

    def failing(model: Any, tensors: Any, load_config: Any) -> Any:
        info, index = stock(model, tensors, load_config)
        info.conversion_errors["a.weight"] = on_meta if load_config.device_map[""] == "meta" else with_values
        return info, index

    monkeypatch.setattr(core_model_loading, "convert_and_load_state_dict_in_model", failing)
    with pytest.raises(CheckpointError, match=message):
        load_weights(ours, saved("llama"))
    close(ours)


def test_headers_are_read_without_values(saved: Save) -> None:
    headers = read_headers(weight_files(saved("llama")))
    plain = AutoModelForCausalLM.from_pretrained(saved("llama")).state_dict()
    assert {name: (t.shape, t.dtype) for name, t in headers.items()} == {
        n: (t.shape, t.dtype) for n, t in plain.items()
    }
    assert all(tensor.device.type == "meta" for tensor in headers.values())
