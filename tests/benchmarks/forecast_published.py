"""Forecasts for settings that others have published, beside what they say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from ptm_accel.integrations.transformers.estimating import text_batch

from ptm_accel.fitting import GPU, RAM, Fit, fitting
from ptm_accel.hardware.described import Hardware, described
from ptm_accel.outlook import Work
from ptm_accel.units import format_decimal, format_seconds

NVLINK_BYTES_S = {"a100": 250e9, "h200": 400e9, "v100": 120e9}
"""What gathers within a machine reach, about: NVLink has 150, 300 and 450 GB/s each way for V100, A100 and H200."""


@dataclass(frozen=True)
class Setting:
    """A setting, as it was published.

    Attributes:
        name: of the system and the model.
        kind, shape: the model here; of papers that do not give shapes, one of that size.
        machine: options, of one machine.
        processes: GPUs of one machine.
        machines: how many.
        network_bytes_s: what a process receives from others in a second.
        rows, length: the batch of one GPU.
        said: what was published.
        masters: with fp32 masters.
    """

    name: str
    kind: str
    shape: dict[str, Any]
    machine: dict[str, str]
    processes: int
    rows: int
    length: int
    said: str
    machines: int = 1
    network_bytes_s: float = 0.0
    masters: bool = False


def gpt(layers: int, width: int, length: int = 1024) -> dict[str, Any]:
    """The shape of a GPT of 12 layers x width^2 parameters."""
    return {"n_layer": layers, "n_embd": width, "n_head": width // 128, "vocab_size": 50304, "n_positions": length}


LARGE = {
    "num_hidden_layers": 88,
    "hidden_size": 12288,
    "intermediate_size": 28672,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
}
QWEN = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
A100 = {"gpu": "a100-40gb", "ram": "1TB"}
V100 = {"gpu": "32GB@125TFLOPS", "ram": "240GB", "link": "13GB/s"}
H200 = {"gpu": "h200", "ram": "1.5TB"}

SETTINGS = (
    Setting("MegaTrain, 120B, one H200", "LlamaForCausalLM", LARGE, H200, 1, 1, 4096, "trains"),
    Setting(
        "prime-rl, Qwen3-30B-A3B, 8 x H200, 8K",
        "Qwen3MoeForCausalLM",
        QWEN,
        {"gpu": "h200", "ram": "2TB"},
        8,
        1,
        8192,
        "3.96 s, 17.5 GiB on a GPU; without offload 1.75 s, 63 GiB",
        network_bytes_s=NVLINK_BYTES_S["h200"],
        masters=True,
    ),
    Setting(
        "the same, on 32 GB of each",
        "Qwen3MoeForCausalLM",
        QWEN,
        {"gpu": "32GB@989TFLOPS", "ram": "2TB", "link": "53GB/s"},
        8,
        1,
        8192,
        "as above",
        network_bytes_s=NVLINK_BYTES_S["h200"],
        masters=True,
    ),
    Setting(
        "Angel-PTM, GPT 55B, 8 x A100-40G",
        "GPT2LMHeadModel",
        gpt(68, 8192),
        A100,
        8,
        4,
        1024,
        "its largest (DeepSpeed: 28B)",
        network_bytes_s=NVLINK_BYTES_S["a100"],
    ),
    Setting(
        "PatrickStar, GPT 68B, 8 x A100-40G, 1 TB",
        "GPT2LMHeadModel",
        gpt(84, 8192),
        A100,
        8,
        8,
        1024,
        "its largest, 857 TFLOPS",
        network_bytes_s=NVLINK_BYTES_S["a100"],
    ),
    Setting(
        "PatrickStar, GPT 50B, 1 x A100-40G, 1 TB",
        "GPT2LMHeadModel",
        gpt(62, 8192),
        A100,
        1,
        8,
        1024,
        "its largest, 67 TFLOPS",
    ),
    Setting(
        "PatrickStar, GPT 18B, 8 x V100-32G, 240 GB",
        "GPT2LMHeadModel",
        gpt(88, 4096),
        V100,
        8,
        8,
        1024,
        "its largest, 419 TFLOPS",
        network_bytes_s=NVLINK_BYTES_S["v100"],
    ),
    Setting(
        "PatrickStar, GPT 12B, 1 x V100-32G, 240 GB",
        "GPT2LMHeadModel",
        gpt(58, 4096),
        V100,
        1,
        8,
        1024,
        "its largest, 33.8 TFLOPS",
    ),
    Setting(
        "PatrickStar, GPT3-175B, 32 x A100-40G",
        "GPT2LMHeadModel",
        gpt(96, 12288, 2048),
        A100,
        8,
        4,
        1024,
        "about 3.5 PFLOPS",
        machines=4,
        network_bytes_s=25e9,
    ),
    Setting(
        "Angel-PTM, GPT3-175B, hundreds of GPUs",
        "GPT2LMHeadModel",
        gpt(96, 12288, 2048),
        A100,
        8,
        1,
        2048,
        "scales; figures not found",
        machines=32,
        network_bytes_s=25e9,
    ),
)


def built(setting: Setting) -> Any:
    """The model without values."""
    cls = getattr(transformers, setting.kind)
    with torch.device("meta"):
        model = cls(cls.config_class(**setting.shape, use_cache=False)).to(torch.bfloat16)
    model.activation_checkpointing_enable()
    return model.train()


def row(setting: Setting) -> str:
    """One line of the table."""
    asked: dict[str, str | None] = dict.fromkeys(("gpu", "ram", "ssd", "link", "cpu"))
    machine = described(**{**asked, **setting.machine})
    assert machine is not None
    model = built(setting)
    batch = text_batch(model, setting.rows, setting.length)
    assert batch is not None
    count = setting.processes * setting.machines
    work = Work(model=model, batch=batch, master_weights=setting.masters, processes=count)
    found = fitting(work, all_of(machine, setting))
    cells = [setting.name, f"{found.needs.parameters / 1e9:.1f}B", setting.said]
    used = found.tiers
    gpu, ram = used[GPU].pages_bytes + used[GPU].pass_bytes, used[RAM].pages_bytes
    if found.found is None:
        cells += ["does not fit", "-", "-"]
    else:
        operations = sum(touch.flops for touch in work.touched().touches)
        # Papers count what is recomputed as well, or do not say.
        rate = operations * count / found.found.step_s / 1e12
        cells += [
            "fits, and stays" if found.fit is Fit.STAYS else "fits",
            f"{format_seconds(found.found.step_s)} ({found.found.bound[1].value}), {rate:,.0f} TFLOPS",
            f"{count * setting.rows * setting.length / found.found.step_s:,.0f}",
        ]
    cells += [f"{format_decimal(gpu)}, least {format_decimal(found.needs.least_bytes + found.pass_bytes)}"]
    cells += [f"{format_decimal(ram * setting.processes)} of {format_decimal(machine.ram_bytes)}"]
    return f"| {' | '.join(cells)} |"


def all_of(machine: Hardware, setting: Setting) -> Hardware:
    """All machines as one, with their network."""
    count = setting.machines
    network = setting.network_bytes_s or machine.network_bytes_s
    return replace(
        machine,
        ram_bytes=machine.ram_bytes * count,
        ram_bytes_s=machine.ram_bytes_s * count,
        network_bytes_s=network,
    )


def published() -> None:
    """Prints the table as Markdown."""
    titles = ("setting", "here", "published", "forecast", "a step", "tokens/s", "of a GPU", "RAM of a machine")
    print(f"| {' | '.join(titles)} |\n{'| --- ' * len(titles)}|")
    for setting in SETTINGS:
        print(row(setting), flush=True)


if __name__ == "__main__":
    published()
