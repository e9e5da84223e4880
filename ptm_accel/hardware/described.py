"""A machine that is described, and need not be there: its GPU, memory, SSD and links, as options say them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from ptm_accel.errors import ConfigError, shown
from ptm_accel.hardware.cards import (
    BYTES_A_FLOP,
    CARDS,
    LINK_SHARE,
    PCIE_BYTES_S,
    Card,
)
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.units import parse_bytes

RAM_BYTES_S = 60e9
"""Bytes of memory a second that updates on the CPU move, unless said: 62 GB/s by AdamW on the 16 cores beside an H200
(docs/benchmarks/card.md), and what two channels of DDR5 give a desktop."""

_DEFAULT_PCIE = 4
_NUMBER = re.compile(r"(?P<number>[0-9]{1,40}(?:\.[0-9]{1,40})?)\s*(?P<unit>.*)", re.ASCII)
_MAKER = re.compile(r"^(nvidia-)?(geforce-)?(rtx-?)?")
_BITS = re.compile(r"(?P<number>[0-9]{1,40}(?:\.[0-9]{1,40})?)\s*(?P<unit>[KMGT])(?:b/s|bit/s|bps)", re.ASCII)
"""As networks are sold: 100Gb/s."""
_FLOPS = {"gflops": 1e9, "tflops": 1e12, "pflops": 1e15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine. Each of several GPUs is like the one described; they share RAM and SSD.

    Attributes:
        gpu: memory and published rates of one; None for a machine that computes on its CPU.
        gpu_name: as it was asked for.
        link: between it and RAM, each direction; None without one.
        ram_bytes: of memory.
        ram_bytes_s: of it that updates on the CPU move in a second.
        ssd_bytes: of room on an SSD; 0 without one.
        ssd: its rates; None without one.
        cpu_flops: what the CPU computes in a second in products of matrices; None where it is not said.
        network_bytes_s: what a process receives from the others in a second.
    """

    gpu: Card | None = None
    gpu_name: str = ""
    link: LinkRates | None = None
    ram_bytes: int = 0
    ram_bytes_s: float = RAM_BYTES_S
    ssd_bytes: int = 0
    ssd: LinkRates | None = None
    cpu_flops: float | None = None
    network_bytes_s: float = PCIE_BYTES_S[_DEFAULT_PCIE] * LINK_SHARE

    def shared_by(self, processes: int) -> Hardware:
        """What each of several processes has of the machine; each has a GPU and a link of its own."""
        ssd = self.ssd
        if ssd is not None:
            ssd = LinkRates(*(rate / processes for rate in (ssd.read_bytes_s, ssd.write_bytes_s, ssd.both_bytes_s)))
        return replace(
            self,
            ram_bytes=self.ram_bytes // processes,
            ram_bytes_s=self.ram_bytes_s / processes,
            ssd_bytes=self.ssd_bytes // processes,
            ssd=ssd,
            cpu_flops=None if self.cpu_flops is None else self.cpu_flops / processes,
        )


def described(
    gpu: str | None,
    ram: str | None,
    ssd: str | None,
    link: str | None,
    cpu: str | None,
    network: str | None = None,
) -> Hardware | None:
    """Reads the options of the command line; None where none of them was given.

    Args:
        gpu: `24GB@165TFLOPS`, or the name of a card.
        ram: `64GB`, or `64GB@60GB/s` with the rate at which memory is read and written.
        ssd: `1TB@5GB/s`.
        link: `25GB/s`, each direction.
        cpu: `1TFLOPS`.
        network: `12.5GB/s`, or `100Gb/s` in bits: what a process receives from others.

    Raises:
        ConfigError: one that cannot be read, or that is missing; it says what to write.
    """
    if gpu is None and ram is None:
        others = {"ssd": ssd, "link": link, "cpu": cpu, "network": network}
        lone = next((name for name, given in others.items() if given is not None), None)
        if lone is not None:
            raise ConfigError(f"{lone}: it belongs to a described machine; add --ram 64GB, or --gpu.")
        return None
    card, pcie = (None, _DEFAULT_PCIE) if gpu is None else _card_of(gpu)
    if card is None and link is not None:
        raise ConfigError("link: it is the link to a GPU; add --gpu, or leave --link out.")
    if card is not None and cpu is not None:
        raise ConfigError("cpu: with --gpu the GPU computes; leave --cpu out.")
    ram_size, _, ram_rate = (ram or "").partition("@")
    ssd_bytes, ssd_rates = (0, None) if ssd is None else _ssd_of(ssd)
    rate = PCIE_BYTES_S[pcie] * LINK_SHARE if link is None else _bytes_s("link", link, "25GB/s")
    between = rate if card is None or not card.nvlink_bytes_s else card.nvlink_bytes_s * LINK_SHARE
    return Hardware(
        gpu=card,
        gpu_name=gpu or "",
        link=None if card is None else LinkRates(rate, rate, 2 * rate),
        ram_bytes=_size("ram", ram_size, "64GB") if ram is not None else 0,
        ram_bytes_s=_bytes_s("ram", ram_rate, "64GB@60GB/s") if ram_rate else RAM_BYTES_S,
        ssd_bytes=ssd_bytes,
        ssd=ssd_rates,
        cpu_flops=None if cpu is None else _flops("cpu", cpu, "1TFLOPS"),
        network_bytes_s=between if network is None else _network_bytes_s(network),
    )


