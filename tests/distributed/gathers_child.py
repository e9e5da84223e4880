"""One of two processes: has several gathers of whole blocks under way at a time, which end in two of gloo's threads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
import ptm_accel.distributed.ranks as module
from ptm_accel.memory.cut import Cut
from ptm_accel.memory.traffic import PoolStats
from ptm_accel.model.groups import Piece, Share

ROUNDS, AT_ONCE, SIZES = 300, 8, (13, 40)


def share(ranks: module.Ranks) -> tuple[Share, int]:
    """A whole block of two members; and its elements."""
    pieces, start, own = [], 0, 0
    for numel in SIZES:
        cut = Cut(numel, ranks.count, ranks.rank)
        pieces.append(Piece(cut, start, own))
        start, own = start + cut.padded, own + cut.length
    values = torch.full((own,), float(ranks.rank + 1))
    place, extent = SimpleNamespace(resident=True), SimpleNamespace(tensor=values)
    block: Any = SimpleNamespace(name="layer", dtype=values.dtype, place=place, extent=extent)
    return Share(block, pieces), start


def coalesced(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("coalesced gathers corrupt the heap in gloo's threads, now and then")


def main() -> None:
    dist.init_process_group("gloo")
    module._coalescing_manager = coalesced
    ranks = module.Ranks(torch.device("cpu"), PoolStats())
    handle, numel = share(ranks)
    wholes = [torch.zeros(numel * 4, dtype=torch.uint8) for _ in range(AT_ONCE)]
    for _ in range(ROUNDS):
        gathers = [ranks.load(handle, 0, whole) for whole in wholes]
        for gather in gathers:
            gather.wait()
    for whole in wholes:
        values = whole.view(torch.float32)
        for piece in handle.pieces:
            cut, here = piece.cut, values[piece.start : piece.start + piece.cut.numel]
            expected = torch.arange(cut.numel) // cut.span + 1
            assert torch.equal(here, expected.float())
    sys.stdout.write(f"{ROUNDS * AT_ONCE} gathered\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
