"""The median time of a step of a small Llama, in one process. To compare two checkouts, run it in turn with each.

OMP_WAIT_POLICY=passive python tests/benchmarks/step_time.py memory --hidden 64
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine

LAYERS, WORDS, BATCH = 16, 512, (2, 64)
SHARES = {"memory": 3.0, "stream": 0.3}
"""Of the states' 16 bytes a parameter, what `host_memory` is."""


def main() -> None:
    """Prints seconds a step, on the clock and of the thread that trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["plain", *SHARES])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": given.hidden, "intermediate_size": given.hidden * 11 // 4, "num_hidden_layers": LAYERS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=WORDS))
    words = torch.randint(0, WORDS, BATCH)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with tempfile.TemporaryDirectory() as folder:
        engine: Any = None
        if given.kind != "plain":
            states = 16 * sum(param.numel() for param in model.parameters())
            page = 4096 if given.hidden <= 64 else 1 << 20
            config = PTMConfig(host_memory=int(SHARES[given.kind] * states), page_size=page, disk=folder)
            engine = Engine.attach(model, config)
            optimizer = engine.bind_optimizer(optimizer)
        taken, busy = [], 0.0
        for number in range(given.warm + given.steps):
            if number == given.warm:
                busy = time.thread_time()
            begun = time.perf_counter()
            model(input_ids=words, labels=words).loss.backward()
            if engine is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.perf_counter() - begun)
        busy = (time.thread_time() - busy) / given.steps
        sys.stdout.write(f"{statistics.median(taken[given.warm :]):.4f} s a step, thread {busy:.4f} s\n")
        if engine is not None:
            engine.settle()
            engine.detach()


if __name__ == "__main__":
    main()
