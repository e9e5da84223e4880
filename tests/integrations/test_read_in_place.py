"""A model whose checkpoint is mapped is trained from where it lies: nothing is read or written before it is needed."""

from __future__ import annotations

import copy
import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import DiskError
from ptm_accel.memory.mapped_files import MappedFiles, is_scratch, scratch_origin
from ptm_accel.model.scratch_parameters import ScratchParameters
from tests.integrations.saved_models import ARCHITECTURES, Save, assert_same_model, dials
from tests.tiers import PAGE, config, open_memory
from tests.zoo import ENTRIES


def build(save: Save, directory: Path, name: str = "llama", dtype: torch.dtype | None = None) -> nn.Module:
    """A model of a checkpoint of its own."""
    shutil.copytree(save(name), directory / "model")
    model: nn.Module = ARCHITECTURES[name].from_pretrained(directory / "model", dtype=dtype)
    return model


def in_files(engine: Engine) -> list[str]:
    return [slot.name for slot in engine.slots if slot.value.origin is not None]


@contextmanager
def attached(model: nn.Module, directory: Path, name: str = "llama", **options: Any) -> Iterator[Engine]:
    least = dials(directory, name=name)["host_memory"]
    engine = Engine.attach(model, config(**options), memory=open_memory("host+disk", least, directory))
    try:
        yield engine
        engine.check_integrity()
    finally:
        engine.close()


def train(model: nn.Module, optimizer: Any, steps: range, name: str = "llama") -> list[float]:
    losses = []
    for step in steps:
        loss = model(**ENTRIES[name].batch_at(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, fused=True, **options)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "t5"])
def test_nothing_is_stored_before_it_is_updated(name: str, saved: Save, tmp_path: Path) -> None:
    model = build(saved, tmp_path, name)
    plain = copy.deepcopy(model)
    with attached(model, tmp_path, name) as engine:
        assert in_files(engine)
        assert engine.pool.stats.stored_bytes == 0
        assert engine.pool.stats.loaded_bytes == 0
        mine, theirs = engine.bind_optimizer(adamw(model)), adamw(plain)
        assert train(model, mine, range(4), name) == train(plain, theirs, range(4), name)
        assert_same_model(model, plain)
        assert not in_files(engine), "each was updated"


def test_what_is_evaluated_first_is_read_and_not_stored(saved: Save, tmp_path: Path) -> None:
    model = build(saved, tmp_path)
    plain = copy.deepcopy(model)
    with attached(model, tmp_path) as engine, torch.no_grad():
        losses = [[each(**ENTRIES["llama"].batch_at(0)).loss.item() for _ in range(2)] for each in (model, plain)]
        assert losses[0] == losses[1]
        assert engine.pool.stats.stored_bytes == 0
        assert engine.pool.stats.loaded_bytes > 0


def test_saving_over_the_checkpoint_that_it_came_from(saved: Save, tmp_path: Path) -> None:
    """All values are taken home before the first file of them is written to."""
    model = build(saved, tmp_path)
    plain = copy.deepcopy(model)
    with attached(model, tmp_path) as engine:
        model.save_pretrained(tmp_path / "model", max_shard_size="60KB")  # type: ignore[operator]
        again = ARCHITECTURES["llama"].from_pretrained(tmp_path / "model")
        assert_same_model(again, plain)
        mine, theirs = engine.bind_optimizer(adamw(model)), adamw(plain)
        assert train(model, mine, range(2)) == train(plain, theirs, range(2))
        assert_same_model(model, plain)


def test_a_checkpoint_that_is_removed_once_it_is_loaded(saved: Save, tmp_path: Path) -> None:
    model = build(saved, tmp_path)
    plain = copy.deepcopy(model)
    with attached(model, tmp_path) as engine:
        shutil.rmtree(tmp_path / "model")
        mine, theirs = engine.bind_optimizer(adamw(model)), adamw(plain)
        assert train(model, mine, range(2)) == train(plain, theirs, range(2))
        assert_same_model(model, plain)


def test_a_checkpoint_that_is_changed_under_a_model(saved: Save, tmp_path: Path) -> None:
    model = build(saved, tmp_path)
    with attached(model, tmp_path) as engine:
        assert in_files(engine)
        for file in (tmp_path / "model").glob("*.safetensors"):
            file.write_bytes(b"something else")
        with pytest.raises(DiskError, match=r"safetensors was changed .* Do not write to a checkpoint that a run"):
            model(**ENTRIES["llama"].batch_at(0))


def test_values_that_were_changed_before_are_kept(saved: Save, tmp_path: Path) -> None:
    model = build(saved, tmp_path)
    with torch.no_grad():
        model.lm_head.weight[3, 4] += 1  # type: ignore[union-attr,operator,index]
    plain = copy.deepcopy(model)
    with attached(model, tmp_path) as engine:
        assert "lm_head.weight" not in in_files(engine)
        assert_same_model(model, plain)


def test_a_base_that_is_not_trained_is_taken_home_at_once(saved: Save, tmp_path: Path) -> None:
    """It is read in every pass, which is done beside compute from pages only."""
    model = get_peft_model(build(saved, tmp_path), LoraConfig(r=4, target_modules=["q_proj"]))  # type: ignore[arg-type]
    with attached(model, tmp_path) as engine:
        assert not in_files(engine)
        assert engine.pool.stats.stored_bytes > 0


