"""CRC-32 by pieces: of files, of what is written, and of neighbouring ranges."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from ptm_accel.checkpoint import crc, shards
from ptm_accel.checkpoint.crc import FileSum, combine, sum_file, threads


def expected(data: bytes, piece: int) -> FileSum:
    return FileSum(len(data), tuple(zlib.crc32(data[at : at + piece]) for at in range(0, len(data), piece)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces of a kilobyte, read by 300 bytes."""
    monkeypatch.setattr(crc, "PIECE_BYTES", 1000)
    monkeypatch.setattr(shards, "PIECE_BYTES", 1000)
    monkeypatch.setattr(crc, "_READ_BYTES", 300)
    return 1000


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_combine(seed: int) -> None:
    chance = random.Random(seed)
    data = chance.randbytes(chance.choice([0, 1, 2, 31, 1000, 70_000]))
    cuts = sorted(chance.choices(range(len(data) + 1), k=chance.randrange(6)))
    whole = 0
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        whole = combine(whole, zlib.crc32(data[begin:end]), end - begin)
    assert whole == zlib.crc32(data)


def test_neighbours_of_great_length_combine() -> None:
    zeros = bytes(1 << 20)
    behind = 0
    for _ in range(64):
        behind = zlib.crc32(zeros, behind)
    both = zlib.crc32(b"before")
    for _ in range(64):
        both = zlib.crc32(zeros, both)
    assert combine(zlib.crc32(b"before"), behind, 64 << 20) == both


@pytest.mark.parametrize("nbytes", [0, 1, 249, 250, 999, 1000, 1001, 4000, 12_345])
def test_a_file_is_summed_by_pieces(nbytes: int, small: int, tmp_path: Path) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    (tmp_path / "a").write_bytes(data)
    with threads() as pool:
        assert sum_file(tmp_path / "a", pool) == expected(data, small)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with threads() as pool:
        for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
            with pytest.raises(OSError, match="it is no regular file"):
                sum_file(path, pool)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float16]


def test_shards_are_those_of_safetensors(small: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"{dtype} ü {size}": torch.randn(size, 3).to(dtype) for dtype in DTYPES for size in (0, 1, 70)}
    tensors["a number"] = torch.tensor(3.0)
    sums: dict[str, FileSum] = {}
    shards.save_file(tensors, tmp_path / "a", {"format": "pt"}, sums)
    assert sums == {"a": expected((tmp_path / "a").read_bytes(), small)}
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert read.keys() == tensors.keys()
    assert all(value.dtype == tensors[name].dtype and torch.equal(value, tensors[name]) for name, value in read.items())


def test_a_shard_of_one_dtype_has_the_bytes_of_safetensors(tmp_path: Path) -> None:
    tensors = {name: torch.randn(5, 7) for name in ("b", "a/exp_avg", "c.weight/step")}
    shards.save_file(tensors, tmp_path / "ours", {"format": "pt"}, {})
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_shard_without_tensors(tmp_path: Path) -> None:
    shards.save_file({}, tmp_path / "a", {}, {})
    assert safetensors.torch.load_file(tmp_path / "a") == {}
