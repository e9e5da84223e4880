"""Pages of files that are forgotten: what somebody has written is kept, whoever asks."""

from __future__ import annotations

import builtins
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from ptm_accel.memory.mapping import forget_unwritten
from ptm_accel.memory.page_map import page_map

PAGES = 6
SIZE = PAGES * mmap.PAGESIZE


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    (tmp_path / "file").write_bytes(b"a" * SIZE)
    values = torch.from_file(str(tmp_path / "file"), shared=False, size=SIZE, dtype=torch.uint8)
    assert int(values.max()) == ord("a"), "all of it was read"
    return values


def present(values: torch.Tensor) -> list[bool]:
    pages = page_map(values.data_ptr(), values.data_ptr() + values.nbytes)
    assert pages is not None
    return list(pages.of_file)


@pytest.mark.parametrize(("skip", "left"), [(0, []), (1, [0, PAGES - 1]), (mmap.PAGESIZE, [0, PAGES - 1])])
def test_whole_pages_alone_are_forgotten(mapped: torch.Tensor, skip: int, left: list[int]) -> None:
    assert all(present(mapped))
    assert forget_unwritten(mapped.data_ptr() + skip, SIZE - 2 * skip)
    assert [page for page, there in enumerate(present(mapped)) if there] == left
    assert int(mapped.min()) == ord("a"), "they are read again"


@pytest.mark.parametrize("page", [0, 3, PAGES - 1])
def test_what_was_written_is_kept(mapped: torch.Tensor, page: int) -> None:
    mapped[page * mmap.PAGESIZE] = 7
    assert not forget_unwritten(mapped.data_ptr(), SIZE)
    assert int(mapped[page * mmap.PAGESIZE]) == 7


def test_what_is_of_no_file_is_kept() -> None:
    values = torch.ones(SIZE, dtype=torch.uint8)
    assert not forget_unwritten(values.data_ptr(), SIZE)
    assert bool(values.all())


def test_less_than_a_page_is_nothing(mapped: torch.Tensor) -> None:
    assert not forget_unwritten(mapped.data_ptr() + 1, mmap.PAGESIZE)
    assert all(present(mapped))


@pytest.mark.parametrize("shown", ["/dev/null", "/dev/zero", "/nowhere"], ids=["ends", "tells_nothing", "is_not_there"])
def test_where_the_system_tells_nothing_nothing_is_forgotten(
    mapped: torch.Tensor, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    original: Any = builtins.open

    def other(name: Any, *rest: Any, **options: Any) -> Any:
        return original(shown if name == "/proc/self/pagemap" else name, *rest, **options)

    mapped.fill_(7)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", other)
        assert not forget_unwritten(mapped.data_ptr(), SIZE)
    assert int(mapped.min()) == 7
