"""Who takes part in `peers.py`, in which numerics, and how much memory ptm_accel is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peer_common import SHAPES, Spec

AUTOCAST = "fp32 parameters, autocast"
MASTERS = "bf16 weights, fp32 masters"
FP32 = "fp32"
"""What everyone computes in with `--fp32`."""

NEEDS_MIB = {
    ("222m", True): 780,
    ("222m", False): 860,
    ("1b", True): 520,
    ("1b", False): 620,
    ("tiny", True): 520,
    ("tiny", False): 520,
}
"""What a ptm_accel process takes beside its budget, by shape and masters: libraries and activations.

Measured as the peak of anonymous memory of a run minus its `host_memory`, rounded up. The budget is the cap minus this.
"""
LAYER_MIB = 3
"""What each layer beyond the shape's own adds to that: its input, kept for backward, and its share of the books."""
ALL_FITS = "12GiB"
DISK_BYTES_PER_PARAMETER = 18
"""Of the scratch files of any contender: bf16 weights and gradients, fp32 masters and moments, and some."""


@dataclass(frozen=True)
class Contender:
    """Who trains, and how.

    Attributes:
        name: as in `--only` and the tables.
        title: in words.
        script: file beside this one.
        numerics: what is computed; only equals are compared.
        clip: the largest gradient norm; 0 for no clipping.
        extra: for the script.
        deepspeed: needs the other Python.
        ours: has a budget.
    """

    name: str
    title: str
    script: str
    numerics: str
    clip: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)
    deepspeed: bool = False
    ours: bool = False


CONTENDERS = (
    Contender("plain", "plain Trainer", "peer_trainer.py", AUTOCAST),
    Contender("ptm", "ptm_accel", "peer_trainer.py", AUTOCAST, extra={"masters": False}, ours=True),
    Contender(
        "ptm-noclip",
        "ptm_accel, no clipping",
        "peer_trainer.py",
        AUTOCAST,
        clip=0.0,
        extra={"masters": False},
        ours=True,
    ),
    Contender("ptm-masters", "ptm_accel, masters", "peer_trainer.py", MASTERS, extra={"masters": True}, ours=True),
    Contender(
        "ptm-masters-noclip",
        "ptm_accel, masters, no clipping",
        "peer_trainer.py",
        MASTERS,
        clip=0.0,
        extra={"masters": True},
        ours=True,
    ),
    Contender(
        "ds-cpu",
        "DeepSpeed ZeRO-3, CPU offload",
        "peer_deepspeed.py",
        MASTERS,
        extra={"device": "cpu"},
        deepspeed=True,
    ),
    Contender(
        "ds-nvme", "DeepSpeed ZeRO-Infinity", "peer_deepspeed.py", MASTERS, extra={"device": "nvme"}, deepspeed=True
    ),
    Contender("fsdp2", "FSDP2, CPU offload", "peer_fsdp.py", MASTERS),
    Contender("mapped", "memory-mapped script", "peer_mapped.py", MASTERS, clip=0.0),
)
BY_NAME = {contender.name: contender for contender in CONTENDERS}
BF16_ONLY = {"ptm-masters", "ptm-masters-noclip"}
"""In fp32 there is nothing that masters would be wider than."""
DEFAULT_CAPS = {"222m": [2200, 1000], "1b": [2048], "tiny": []}
LARGEST = ("ptm-masters", "ptm-masters-noclip", "ds-nvme", "mapped")


def host_memory(contender: Contender, spec: Spec, cap_mib: int | None) -> str:
    """The budget that leaves room for the rest of the process under the cap."""
    if cap_mib is None:
        return ALL_FITS
    more_layers = max((spec.layers or 0) - SHAPES[spec.shape]["num_hidden_layers"], 0)
    needs = NEEDS_MIB[spec.shape, contender.extra["masters"]] if spec.beside_mib is None else spec.beside_mib
    needs += LAYER_MIB * more_layers
    return f"{max(cap_mib - needs, 1)}MiB"
