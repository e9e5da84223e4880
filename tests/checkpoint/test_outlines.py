"""Outlines: what ordinary code makes of them is made of the elements that it would have made it of."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ptm_accel.checkpoint.outlines import NeedsValuesError, Outlines
from ptm_accel.checkpoint.shared_files import Pieces

Step = Callable[[torch.Tensor], torch.Tensor]


def values_of(pieces: torch.Tensor | Pieces, flat: dict[str, torch.Tensor]) -> torch.Tensor:
    assert isinstance(pieces, Pieces)
    parts = [flat[source][start : start + count] for source, start, count in pieces.parts]
    return torch.cat([*parts, next(iter(flat.values()))[:0]]).view(pieces.described.shape)


def a_step(draw: random.Random, tensor: torch.Tensor) -> Step:
    """Something that saving code may do to a tensor, with the same arguments whatever it is done to."""
    dim = draw.randrange(tensor.dim())
    if draw.random() < 0.3:
        return lambda t: t.contiguous()
    if draw.random() < 0.3:
        return lambda t: t.clone()
    if draw.random() < 0.4 and tensor.dim() < 4 and tensor.shape[0] % 2 == 0:
        return lambda t: t.reshape(2, -1, *t.shape[1:]).transpose(0, 1).reshape(t.shape)
    count = draw.randint(1, tensor.shape[dim])
    number = draw.randrange(count)
    return lambda t: (parts := torch.chunk(t, count, dim=dim))[min(number, len(parts) - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_views_and_copies_are_of_the_same_elements(seed: int) -> None:
    draw = random.Random(seed)
    real = torch.randn(draw.choice([2, 4, 6]), draw.choice([4, 8]), 64)
    outlines = Outlines()
    with outlines:
        outlined = outlines.of("w", real.shape, real.dtype)
        flat = {"w": real.reshape(-1)}
        steps = draw.randint(1, 6)
        for number in range(steps + 1):
            step: Step = a_step(draw, real) if number < steps else torch.Tensor.contiguous
            try:
                outlined, real = step(outlined), step(real)
            except NeedsValuesError:
                # Rows of the view are short: ordinary values are saved then.
                assert outlines.asked is not None
                return
    assert torch.equal(values_of(outlines.described({"x": outlined})["x"], flat), real)


def test_experts_are_taken_apart_without_values() -> None:
    fused = torch.arange(4 * 6 * 64, dtype=torch.float32).view(4, 6, 64)
    outlines = Outlines()
    with outlines:
        outlined = outlines.of("experts", fused.shape, fused.dtype)
        split = [half.contiguous() for half in torch.chunk(outlined, 2, dim=1)]
        found = {f"{i}.{e}": one.squeeze(0) for i, half in enumerate(split) for e, one in enumerate(half.chunk(4))}
    for name, pieces in outlines.described(found).items():
        half, expert = map(int, name.split("."))
        assert isinstance(pieces, Pieces)
        assert len(pieces.parts) == 1
        flat = {"experts": fused.reshape(-1)}
        assert torch.equal(values_of(pieces, flat), fused[expert, 3 * half : 3 * half + 3])


def test_tied_names_have_one_storage_and_others_have_their_own() -> None:
    outlines = Outlines()
    one = outlines.of("one", torch.Size([8]), torch.float32)
    other = outlines.of("other", torch.Size([8]), torch.float32)
    assert one.untyped_storage().data_ptr() == one.detach().untyped_storage().data_ptr()
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert one.untyped_storage().nbytes() == 32


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t + 1,
        lambda t: t.to(torch.bfloat16),
        lambda t: t.sum().item(),
        lambda t: torch.equal(t, t),
        lambda t: t.transpose(0, 1).contiguous(),
        lambda t: t.copy_(torch.zeros(16, 16)),
        lambda t: torch.zeros(16, 16).copy_(t),
        lambda t: t[t[:, 0] > 0],
    ],
)
def test_what_reads_or_writes_values_is_refused_and_remembered(read: Callable[[torch.Tensor], object]) -> None:
    outlines = Outlines()
    with outlines, pytest.raises(NeedsValuesError):
        read(outlines.of("w", torch.Size([16, 16]), torch.float32))
    assert outlines.asked is not None


def test_what_is_no_outline_is_as_ever() -> None:
    outlines = Outlines()
    with outlines:
        outlines.of("w", torch.Size([16, 16]), torch.float32)
        values = torch.ones(3) + 1
    assert torch.equal(outlines.described({"x": values})["x"], torch.full((3,), 2.0))
    assert outlines.asked is None


def test_an_outline_takes_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    outlines = Outlines()
    before = resident()
    with outlines:
        made = [outlines.of(str(i), torch.Size([1 << 28]), torch.float32).view(1 << 14, -1).clone() for i in range(4)]
    assert resident() - before < 64 << 20
    assert len(made) == 4
