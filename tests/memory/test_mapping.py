"""Advice on mappings of files."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from ptm_accel.memory.mapping import forget_whole_pages

PAGES = 6


@pytest.mark.parametrize(
    ("skip", "forgotten"), [(0, range(PAGES)), (1, range(1, PAGES - 1)), (mmap.PAGESIZE, range(1, 5))]
)
def test_whole_pages_alone_are_forgotten(skip: int, forgotten: range, tmp_path: Path) -> None:
    size = PAGES * mmap.PAGESIZE
    (tmp_path / "file").write_bytes(b"a" * size)
    mapped = torch.from_file(str(tmp_path / "file"), shared=False, size=size, dtype=torch.uint8)
    mapped.fill_(ord("b"))
    forget_whole_pages(mapped.data_ptr() + skip, size - 2 * skip)
    read = bytes(mapped.numpy()[:: mmap.PAGESIZE])
    assert read == b"".join(b"a" if page in forgotten else b"b" for page in range(PAGES))
    assert (tmp_path / "file").read_bytes() == b"a" * size


def test_less_than_a_page_is_nothing() -> None:
    values = torch.ones(3 * mmap.PAGESIZE, dtype=torch.uint8)
    forget_whole_pages(values.data_ptr() + 1, 10)
    assert bool(values.all())