def test_what_is_cast_as_it_is_read_is_in_no_checkpoint(saved: Save, tmp_path: Path) -> None:
    model = build(saved, tmp_path, dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    with attached(model, tmp_path, master_weights="fp32") as engine:
        assert not in_files(engine)
        assert_same_model(model, plain)


def test_what_fits_stays_in_its_mapping(saved: Save, tmp_path: Path) -> None:
    model = build(saved, tmp_path)
    addresses = {name: param.data_ptr() for name, param in model.named_parameters()}
    engine = Engine.attach(model, config(), memory=open_memory("host+disk", 1 << 26, tmp_path))
    assert not in_files(engine)
    assert {name: param.data_ptr() for name, param in model.named_parameters()} == addresses
    engine.close()


def test_masters_are_made_from_the_file(saved: Save, tmp_path: Path) -> None:
    shutil.copytree(saved("llama"), tmp_path / "wide")
    narrow = ARCHITECTURES["llama"].from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    made = []
    for mapped in (True, False):
        model = ARCHITECTURES["llama"].from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
        if not mapped:
            for param in model.parameters():
                param.data = param.data.clone()
        with attached(model, tmp_path, master_weights="fp32") as engine:
            assert bool(in_files(engine)) is mapped
            losses = train(model, engine.bind_optimizer(adamw(model)), range(3))
            made.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
    assert made[0][0] == made[1][0]
    assert all(torch.equal(value, made[1][1][name]) for name, value in made[0][1].items())


# ---- what is in no checkpoint, but in scratch files ----------------------------------------------------------------


@contextmanager
def scratch(directory: Path) -> Iterator[MappedFiles]:
    """What is built or read meanwhile lies in scratch files, as under the flag."""
    files = MappedFiles([directory], 1 << 26)
    remove = ScratchParameters(files, PAGE // 4).install()
    try:
        yield files
    finally:
        remove()


def test_a_model_that_was_built_in_scratch_files_is_trained_from_there(tmp_path: Path) -> None:
    plain = ENTRIES["llama"].build()
    with scratch(tmp_path) as files:
        model = ENTRIES["llama"].build()
    assert files.held_bytes
    with attached(model, tmp_path) as engine:
        assert in_files(engine)
        assert engine.pool.stats.stored_bytes == 0
        mine, theirs = engine.bind_optimizer(adamw(model)), adamw(plain)
        assert train(model, mine, range(3)) == train(plain, theirs, range(3))
        assert_same_model(model, plain)
        gc.collect()
        assert files.held_bytes == 0, "each was updated"


def test_what_is_cast_as_it_is_read_is_trained_from_its_scratch_file(
    saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved("mixtral"), tmp_path / "model")
    made = []
    for in_scratch in (True, False):
        with scratch(tmp_path / "model") as files:
            if not in_scratch:
                monkeypatch.setattr(ScratchParameters, "take", lambda self, param: None)
            model = ARCHITECTURES["mixtral"].from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
        assert bool(files.held_bytes) is in_scratch
        with attached(model, tmp_path, "mixtral", master_weights="fp32") as engine:
            assert bool(in_files(engine)) is in_scratch
            losses = train(model, engine.bind_optimizer(adamw(model)), range(3), "mixtral")
            made.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
        del model
        gc.collect()
        assert files.held_bytes == 0
    assert made[0][0] == made[1][0]
    assert all(torch.equal(value, made[1][1][name]) for name, value in made[0][1].items())


def test_scratch_files_that_have_a_home_leave_their_limit_to_other_models(tmp_path: Path) -> None:
    nbytes = sum(param.nbytes for param in ENTRIES["llama"].build().parameters())
    files = MappedFiles([tmp_path], nbytes * 5 // 4)
    remove = ScratchParameters(files, PAGE // 4).install()
    try:
        model = ENTRIES["llama"].build()
        with attached(model, tmp_path) as engine:
            other = ENTRIES["llama"].build()
            held = files.held_bytes
            assert held
            train(model, engine.bind_optimizer(adamw(model)), range(2))
            gc.collect()
            assert files.held_bytes == held, "released once"
            del other
            gc.collect()
            assert files.held_bytes == 0
    finally:
        remove()


def test_a_child_keeps_no_scratch_files(tmp_path: Path) -> None:
    with scratch(tmp_path):
        model = ENTRIES["llama"].build()
    with attached(model, tmp_path) as engine:
        assert in_files(engine)
        ends = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(ends[1], b"1" if ".mapped" in Path("/proc/self/maps").read_text() else b"0")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.read(ends[0], 1) == b"0"
        for end in ends:
            os.close(end)
        train(model, engine.bind_optimizer(adamw(model)), range(2))


def test_what_is_scratch_is_known_by_its_storage(tmp_path: Path) -> None:
    """Not by its address, which another one may have by then."""
    values = MappedFiles([tmp_path], 1 << 20).copy_of(torch.ones(4, 1024))
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        values.share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    others = []
    for number in range(4):
        (tmp_path / str(number)).write_bytes(bytes(values.nbytes))
        others.append(torch.from_file(str(tmp_path / str(number)), shared=True, size=values.numel()))
    assert not any(map(is_scratch, others))
    found, into = scratch_origin(values), torch.empty(values.nbytes, dtype=torch.uint8)
    assert found is not None
    found.load(0, into).wait()
    assert (into.view(torch.float32) == 1).all()
    assert (values == 1).all()


def test_what_was_written_in_a_scratch_file_is_read_from_it(tmp_path: Path) -> None:
    values = MappedFiles([tmp_path], 1 << 20).copy_of(torch.zeros(4, 1024))
    values[2, 5] = 7.0
    for part in (values, values[1:3]):
        found, into = scratch_origin(part), torch.empty(part.nbytes, dtype=torch.uint8)
        assert found is not None
        found.load(0, into).wait()
        assert torch.equal(into.view(torch.float32), part.reshape(-1))
    assert scratch_origin(values.t()) is None
    assert scratch_origin(values.clone()) is None
