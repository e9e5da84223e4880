"""Files that several ranks write together are those that one process writes, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from ptm_accel.checkpoint import crc, shared_files
from ptm_accel.checkpoint.crc import sum_file, threads
from ptm_accel.checkpoint.shards import Described, header
from ptm_accel.checkpoint.shared_files import Owned, Pieces, SharedFile, Written, make_file
from ptm_accel.errors import CheckpointError, DiskError
from ptm_accel.memory.cut import Cut

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.float64]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """CRCs of so few bytes that most parts have borders of pieces in them."""
    for module in (crc, shared_files):
        monkeypatch.setattr(module, "PIECE_BYTES", 96)


def some_tensors(draw: random.Random) -> dict[str, torch.Tensor]:
    found = {}
    for number in range(draw.randint(1, 12)):
        shape = [draw.randint(0, 9) for _ in range(draw.randint(0, 3))]
        name = draw.choice([f"model.layers.{number}.w", f"ä{number}", f'q"{number}'])
        found[name] = torch.randint(0, 2, shape).to(draw.choice(DTYPES))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_headers_are_those_of_safetensors(seed: int, tmp_path: Path) -> None:
    tensors = some_tensors(random.Random(seed))
    safetensors.torch.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    ours, places = header({name: Described.of(tensor) for name, tensor in tensors.items()}, {"format": "pt"})
    assert (tmp_path / "theirs").read_bytes()[: len(ours)] == ours
    assert places.keys() == tensors.keys()


def written_by_ranks(file: SharedFile, tensors: dict[str, torch.Tensor], count: int) -> list[Written]:
    """What `count` ranks have written, one after the other."""
    every = []
    for rank in range(count):

        def owned(name: str, rank: int = rank) -> Owned:
            flat = tensors[name].reshape(-1)
            cut = Cut(flat.numel(), count, rank)
            return Owned(cut.start, flat[cut.start : cut.stop])

        told = file if rank == 0 else SharedFile(file.path, file.nbytes, file.runs)
        with threads() as pool:
            every += shared_files._write(told, owned, pool)
    return sorted(every)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_any_number_of_ranks_writes_what_one_process_writes(seed: int, count: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    small = some_tensors(draw)
    cut = {f"cut.{i}": torch.randn(draw.randint(1, 40), draw.randint(1, 40)) for i in range(draw.randint(1, 6))}
    safetensors.torch.save_file({**small, **cut}, tmp_path / "one", {"format": "pt"})
    pieces = {n: Pieces(Described.of(t), [(n, 0, t.numel())]) for n, t in cut.items()}
    file = make_file(tmp_path / "ranks", {**small, **pieces}, {"format": "pt"})
    written = written_by_ranks(file, cut, count)
    # A save that ends here, in a folder of somebody's, leaves no zeros that can be loaded.
    with pytest.raises(SafetensorError):
        safetensors.torch.load_file(tmp_path / "ranks")
    shared_files._write_head(file)
    assert (tmp_path / "ranks").read_bytes() == (tmp_path / "one").read_bytes()
    with threads() as pool:
        assert shared_files._sum_of(file, written) == sum_file(tmp_path / "one", pool)


def test_a_tensor_may_be_made_of_parts_of_others(tmp_path: Path) -> None:
    source = {"fused": torch.randn(6, 64)}
    swapped = torch.cat([source["fused"][3:], source["fused"][:3]])
    pieces = Pieces(Described.of(swapped), [("fused", 3 * 64, 3 * 64), ("fused", 0, 3 * 64)])
    file = make_file(tmp_path / "ranks", {"swapped": pieces}, {})
    shared_files._sum_of(file, written_by_ranks(file, source, 3))
    shared_files._write_head(file)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "ranks")["swapped"], swapped)


@pytest.mark.parametrize(
    ("ranges", "byte"),
    [([(0, 40), (50, 50)], 40), ([(0, 40), (30, 70)], 30), ([(0, 40)], 40), ([(0, 100), (60, 40)], 60), ([], 0)],
)
def test_a_byte_that_nobody_or_two_have_written_is_an_error(
    ranges: list[tuple[int, int]], byte: int, tmp_path: Path
) -> None:
    file = SharedFile(tmp_path / "model.safetensors", 100, [])
    with pytest.raises(CheckpointError, match=rf"model.safetensors was not written as a whole: byte {byte} of 100"):
        shared_files._sum_of(file, [Written(start, nbytes, 0) for start, nbytes in ranges])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = SharedFile(tmp_path / "missing" / "model.safetensors", 0, [])
    with threads() as pool, pytest.raises(DiskError, match=r"cannot write model.safetensors: No such file"):
        shared_files._write(file, lambda name: Owned(0, torch.empty(0)), pool)
