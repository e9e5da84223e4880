"""What `sharding.py` measures: one Llama as several contenders train it, and the collectives of one of them."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import ptm_accel
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine

VOCABULARY, LAYERS, PROCESSES, STEPS = 8192, 8, 2, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROOMY = "4GiB"
ROOT = str(Path(ptm_accel.__file__).parent)


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """69M parameters, the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "num_attention_heads": 12}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, use_cache=False)).to(dtype)


class Trained:
    """One of the contenders.

    Attributes:
        engine: of what is on pages; None for the others.
    """

    def __init__(
        self, kind: str, asked: argparse.Namespace, host_memory: str | int = ROOMY, disk: str | None = None
    ) -> None:
        model = llama(DTYPES[asked.dtype])
        self.engine: Engine | None = None
        self.called: Any = model
        if kind == "ptm_accel":
            config = PTMConfig(shard="full", host_memory=host_memory, disk=disk)
            self.engine = Engine.attach(model, config, device=torch.device("cpu"))
            if dist.is_initialized():
                self.engine.training.replicate()
        elif kind == "FSDP2":
            mesh = init_device_mesh("cpu", (PROCESSES,))
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh, reshard_after_forward=True)
        else:
            self.called = DistributedDataParallel(model)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.optimizer = adamw if self.engine is None else self.engine.bind_optimizer(adamw)
        clip = torch.nn.utils.clip_grad_norm_
        self.clip: Callable[[], Any] = (
            partial(clip, list(model.parameters()), 1.0)
            if self.engine is None
            else partial(self.engine.clip_grad_norm_, 1.0)
        )
        generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.tokens = torch.randint(0, VOCABULARY, (1, asked.length), generator=generator)

    def step(self, *, sends: bool = True) -> float:
        """One step; returns the loss."""
        with nullcontext() if sends else self.called.no_sync():
            loss = self.called(input_ids=self.tokens, labels=self.tokens).loss
            loss.backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def timed(self, *, sends: bool = True) -> float:
        """The median of a few steps, all of their updates made."""
        took = []
        dist.barrier()
        for number in range(STEPS):
            begin = time.perf_counter()
            self.step(sends=sends)
            if self.engine is not None and number == STEPS - 1:
                self.engine.settle()
            took.append(time.perf_counter() - begin)
        dist.barrier()
        return statistics.median(took)


class Replayed:
    """The collectives of one step on pages, called again on memory of the same sizes.

    Args:
        trained: the contender on pages.
    """

    def __init__(self, trained: Trained) -> None:
        assert trained.engine is not None
        assert trained.engine.training.shards is not None
        ranks: Any = trained.engine.training.shards.ranks
        self._calls: list[tuple[Any, Any, list[tuple[int, int]]]] = []
        self._started = ranks._started

        def note(collective: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: Any, what: str) -> Any:
            self._calls.append((collective, group, [(target.nbytes, source.nbytes) for target, source in pairs]))
            return self._started(collective, pairs, group, what)

        ranks._started = note
        trained.step()
        del ranks._started
        most = max(sum(max(pair) for pair in sizes) for _, _, sizes in self._calls)
        self._targets, self._sources = (torch.zeros(most, dtype=torch.uint8) for _ in range(2))
        self._dtype = next(trained.called.parameters()).dtype

    def timed(self) -> float:
        """One after the other, each waited for."""
        dist.barrier()
        begin = time.perf_counter()
        for collective, group, sizes in self._calls:
            at, pairs = 0, []
            for target, source in sizes:
                into, given = self._targets[at : at + target], self._sources[at : at + source]
                pairs.append((into.view(self._dtype), given.view(self._dtype)))
                at += max(target, source)
            self._started(collective, pairs, group, "measures").wait()
        took = time.perf_counter() - begin
        dist.barrier()
        return took


def counted(trained: Trained) -> Counter[str]:
    """Calls of our functions in the training thread in one step, by function."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            calls[f"{'/'.join(Path(code.co_filename).parts[-2:])}: {code.co_qualname}"] += 1

    sys.setprofile(note)
    trained.step()
    sys.setprofile(None)
    return calls