def _card_of(text: str) -> tuple[Card, int]:
    """A card by its name, or by size and rate, with the generation of its link."""
    name = re.sub(r"\s+", "-", text.strip().lower())
    for plain in (name, bare := _MAKER.sub("", name)):
        if plain in CARDS:
            return CARDS[plain], CARDS[plain].pcie
    size, at, rate = text.partition("@")
    if not at and not re.match(r"[0-9.]+\s*[kmgt]i?b$", name):
        if re.fullmatch(r"[0-9.]{1,3}", name):
            raise ConfigError(f"gpu: {shown(text)} has no unit; write {name}GB@165TFLOPS, or the name of a card.")
        near = difflib.get_close_matches(bare, CARDS, n=1, cutoff=0.5)
        likely = f"did you mean {near[0]}? Otherwise" if near else "known are " + ", ".join(CARDS) + ";"
        raise ConfigError(f"gpu: no card {shown(text)} is known; {likely} write its memory and rate: 24GB@165TFLOPS.")
    nbytes = _size("gpu", size, "24GB@165TFLOPS")
    if not at:
        raise ConfigError(f"gpu: {shown(text)} has no rate; write its dense bf16 rate behind it: {text}@165TFLOPS.")
    flops = _flops("gpu", rate, "24GB@165TFLOPS")
    return Card(nbytes, flops, flops * BYTES_A_FLOP, _DEFAULT_PCIE), _DEFAULT_PCIE


def _ssd_of(text: str) -> tuple[int, LinkRates]:
    size, at, rate = text.partition("@")
    if not at:
        raise ConfigError(f"ssd: {shown(text)} has no rate; write it behind the size: {text}@5GB/s.")
    rate_bytes_s = _bytes_s("ssd", rate, "1TB@5GB/s")
    # What it reads and writes at once shares one rate.
    return _size("ssd", size, "1TB@5GB/s"), LinkRates(rate_bytes_s, rate_bytes_s, rate_bytes_s)


def _size(option: str, text: str, example: str) -> int:
    text = text.strip()
    if text.isdigit():
        raise ConfigError(f"{option}: {shown(text)} has no unit; write a size such as {example}.")
    try:
        nbytes = parse_bytes(text)
    except ConfigError:
        nbytes = 0
    if nbytes < 1:
        raise ConfigError(f"{option}: {shown(text)} is not a size above 0; write one such as {example}.")
    return nbytes


def _flops(option: str, text: str, example: str) -> float:
    return _rate(option, text, example, _FLOPS)


def _bytes_s(option: str, text: str, example: str) -> float:
    number, slash, second = text.strip().partition("/")
    if slash and second.strip().lower() == "s" and not number.strip().isdigit():
        try:
            nbytes = parse_bytes(number)
        except ConfigError:
            nbytes = 0
        if nbytes > 0:
            return float(nbytes)
    return _rate(option, text, example, {})


def _network_bytes_s(text: str) -> float:
    bits = _BITS.fullmatch(text.strip())
    if bits is None or float(bits["number"]) <= 0:
        return _bytes_s("network", text, "12.5GB/s, or 100Gb/s in bits")
    return float(bits["number"]) * 1e3 ** " KMGT".index(bits["unit"]) / 8


def _rate(option: str, text: str, example: str, units: dict[str, float]) -> float:
    found = _NUMBER.fullmatch(text.strip())
    unit = units.get(found["unit"].strip().lower()) if found is not None else None
    if found is None or unit is None or float(found["number"]) <= 0:
        what = "has no unit" if found is not None and not found["unit"] else "is no rate above 0"
        raise ConfigError(f"{option}: {shown(text)} {what}; write one such as {example}.")
    return float(found["number"]) * unit


def lora_rank(text: str | None) -> int | None:
    """Reads `r=16`.

    Raises:
        ConfigError: it is no such rank.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(?:r=)?([0-9]{1,6})", text.strip())
    if found is None or int(found[1]) < 1:
        raise ConfigError(f"lora: {shown(text)} is not a rank of 1 or more; write one such as r=16.")
    return int(found[1])
