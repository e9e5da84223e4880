"""A checkpoint that is four times `host_memory`, fine-tuned by an unchanged script under a cap of the kernel's.

    OMP_WAIT_POLICY=passive python tests/benchmarks/hub.py DIRECTORY_ON_AN_SSD [--hidden 1024] [--layers 16]

The script (hub_script.py) is run plain, as large as it is, and with pages switched on in a process whose memory the
kernel caps at what the documentation promises: the script before its model, host_memory (a quarter of the checkpoint),
what a pass holds (the formula), and 5%. Losses, generated text and saved weights must be the same. Reading is timed
from a cold page cache, beside what transformers itself takes for as many tensors with hardly any bytes, and a plain
loop over the same files: one that reads them, or, where they are cast or fused, does that too and writes what comes of
it, under the same cap (hub_loop.py). Prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capping
import torch
from machine_facts import facts
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

from ptm_accel.estimate import estimate
from ptm_accel.model.forecast import ShapeSpec

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
STEPS = 3
CASES = (("Llama", "float32"), ("Llama", "bfloat16"), ("Mixtral", "float32"))


def shape(kind: str, hidden: int, layers: int) -> PretrainedConfig:
    sizes = {"hidden_size": hidden, "num_attention_heads": 16, "vocab_size": 8192, "use_cache": True}
    if kind == "Llama":
        return LlamaConfig(**sizes, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers)
    experts = {"num_local_experts": 4, "num_key_value_heads": 4}
    return MixtralConfig(**sizes, **experts, intermediate_size=hidden, num_hidden_layers=layers)


def make(folder: Path, config: PretrainedConfig) -> int:
    """A checkpoint with random values, in shards; returns its bytes."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="200MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def cold(folder: Path) -> None:
    """Drops the files from the page cache; nothing of what was written before is still on its way to the disk."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_read_s(folder: Path) -> float:
    """Seconds of reading all of it once, through the page cache, by a plain loop."""
    cold(folder)
    buffer = bytearray(4 * MIB)
    begin = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def told(text: str) -> dict[str, Any]:
    return dict(json.loads(next(line for line in text.splitlines() if line.startswith("HUB ")).removeprefix("HUB ")))


def digest(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    return hashlib.md5(b"".join(path.read_bytes() for path in files), usedforsecurity=False).hexdigest()


def plainly(script: list[str], *rest: str) -> dict[str, Any]:
    """What the script says where pages are off."""
    done = subprocess.run(
        [sys.executable, *script, *rest], env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"the plain script ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return told(done.stdout)


def capped(cap: int, command: list[str], ptm_options: dict[str, str]) -> dict[str, Any]:
    """What a script says in a process whose memory the kernel caps."""
    done = capping.run_capped(cap, [sys.executable, *command], env={**environment(), **ptm_options}, timeout_s=3600)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}, {done.kills} kills:\n{done.stderr[-3000:]}")
    return told(done.stdout)


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}


def hosts_own_s(directory: Path, kind: str, dtype: str, layers: int) -> list[float]:
    """Seconds of `from_pretrained`, and until ready, of a plain model with as many tensors and hardly any bytes."""
    small, out = directory / "small", directory / "small_out"
    make(small, shape(kind, 64, layers))
    runs = [plainly([str(HERE / "hub_script.py"), str(small), str(out), dtype, "1"]) for _ in range(3)]
    shutil.rmtree(small)
    shutil.rmtree(out)
    return [statistics.median(run[key] for run in runs) for key in ("read_s", "ready_s")]


def run(directory: Path, kind: str, dtype: str, options: argparse.Namespace) -> str:
    """One row of the table."""
    checkpoint, plain_out, out = (directory / name for name in ("checkpoint", "plain", "paged"))
    config = shape(kind, options.hidden, options.layers)
    nbytes = make(checkpoint, config)
    script = [str(HERE / "hub_script.py"), str(checkpoint)]
    plain = plainly(script, str(plain_out), dtype, str(STEPS))
    host = nbytes // 4 // MIB * MIB
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    batch = {name: ShapeSpec((2, 128)) for name in ("input_ids", "labels")}
    formula = plain["base_bytes"] + host + (estimate(meta, batch).pass_bytes or 0)
    cap = int(formula * 1.05)
    own = hosts_own_s(directory, kind, dtype, options.layers)
    as_it_is = (kind, dtype) == ("Llama", "float32")
    # As `accelerate launch --use_ptm` starts it; the launcher itself, which takes memory of its own, is left out.
    ptm_options = {"ACCELERATE_USE_PTM": "true", "PTM_HOST_MEMORY": str(host), "PTM_DISK": str(directory)}
    pairs: list[tuple[float, float, float]] = []

    def looped() -> float:
        if as_it_is:
            return plain_read_s(checkpoint)
        cold(checkpoint)
        command = [str(HERE / "hub_loop.py"), str(checkpoint), str(directory), dtype]
        return float(capped(cap, command, {})["loop_s"])

    def paged(steps: int) -> dict[str, Any]:
        cold(checkpoint)
        return capped(cap, [*script, str(out), dtype, str(steps)], ptm_options)

    for number in range(options.pairs):
        # The one that is first in one pair is second in the next.
        steps = STEPS if number == options.pairs - 1 else 1
        if number % 2:
            ours = paged(steps)
            loop = looped()
        else:
            loop = looped()
            ours = paged(steps)
        pairs.append((loop, ours["read_s"], ours["ready_s"]))
    same = all(ours[key] == plain[key] for key in ("losses", "eval_loss", "text")) and digest(out) == digest(plain_out)
    AutoModelForCausalLM.from_pretrained(out)
    for folder in (checkpoint, plain_out, out):
        shutil.rmtree(folder)
    loop, read, ready = (statistics.median(column) for column in zip(*pairs, strict=True))
    share_read = statistics.median((own[0] + loop) / read for loop, read, _ in pairs)
    share_ready = statistics.median((own[1] + loop) / ready for loop, _, ready in pairs)
    return (
        f"| {kind}, {dtype} | {nbytes / MIB:.0f} | {host / MIB:.0f} | {formula / MIB:.0f} | {cap / MIB:.0f} "
        f"| {ours['peak_bytes'] / MIB:.0f} | {plain['peak_bytes'] / MIB:.0f} | {'the same' if same else 'DIFFERENT'} "
        f"| {loop:.2f} s | {own[0]:.2f} s | {read:.2f} s | {share_read:.0%} "
        f"| {own[1]:.2f} s | {ready:.2f} s | {share_ready:.0%} | {ours['stepped_s']:.2f} s "
        f"| {plain['stepped_s']:.2f} s | {ours['save_s']:.2f} s | {ours['end_s']:.1f} s |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    reason = capping.available()
    if reason is not None:
        raise SystemExit(f"cannot cap memory: {reason}")
    print("# A checkpoint of four times host_memory\n")
    command = f"hub.py DIRECTORY --pairs {options.pairs}"
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/{command}"))
    print(
        f"* {STEPS} steps of batch 2 x 128, evaluation, saving, text; fp32 checkpoints in shards of 200 MB; medians of "
        f"{options.pairs} pairs of a loop and a run, each from a cold disk\n"
    )
    print(
        "| model, read as | checkpoint, MiB | host_memory, MiB | formula, MiB | cap, MiB | peak RSS | plain's peak RSS "
        "| losses, text and saved weights | a plain loop | transformers' own part of from_pretrained | from_pretrained "
        "| loop and own part / that | own part until ready to train | ready to train | loop and own part / that "
        "| first step done | plain | save | all |"
    )
    print(f"|{' --- |' * 19}")
    for kind, dtype in CASES:
        print(run(options.directory, kind, dtype, options), flush=True)


if __name__ == "__main__":
    main()
