"""Saving models whose experts are fused: the same files, and what is taken apart lies in files meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.mapped_files import MappedFiles, is_in_a_file


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
    stock = MappedFiles.copy_of

    def noted(files: MappedFiles, tensor: torch.Tensor) -> torch.Tensor:
        kept.append(stock(files, tensor))
        return kept[-1]

    monkeypatch.setattr(MappedFiles, "copy_of", noted)
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
    assert all(map(is_in_a_file, kept))
    kept.clear()
    plain.save_pretrained(tmp_path / "again")
    assert not kept, "a model that is not on pages is saved as ever"
    engine.close()
    assert not list(scratch.iterdir())
