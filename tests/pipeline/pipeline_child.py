"""One of the processes of a pipeline: trains its stage on pages, and compares losses with the whole model's.

Started by torchrun with one argument: a folder for pages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.pipeline.runner import Pipeline
from ptm_accel.pipeline.stage import Stage

STEPS, WIDTH, LENGTH, VOCABULARY = 20, 48, 40, 64
SLICES = (16, 1, 13, 10)


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, use_cache=False, **sizes))


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    whole = build()
    stage = Stage(build(), rank, stages)
    pipeline = Pipeline(stage, WIDTH, torch.float32, torch.device("cpu"))
    engine = Engine.attach(stage.model, PTMConfig(host_memory="512KiB", page_size=4096, disk=str(folder)))
    optimizer = engine.bind_optimizer(torch.optim.AdamW(stage.model.parameters(), lr=1e-3))
    plain = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    for number in range(STEPS):
        loss = pipeline.step(batch(number), [(1, SLICES), (1, SLICES[::-1])]).item()
        own = engine.clip_grad_norm_(float("inf"))
        norm = torch.stack(pipeline.norms(own)).square().sum().sqrt()
        # The factor that the norm over all stages has, by one that is over this stage alone.
        engine.clip_grad_norm_(float(own / norm))
        optimizer.step()
        optimizer.zero_grad()
        wanted = whole(**batch(number)).loss
        wanted.backward()
        plain_norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        assert abs(loss - wanted.item()) <= 1e-5 * wanted.item(), (number, loss, wanted.item())
        assert abs(norm - plain_norm) <= 1e-4 * plain_norm, (number, norm, plain_norm)
    engine.close()
    sys.stdout.write(f"stage {rank} agrees over {STEPS} steps\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
