"""What every contender of `peers.py` shares: model, initial weights, data, clock, and the line it reports.

Needs torch and transformers' models only: DeepSpeed lives in an environment of its own, and the script over mapped
files is spared the memory that importing the Trainer takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, initialization
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

REPORT = "PEER "
LEARNING_RATE = 1e-4
DROPPED_STEPS = 6
"""Steps at the start that are not counted: first touch of memory, what is built on first use, plans not settled."""

SHAPES = {
    "222m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16},
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4},
}
CHECKPOINTED = ("1b",)
"""Shapes trained with activation checkpointing, by every contender."""


@dataclass(frozen=True)
class Spec:
    """One process's task.

    Attributes:
        kind: who trains.
        shape: a key of `SHAPES`.
        layers: number of layers; None for the shape's own.
        steps: how many.
        directory: where files go; removed afterwards.
        host_memory: the budget of ptm_accel; others have none to set.
        clip: the largest gradient norm; 0 for no clipping.
        batch: rows in a batch.
        length: tokens in a row.
        fp32: everyone computes in fp32, where the cores are too slow at bf16.
        beside_mib: what a process of ptm_accel takes beside its budget; None for what was measured with batch 4 x 128.
        extra: what else a kind needs.
    """

    kind: str
    shape: str
    steps: int
    directory: str
    layers: int | None = None
    host_memory: str = ""
    clip: float = 1.0
    batch: int = 4
    length: int = 128
    fp32: bool = False
    beside_mib: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Spec:
        return cls(**json.loads(text))

    @property
    def checkpointing(self) -> bool:
        return self.shape in CHECKPOINTED

    def config(self) -> LlamaConfig:
        sizes = dict(SHAPES[self.shape])
        if self.layers is not None:
            sizes["num_hidden_layers"] = self.layers
        return LlamaConfig(vocab_size=8192, use_cache=False, **sizes)


def parameters_of(shape: str, layers: int | None = None) -> int:
    """How many parameters the Llama of this shape has."""
    sizes = SHAPES[shape]
    hidden, wide = sizes["hidden_size"], sizes["intermediate_size"]
    count = sizes["num_hidden_layers"] if layers is None else layers
    return count * (4 * hidden * hidden + 3 * hidden * wide + 2 * hidden) + hidden + 2 * 8192 * hidden


def same_initial_weights() -> None:
    """Makes the initial values a function of the tensor's name, whatever builds the model, in which order and dtype.

    They are drawn in bf16, so that fp32 parameters and fp32 masters begin with the values of the bf16 ones.
    """
    original = LlamaPreTrainedModel._init_weights

    def initialise(self: LlamaPreTrainedModel, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            original(self, module)
            return
        name = next(name for name, other in self.named_modules() if other is module).removeprefix("model.")
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = module.weight
        drawn = torch.empty(weight.shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        initialization.copy_(weight, drawn)

    LlamaPreTrainedModel._init_weights = initialise


def plain_model(spec: Spec, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model in ordinary memory."""
    same_initial_weights()
    return LlamaForCausalLM._from_config(spec.config(), dtype=dtype)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same for everyone, in order."""

    def __init__(self, spec: Spec) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, 8192, (spec.batch * spec.steps, spec.length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def status_bytes(key: str) -> int:
    """A line of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def disk_bytes() -> tuple[int, int]:
    """Bytes this process has read from and written to block devices so far; dirtied mapped pages count as written."""
    with contextlib.suppress(OSError):
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["read_bytes"]), int(counts["write_bytes"])
    return 0, 0


class Watch:
    """Times the steps of a run, end to end, and keeps its losses, disk traffic and largest anonymous memory.

    From the end of one step to the end of the next: work that a step leaves to the next one is counted.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.traffic: list[tuple[int, int]] = []
        self.losses: list[float] = []
        self.bounds: list[float | None] = []
        self.anonymous = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            self.anonymous = max(self.anonymous, status_bytes("RssAnon"))

    def begin(self) -> None:
        self._thread.start()
        self.mark()

    def mark(self) -> None:
        self.ends.append(time.perf_counter())
        self.traffic.append(disk_bytes())

    def report(self, **more: Any) -> None:
        """Prints the line that the parent looks for."""
        self._done.set()
        steps = [after - before for before, after in zip(self.ends[:-1], self.ends[1:], strict=True)]
        first = min(DROPPED_STEPS, len(steps) - 1)
        kept = len(steps) - first
        beside = [step / bound for step, bound in list(zip(steps, self.bounds, strict=False))[first:] if bound]
        found = {
            "steps_s": steps,
            "step_s": statistics.median(steps[first:]),
            "read_bytes": (self.traffic[-1][0] - self.traffic[first][0]) / kept,
            "written_bytes": (self.traffic[-1][1] - self.traffic[first][1]) / kept,
            "rss_bytes": status_bytes("VmHWM"),
            "anonymous_bytes": self.anonymous,
            "of_bound": statistics.median(beside) if beside else None,
            "loss": self.losses[-1],
            "losses": self.losses,
        }
        print(REPORT + json.dumps({**found, **more}), flush=True)
