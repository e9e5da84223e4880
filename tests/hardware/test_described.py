"""Machines as people describe them, and what is said of a description that cannot be read."""

from __future__ import annotations

import re

import pytest

from ptm_accel.errors import ConfigError
from ptm_accel.hardware.cards import CARDS, LINK_SHARE, PCIE_BYTES_S
from ptm_accel.hardware.described import RAM_BYTES_S, Hardware, described, lora_rank

GB = 10**9


def machine(**given: str) -> Hardware:
    asked: dict[str, str | None] = dict.fromkeys(("gpu", "ram", "ssd", "link", "cpu"))
    found = described(**{**asked, **given})
    assert found is not None
    return found


def test_a_machine_in_full() -> None:
    found = machine(gpu="24GB@165TFLOPS", ram="64GB@80GB/s", ssd="1TB@5GB/s", link="25GB/s")
    assert found.gpu is not None
    assert (found.gpu.memory_bytes, found.gpu.flops) == (24 * GB, 165e12)
    assert (found.ram_bytes, found.ram_bytes_s) == (64 * GB, 80e9)
    assert found.ssd is not None
    assert (found.ssd_bytes, found.ssd.read_bytes_s, found.ssd.both_bytes_s) == (1000 * GB, 5e9, 5e9)
    assert found.link is not None
    assert (found.link.read_bytes_s, found.link.both_bytes_s) == (25e9, 50e9), "each way"


def test_defaults() -> None:
    assert described(None, None, None, None, None) is None
    found = machine(gpu="16GiB@100TFLOPS")
    assert (found.ram_bytes, found.ssd_bytes, found.ssd) == (0, 0, None)
    assert found.ram_bytes_s == RAM_BYTES_S
    assert found.link is not None
    assert found.link.read_bytes_s == PCIE_BYTES_S[4] * LINK_SHARE
    alone = machine(ram="64GB", cpu="0.5TFLOPS")
    assert (alone.gpu, alone.link, alone.cpu_flops) == (None, None, 5e11)


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({"gpu": "a100-80gb"}, 300e9 * LINK_SHARE),
        ({"gpu": "h200", "link": "25GB/s"}, 450e9 * LINK_SHARE),
        ({"gpu": "4090"}, PCIE_BYTES_S[4] * LINK_SHARE),
        ({"gpu": "4090", "link": "25GB/s"}, 25e9),
        ({"gpu": "h200", "network": "12.5GB/s"}, 12.5e9),
        ({"gpu": "4090", "network": "100Gb/s"}, 12.5e9),
        ({"ram": "64GB", "network": "400 Gbit/s"}, 50e9),
        ({"ram": "64GB", "network": "2.5Gbps"}, 0.3125e9),
    ],
)
def test_processes_receive_over_nvlink_or_the_link_or_what_is_said(given: dict[str, str], rate: float) -> None:
    assert machine(**given).network_bytes_s == pytest.approx(rate)


@pytest.mark.parametrize("name", [*CARDS, "RTX 4090", "rtx4090", "NVIDIA H200", "NVIDIA GeForce RTX 3090", "A100 80GB"])
def test_cards_by_name(name: str) -> None:
    found = machine(gpu=name).gpu
    assert found is not None
    assert found in CARDS.values()
    assert found.memory_bytes >= 16 * GB
    assert 5e13 < found.flops < 1e16, "TFLOPS of bf16"
    assert 1e11 < found.memory_bytes_s < 1e13
    assert found.pcie in PCIE_BYTES_S
    assert found.nvlink_bytes_s == 0 or found.nvlink_bytes_s > PCIE_BYTES_S[found.pcie]


