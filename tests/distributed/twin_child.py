"""One of several processes: trains with the twin and with DDP, and compares."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.distributed.cases import DTYPES, SMALL_BYTES, Case
from tests.distributed.plain_ranks import Record, assert_alike, ddp, train_plain, twin
from tests.distributed.twin import is_cut, norm_by_ranges, span

CASES = (
    Case(),
    Case(dtype="bf16", clip=0.5, checkpointing="reentrant"),
    Case("branches", optimizer="sgd"),
    Case("llama-tied", clip=0.5, shard="none"),
    Case("lora"),
    Case("t5", masters=True, dtype="bf16", clip=0.5),
)


def reduce_scatter_adds_in_the_order_of_the_padded_buffer(dtype: torch.dtype) -> None:
    """What the twin stands for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for numel in (1, 100, 257 * 96, 211 * 96):
        flat = torch.zeros(ranks * span(numel, ranks), dtype=dtype)
        flat[:numel] = torch.randn(numel, generator=torch.Generator().manual_seed(numel + rank)).to(dtype)
        own = torch.empty(span(numel, ranks), dtype=dtype)
        dist.reduce_scatter_tensor(own, flat.clone())
        dist.all_reduce(flat)
        assert torch.equal(own, flat[rank * own.numel() :][: own.numel()]), numel


def norms_of_ranges_are_those_of_whole_gradients_but_for_rounding() -> None:
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        for numel in (100, 257 * 96, 211 * 96):
            grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            whole = torch.linalg.vector_norm(grad)
            norm = norm_by_ranges(nn.Parameter(grad), grad, SMALL_BYTES, wide=False)
            assert norm.dtype == dtype
            assert abs(norm.item() - whole.item()) <= bound * whole.item(), (dtype, numel, norm, whole)


def weights_are_one_on_all_ranks(record: Record) -> None:
    everyone: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, record.weights)
    for other in everyone:
        assert all(torch.equal(other[name], weight) for name, weight in record.weights.items())


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES.values():
        reduce_scatter_adds_in_the_order_of_the_padded_buffer(dtype)
    norms_of_ranges_are_those_of_whole_gradients_but_for_rounding()
    assert is_cut(torch.empty(257), 2, 1028), "a size at the bound is cut"
    assert not is_cut(torch.empty(257), 2, 1029), "one below is not"
    assert is_cut(torch.empty(129), 3, 0), "the last rank has one element"
    assert not is_cut(torch.empty(128), 3, 0), "the last rank would have nothing"
    if ranks == 2:
        for case in CASES:
            assert_alike(case, train_plain(case, twin), train_plain(case, ddp))
        compared = len(CASES)
    else:
        case = Case("branches", accumulation=3)
        ours, theirs = train_plain(case, twin), train_plain(case, ddp)
        weights_are_one_on_all_ranks(ours)
        off = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))
        assert off < 1e-5, off
        compared = 1
    sys.stdout.write(f"rank {rank}: {compared} agree\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
