"""Too little RAM under a device: what there is no room for passes the SSD, and not all that moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.frame_order import FrameOrder
from ptm_accel.units import MIB
from tests.tiers import on_pages

STEPS, WARM_UP = 9, 4
DEVICE, HOST = 5 * MIB, 9 * MIB


def model_of() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 256, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def steps(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Trains, and yields the loss of each step."""
    for number in range(STEPS):
        ids = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def adamw(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def paged(directory: Path) -> tuple[list[float], float, float]:
    """Returns the losses, and the bytes that a step reads from the SSD and that there is no room for in RAM."""
    model, losses, totals = model_of(), [], [0]
    with on_pages(model, "mock+host+disk", DEVICE, directory, host_bytes=HOST, page_size=16 << 10) as engine:
        engine.run_ahead.rates = LinkRates(2e8, 2e8, 4e8)
        disk = engine.memory.disk
        assert disk is not None
        for loss in steps(model, engine.bind_optimizer(adamw(model))):
            losses.append(loss)
            totals.append(disk.bytes_read)
        away = sum(tensor.slot_bytes for tensor in engine.pool.tensors() if tensor.handle is not None)
    return losses, (totals[-1] - totals[WARM_UP]) / (STEPS - WARM_UP), away - HOST


def test_pages_leave_ram_by_their_next_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, read, missing = paged(tmp_path)
    model = model_of()
    assert losses == list(steps(model, adamw(model)))
    with monkeypatch.context() as patched:
        patched.setattr(FrameOrder, "end_step", lambda self, model: None)
        again, by_last_use, _ = paged(tmp_path)
    assert again == losses
    assert 0 < read < 0.6 * by_last_use
    assert read < 1.5 * missing