def test_several_processes_share_a_machine() -> None:
    each = machine(gpu="h100", ram="1TB", ssd="8TB@8GB/s").shared_by(4)
    assert each.gpu == CARDS["h100"]
    assert (each.ram_bytes, each.ram_bytes_s, each.ssd_bytes) == (250 * GB, RAM_BYTES_S / 4, 2000 * GB)
    assert each.ssd is not None
    assert each.ssd.read_bytes_s == 2e9


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpu": "0GB"}, "gpu: '0GB' is not a size above 0; write one such as 24GB@165TFLOPS."),
        ({"gpu": "0GB@165TFLOPS"}, "gpu: '0GB' is not a size above 0; write one such as 24GB@165TFLOPS."),
        ({"gpu": "24GB@0TFLOPS"}, "gpu: '0TFLOPS' is no rate above 0; write one such as 24GB@165TFLOPS."),
        ({"gpu": "24GB@165"}, "gpu: '165' has no unit; write one such as 24GB@165TFLOPS."),
        ({"gpu": "24GB@-1TFLOPS"}, "gpu: '-1TFLOPS' is no rate above 0; write one such as 24GB@165TFLOPS."),
        ({"gpu": "24@165TFLOPS"}, "gpu: '24' has no unit; write a size such as 24GB@165TFLOPS."),
        ({"gpu": "24"}, "gpu: '24' has no unit; write 24GB@165TFLOPS, or the name of a card."),
        ({"gpu": "24GB"}, "gpu: '24GB' has no rate; write its dense bf16 rate behind it: 24GB@165TFLOPS."),
        ({"gpu": "-24GB@165TFLOPS"}, "gpu: '-24GB' is not a size above 0; write one such as 24GB@165TFLOPS."),
        ({"gpu": "4091"}, "gpu: no card '4091' is known; did you mean 4090?"),
        ({"gpu": "h10"}, "gpu: no card 'h10' is known; did you mean h100?"),
        ({"gpu": "a100-80"}, "gpu: no card 'a100-80' is known; did you mean a100-80gb?"),
        ({"gpu": "TPU"}, "gpu: no card 'TPU' is known; known are 3090, 4080,"),
        ({"gpu": ""}, "gpu: no card '' is known;"),
        ({"ram": "64"}, "ram: '64' has no unit; write a size such as 64GB."),
        ({"ram": "0GB"}, "ram: '0GB' is not a size above 0; write one such as 64GB."),
        ({"ram": "-1GB"}, "ram: '-1GB' is not a size above 0; write one such as 64GB."),
        ({"ram": "80%"}, "ram: '80%' is not a size above 0; write one such as 64GB."),
        ({"ram": "64GB@60"}, "ram: '60' has no unit; write one such as 64GB@60GB/s."),
        ({"ram": "64GB@60GB"}, "ram: '60GB' is no rate above 0; write one such as 64GB@60GB/s."),
        ({"ram": "64GB", "ssd": "1TB"}, "ssd: '1TB' has no rate; write it behind the size: 1TB@5GB/s."),
        ({"ram": "64GB", "ssd": "1TB@5"}, "ssd: '5' has no unit; write one such as 1TB@5GB/s."),
        ({"ram": "64GB", "ssd": "1TB@5/s"}, "ssd: '5/s' is no rate above 0; write one such as 1TB@5GB/s."),
        ({"ram": "64GB", "ssd": "1TB@-5GB/s"}, "ssd: '-5GB/s' is no rate above 0; write one such as 1TB@5GB/s."),
        ({"ram": "64GB", "ssd": "0TB@5GB/s"}, "ssd: '0TB' is not a size above 0; write one such as 1TB@5GB/s."),
        ({"gpu": "4090", "link": "0GB/s"}, "link: '0GB/s' is no rate above 0; write one such as 25GB/s."),
        ({"gpu": "4090", "link": "25"}, "link: '25' has no unit; write one such as 25GB/s."),
        ({"ram": "64GB", "link": "25GB/s"}, "link: it is the link to a GPU; add --gpu"),
        ({"ssd": "1TB@5GB/s"}, "ssd: it belongs to a described machine; add --ram 64GB, or --gpu."),
        ({"link": "25GB/s"}, "link: it belongs to a described machine;"),
        ({"network": "12.5GB/s"}, "network: it belongs to a described machine;"),
        (
            {"gpu": "4090", "network": "100"},
            "network: '100' has no unit; write one such as 12.5GB/s, or 100Gb/s in bits.",
        ),
        ({"gpu": "4090", "network": "0Gb/s"}, "network: '0Gb/s' is no rate above 0; write one such as 12.5GB/s, or"),
        ({"gpu": "4090", "network": "100Gb"}, "network: '100Gb' is no rate above 0; write one such as 12.5GB/s, or"),
        ({"cpu": "1TFLOPS"}, "cpu: it belongs to a described machine;"),
        ({"gpu": "4090", "cpu": "1TFLOPS"}, "cpu: with --gpu the GPU computes; leave --cpu out."),
        ({"ram": "64GB", "cpu": "1"}, "cpu: '1' has no unit; write one such as 1TFLOPS."),
        ({"ram": "64GB", "cpu": "fast"}, "cpu: 'fast' is no rate above 0; write one such as 1TFLOPS."),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}") as refused:
        machine(**given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "rank"), [(None, None), ("r=16", 16), ("8", 8)])
def test_ranks_of_adapters(text: str | None, rank: int | None) -> None:
    assert lora_rank(text) == rank


@pytest.mark.parametrize("text", ["r=0", "0", "r=-4", "rank=4", "r=", "1.5"])
def test_no_ranks(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^lora: {re.escape(repr(text))} is not a rank of 1 or more; write one"):
        lora_rank(text)
