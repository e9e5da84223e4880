"""Too little RAM under a device: what there is no room for passes the SSD, and not all that moves."""

from __future__ import annotations

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


def batches() -> list[torch.Tensor]:
    return [torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(n)) for n in range(STEPS)]


def plain() -> list[float]:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for ids in batches():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def paged(directory: Path) -> tuple[list[float], float, float]:
    """Returns the losses, and the bytes that a step reads from the SSD and that there is no room for in RAM."""
    model, losses, read = model_of(), [], []
    with on_pages(model, "mock+host+disk", DEVICE, directory, host_bytes=HOST, page_size=16 << 10) as engine:
        engine.run_ahead.rates = LinkRates(2e8, 2e8, 4e8)
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        disk = engine.memory.disk
        assert disk is not None
        for ids in batches():
            before = disk.bytes_read
            loss = model(input_ids=ids, labels=ids).loss
            with engine.training.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            read.append(disk.bytes_read - before)
        away = sum(tensor.slot_bytes for tensor in engine.pool.tensors() if tensor.handle is not None)
    return losses, sum(read[WARM_UP:]) / len(read[WARM_UP:]), away - HOST


def test_pages_leave_ram_by_their_next_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, read, missing = paged(tmp_path)
    assert losses == plain()
    with monkeypatch.context() as patched:
        patched.setattr(FrameOrder, "end_step", lambda self, model: None)
        again, by_last_use, _ = paged(tmp_path)
    assert again == losses
    assert 0 < read < 0.6 * by_last_use
    assert read < 1.5 * missing
