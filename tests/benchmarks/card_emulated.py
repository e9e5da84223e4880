"""How pages and activations share a card, on a card that is emulated by the rules of torch's allocator.

    OMP_WAIT_POLICY=passive python tests/benchmarks/card_emulated.py [1b 8b] [--cards 8GB 16GB]

Models, batches and cards are those of `card.py`, an eighth as large in each dimension, so that every tensor and every
rule of the allocator is smaller by 64; figures are given times 64, as they would be on the card. Nothing is timed: the
"device" is the CPU. Each step's losses are compared with those of the plain model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from card import SHAPES, llama
from machine_facts import facts
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.activation_reserve import ActivationReserve
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.units import GIB, MIB, parse_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.card import Card, CardTier, OnCard

SMALLER, SCALE = 8, 64
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"
WORKSPACE = {"1b": 144 * MIB, "8b": 160 * MIB}
"""What attention's backward takes on an H100 where it has to repeat itself: a sum of fp32 for each part of the card."""


def model_of(name: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = llama(name).to_dict()
    for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"):
        config[key] = config[key] // SMALLER
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def steps(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, name: str, count: int) -> Iterator[float]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        length = SHAPES[name][1] // SMALLER
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def adamw(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def paged(name: str, card_bytes: int, count: int, expected: list[float]) -> list[str]:
    """The cells of a row."""
    card, model, losses = Card(card_bytes // SCALE, SCALE), model_of(name), list[float]()
    states = 4 * sum(p.nbytes for p in model.parameters()) * SCALE
    capacities = Capacities(page_bytes=4 * MIB // SCALE, host_bytes=4 * GIB, device_bytes=card_bytes // SCALE)
    memory = build_memory(capacities, tier := CardTier(card, SCALE))
    engine = Engine.attach(model, PTMConfig(page_size=4 * MIB // SCALE), memory=memory)
    pool, failed = engine.pool, ""
    assert pool.card is not None
    assert isinstance(pool.admission.activation_reserve, ActivationReserve)
    flushes, card.peak_reserved = card.flushes, card.reserved
    before = tier.counts["bytes_in"], pool.stats.faults, pool.stats.hits
    with OnCard(card, {ATTENTION: WORKSPACE[name] // SCALE}):
        optimizer = engine.bind_optimizer(adamw(model))
        try:
            for number, loss in enumerate(steps(model, optimizer, name, count)):
                losses.append(loss)
                if number == count - 2:
                    before = tier.counts["bytes_in"], pool.stats.faults, pool.stats.hits
        except torch.OutOfMemoryError as error:
            failed = str(error)
    with _disable_current_modes():
        cells = [f"{name}, {card_bytes / GIB:.2f} GiB", f"{states / GIB:.2f}"]
        cells += [
            f"{SCALE * nbytes / GIB:.2f}"
            for nbytes in (pool.card.held_bytes, pool.admission.activation_reserve.high_water_bytes)
        ]
        cells += [f"{SCALE * card.peak_reserved / GIB:.2f}", str(card.flushes - flushes)]
        cells.append(f"{SCALE * (tier.counts['bytes_in'] - before[0]) / GIB:.2f}")
        cells.append(f"{pool.stats.faults - before[1]} / {pool.stats.hits - before[2]}")
        cells.append(failed or ("bit-identical" if losses == expected else "DIFFERENT"))
        engine.close()
    memory.close()
    return cells


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=["1b", "8b"])
    parser.add_argument("--cards", nargs="*", default=["3GB", "5GB", "8GB", "16GB", "24GB"])
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    print("# A card that is too small, emulated\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/card_emulated.py {' '.join(sys.argv[1:])}".rstrip()))
    print("\nSizes in GiB, as they would be on the card; the last step of", options.steps, "for what is a step's.\n")
    print(
        "| shape, card | states | pages hold | most beside them | most reserved | limit met | loaded, a step | "
        "faults / sent for ahead, a step | losses |\n|" + " --- |" * 9
    )
    for name in options.shapes:
        expected = list(steps(model := model_of(name), adamw(model), name, options.steps))
        del model
        for card in options.cards:
            nbytes = parse_bytes(card, total_bytes=1 << 40)
            try:
                cells = paged(name, nbytes, options.steps, expected)
            except RuntimeError as error:
                cells = [f"{name}, {nbytes / GIB:.2f} GiB", f"refused: {error}"]
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
