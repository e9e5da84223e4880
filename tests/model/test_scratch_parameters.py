"""Parameters in files until they are on pages."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.mapped_files import MappedFiles, is_in_a_file
from ptm_accel.model.scratch_parameters import ScratchParameters

LIMIT = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> MappedFiles:
    return MappedFiles([tmp_path], LIMIT)


@pytest.fixture
def scratch(files: MappedFiles) -> ScratchParameters:
    return ScratchParameters(files, 1024)


@pytest.fixture
def installed(scratch: ScratchParameters, files: MappedFiles) -> Iterator[MappedFiles]:
    remove: Callable[[], None] = scratch.install()
    yield files
    remove()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16))


def test_values_are_those_without(installed: MappedFiles, tmp_path: Path) -> None:
    ours = net()
    held = [name for name, param in ours.named_parameters() if is_in_a_file(param)]
    assert held == ["0.weight", "1.weight", "3.weight"]
    assert installed.held_bytes == sum(dict(ours.named_parameters())[name].nbytes for name in held)
    assert not list(tmp_path.iterdir()), "the files have no names"
    with torch.no_grad():
        ours[1].weight[0, 0] = 5.0
    assert ours[1].weight[0, 0] == 5.0
    ours(torch.arange(8)).sum().backward()
    assert ours[1].weight.grad is not None


def test_the_same_random_numbers(scratch: ScratchParameters) -> None:
    plain = net()
    remove = scratch.install()
    ours = net()
    remove()
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    after = net()
    assert not any(is_in_a_file(param) for param in after.parameters()), "ended"


def test_what_goes_gives_its_room_back(installed: MappedFiles) -> None:
    first = net()
    twin = copy.deepcopy(first)
    assert all(map(torch.equal, first.parameters(), twin.parameters()))
    before = installed.held_bytes
    del first
    gc.collect()
    assert installed.held_bytes < before


def test_what_comes_onto_pages_leaves_its_file(installed: MappedFiles) -> None:
    model = net()
    assert installed.held_bytes
    values = [param.detach().clone() for param in model.parameters()]
    engine = Engine.attach(model, PTMConfig(host_memory="8MiB"), device=torch.device("cpu"))
    assert installed.held_bytes == 0, "also where all of it fits"
    assert all(map(torch.equal, model.state_dict().values(), values))
    engine.close()


def test_tied_parameters_stay_one(installed: MappedFiles) -> None:
    model = net()
    head = nn.Linear(16, 50, bias=False)
    head.weight = model[0].weight
    assert head.weight is model[0].weight
    assert head.weight.data_ptr() == model[0].weight.data_ptr()


def test_a_mapped_checkpoint_stays_where_it_is(installed: MappedFiles, tmp_path: Path) -> None:
    save_file({"w": torch.randn(64, 64)}, tmp_path / "w.safetensors")
    value = load_file(tmp_path / "w.safetensors")["w"]
    if not is_in_a_file(value):
        pytest.fail("safetensors does not map any more: what is read is copied now, which the docs should say")
    module = nn.Module()
    module.weight = nn.Parameter(value)
    assert module.weight.data_ptr() == value.data_ptr()
    assert installed.held_bytes == 0


def test_others_are_left_alone(installed: MappedFiles) -> None:
    module = nn.Module()
    module.small = nn.Parameter(torch.zeros(8))
    module.meta = nn.Parameter(torch.zeros(64, 64, device="meta"))
    module.turned = nn.Parameter(torch.zeros(64, 32).t())
    module.none = None
    module.register_parameter("nothing", None)
    assert installed.held_bytes == 0


def test_a_limit_is_kept(installed: MappedFiles) -> None:
    with pytest.raises(BudgetError, match=r"4.00 MiB of scratch files .* limit is 1.00 MiB; raise disk.limit"):
        nn.Linear(1024, 1024)
    assert installed.held_bytes == 0


def test_a_full_disk_is_an_error_and_not_the_end(
    installed: MappedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DiskError, match="has no room for .*; free space, or set another"):
        nn.Linear(64, 64)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(DiskError, match="disk: no scratch file can be made in"):
        MappedFiles([tmp_path], LIMIT).copy_of(torch.zeros(64, 64))


def test_what_the_system_writes_in_parts_is_whole(files: MappedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda descriptor, octets, offset: pwrite(descriptor, octets[:1000], offset))
    values = torch.arange(4096.0).view(64, 64)
    assert torch.equal(files.copy_of(values), values)


def test_a_copy_is_contiguous_and_of_the_values_that_are_shown(files: MappedFiles) -> None:
    turned = torch.arange(4096.0).view(32, 128).t()
    assert files.copy_of(turned).is_contiguous()
    assert torch.equal(files.copy_of(turned), turned)
    conjugate = torch.complex(torch.ones(64), torch.ones(64)).conj()
    assert torch.equal(files.copy_of(conjugate), conjugate)
