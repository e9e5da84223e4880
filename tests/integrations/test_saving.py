"""Saving and pushing: the same files as the plain run's; fused experts are taken apart in files."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import HfApi, ModelCard, RepoUrl
from ptm_accel.integrations.transformers import Trainer
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import DiskError


def mixtral(tiny: ModuleType) -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": tiny.VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def test_experts_are_taken_apart_in_files(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptm_accel.integrations.transformers import saving

    plain, model = mixtral(tiny), mixtral(tiny)
    plain.save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    saving.install()
    saving.install()
    kept: list[torch.Tensor] = []
    stock = saving.copy_in_file

    def noted(tensor: torch.Tensor, folders: Sequence[Path], what: str) -> torch.Tensor:
        kept.append(stock(tensor, folders, what))
        return kept[-1]

    monkeypatch.setattr(saving, "copy_in_file", noted)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    config = PTMConfig(host_memory="720KiB", page_size=4096, disk=str(scratch))
    engine = Engine.attach(model, config, device=torch.device("cpu"))
    model.save_pretrained(tmp_path / "ours", max_shard_size="100KB")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert len(names) > 4
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    fused = [slot.value for slot in engine.slots if "gate_up_proj" in slot.name]
    assert sum(tensor.nbytes for tensor in kept) == sum(value.nbytes for value in fused)
    maps = Path("/proc/self/maps").read_text().splitlines()
    starts = {int(line.split("-")[0], 16) for line in maps if str(scratch) in line and ".mapped" in line}
    assert {tensor.data_ptr() for tensor in kept} == starts
    kept.clear()
    plain.save_pretrained(tmp_path / "again")
    assert not kept, "a model that is not on pages is saved as ever"
    engine.close()
    assert not list(scratch.iterdir())


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptm_accel.integrations.transformers import saving

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"has no room for 4096 B of a model's experts while it is saved; free space"):
        saving.copy_in_file(torch.zeros(1024), [tmp_path], "a model's experts while it is saved")
    assert not list(tmp_path.iterdir())


class LocalHub:
    """Stands in for the Hub: what is pushed to a repository is copied to a folder.

    Args:
        folder: with a folder for each repository.
        monkeypatch: undoes it.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in ("create_repo", "create_commit", "upload_folder"):
            monkeypatch.setattr(HfApi, name, functools.partialmethod(getattr(LocalHub, name), hub=self))
            for module in (transformers.utils.hub, transformers.trainer):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, functools.partial(getattr(HfApi(), name)))
        monkeypatch.setattr(
            transformers.utils.hub, "create_and_tag_model_card", lambda *args, **kwargs: ModelCard("---\n---\n# card\n")
        )

    @staticmethod
    def create_repo(api: HfApi, repo_id: str, *, hub: LocalHub, **options: Any) -> RepoUrl:
        (hub.folder / repo_id).mkdir(parents=True, exist_ok=True)
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    @staticmethod
    def create_commit(api: HfApi, repo_id: str, operations: list[Any], *, hub: LocalHub, **options: Any) -> None:
        for each in operations:
            shutil.copyfile(each.path_or_fileobj, hub.folder / repo_id / each.path_in_repo)

    @staticmethod
    def upload_folder(api: HfApi, *, repo_id: str, folder_path: str, hub: LocalHub, **options: Any) -> None:
        shutil.copytree(folder_path, hub.folder / repo_id, dirs_exist_ok=True)

    def files(self, repo_id: str) -> dict[str, bytes]:
        """What a repository holds, but for the card and the arguments, which name folders and dates."""
        root = self.folder / repo_id
        left_out = ("README.md", "training_args.bin")
        return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file() and path.name not in left_out}


@pytest.mark.parametrize("by", ["model", "trainer"])
def test_what_is_pushed_is_what_the_plain_run_pushes(
    by: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = LocalHub(tmp_path / "hub", monkeypatch)
    for way in ("plain", "paged"):
        given = {} if way == "plain" else {"ptm_config": tiny.budget("tight", tmp_path)}
        cls = transformers.Trainer if way == "plain" else Trainer
        arguments = tiny.arguments(tmp_path / way, hub_model_id=f"somebody/{way}", max_steps=2)
        trainer = cls(model=tiny.model(), args=arguments, train_dataset=tiny.data(), **given)
        trainer.train()
        assert (engine_of(trainer.model) is not None) == (way == "paged")
        if by == "trainer":
            trainer.push_to_hub()
        else:
            trainer.model.push_to_hub(f"somebody/{way}", max_shard_size="300KB")
    ours = hub.files("somebody/paged")
    assert ours == hub.files("somebody/plain")
    assert len([name for name in ours if name.endswith(".safetensors")]) == (1 if by == "trainer" else 3)
    again = LlamaForCausalLM.from_pretrained(hub.folder / "somebody/paged")
    assert tiny.same(tiny.weights(again), tiny.weights(trainer.model))
