"""Handing out the tensors of a checkpoint reads next to nothing of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ptm_accel.integrations.transformers.first_pages import lay_first_pages, opening_lightly
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

TENSORS, TENSOR_BYTES = 4, 8 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    values = {f"t{index}": torch.full((TENSOR_BYTES // 4,), float(index)) for index in range(TENSORS)}
    save_file(values, file, metadata={"format": "pt"})
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return file


def resident_pages(file: Path) -> int:
    """How many pages of a file are in the page cache."""
    size = file.stat().st_size
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
        found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_ubyte.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found)
        del first
    assert not failed, ctypes.get_errno()
    return sum(page & 1 for page in found)


def hand_out(file: Path, open_file: Callable[..., Any]) -> dict[str, torch.Tensor]:
    with open_file(file, framework="pt") as opened:
        return {name: opened.get_slice(name)[...] for name in opened.keys()}  # noqa: SIM118


def test_tensors_are_handed_out_and_not_read(checkpoint: Path) -> None:
    if resident_pages(checkpoint):
        pytest.skip("this file system does not let go of its pages")
    tensors = hand_out(checkpoint, opening_lightly(safe_open))
    assert resident_pages(checkpoint) * mmap.PAGESIZE < TENSORS * TENSOR_BYTES // 16
    assert [tensors[f"t{index}"].unique().tolist() for index in range(TENSORS)] == [[float(i)] for i in range(TENSORS)]


def test_each_tensor_is_met(checkpoint: Path) -> None:
    assert lay_first_pages(checkpoint) == TENSORS


@pytest.mark.parametrize(
    "octets", [b"", b"\xff" * 64, b"\x08" + bytes(7) + b"not json", b"\x0b" + bytes(7) + b'{"t": 1234}']
)
def test_of_a_damaged_file_the_original_speaks(octets: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(octets)
    with pytest.raises(SafetensorError):
        hand_out(file, opening_lightly(safe_open))


def test_a_header_of_impossible_length_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="a header of 18446744073709551615 bytes"):
        lay_first_pages(file)


def test_of_a_missing_file_the_original_speaks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hand_out(tmp_path / "none.safetensors", opening_lightly(safe_open))
