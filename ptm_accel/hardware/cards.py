"""Cards by name: memory, rates and the generation of their link, as their makers publish them."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Card:
    """A card as published.

    Attributes:
        memory_bytes: of its memory.
        flops: dense bf16 products a second, added up in fp32; without sparsity.
        memory_bytes_s: of its memory.
        pcie: the generation of its link, of 16 lanes.
        nvlink_bytes_s: of NVLink, each way, where all such cards of a machine have it; 0 otherwise.
    """

    memory_bytes: int
    flops: float
    memory_bytes_s: float
    pcie: int
    nvlink_bytes_s: float = 0.0


def _card(memory_gb: int, tflops: float, memory_gb_s: float, pcie: int, nvlink_gb_s: float = 0.0) -> Card:
    return Card(memory_gb * GB, tflops * TERA, memory_gb_s * GB, pcie, nvlink_gb_s * GB)


# NVIDIA's own publications: the architecture whitepapers Ampere GA102 (3090, a6000, a40), Ada (4080, 4090, rtx6000-ada,
# l4, l40s), RTX Blackwell (5090, rtx-pro-6000) and the data sheets of A10, A100, H100, H200 and B200. Where a
# data sheet gives rates "with sparsity", this is half of them. h100 and h200 are SXM. NVLink is published as the sum of
# both directions; bridges, which join two cards and are bought with them, are left out (3090, a6000, a40, h100-pcie).
CARDS = {
    "3090": _card(24, 71, 936, 4),
    "4080": _card(16, 97.5, 717, 4),
    "4090": _card(24, 165, 1008, 4),
    "5090": _card(32, 209, 1792, 5),
    "a6000": _card(48, 155, 768, 4),
    "rtx6000-ada": _card(48, 364, 960, 4),
    "rtx-pro-6000": _card(96, 504, 1792, 5),
    "a10": _card(24, 125, 600, 4),
    "a40": _card(48, 150, 696, 4),
    "a100-40gb": _card(40, 312, 1555, 4, 300),
    "a100-80gb": _card(80, 312, 2039, 4, 300),
    "l4": _card(24, 121, 300, 4),
    "l40s": _card(48, 362, 864, 4),
    "h100": _card(80, 989, 3350, 5, 450),
    "h100-pcie": _card(80, 756, 2000, 5),
    "h200": _card(141, 989, 4800, 5, 450),
    "b200": _card(180, 2250, 8000, 5, 900),
}
"""Names for `--gpu`."""

PCIE_BYTES_S = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
"""Bytes a second of 16 lanes in one direction, by generation: PCI-SIG's 8, 16 and 32 GT/s in 128b/130b code."""

LINK_SHARE = 0.84
"""What copies of pinned memory get of that: 53 of 63 GB/s, each way, beside an H200 (docs/benchmarks/card.md). It is
assumed of NVLink as well."""

KERNEL_SHARE = 0.45
"""What the kernels of a training step get of a card's published rate: 440 of 989 TFLOPS for 8B with 2048 tokens on an
H200 (docs/benchmarks/card.md)."""

MEMORY_SHARE = 0.8
"""What an update gets of the rate of a card's memory: assumed, and little of a step."""

BYTES_A_FLOP = 0.005
"""The rate of memory of a card that is not in the table, by that of its products: those in it have 0.002 to 0.013."""
