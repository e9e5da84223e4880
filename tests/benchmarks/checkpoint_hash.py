"""What the CRCs of a checkpoint cost: saves with and without, in turns, and a control that is without as well.

    OMP_WAIT_POLICY=passive python tests/benchmarks/checkpoint_hash.py [--hidden 1024] [--layers 8] [--pairs 10]

Each round saves a whole checkpoint of the Trainer three times (weights, optimizer state, the rest; synced to disk), in
another order each time. It fails if the lower quartile of with/without lies above the bar and above the control's upper
quartile. Then one checkpoint is compared with its manifest, from memory and (as far as the system drops it) from disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
from machine_facts import facts
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from ptm_accel import Trainer
from ptm_accel.checkpoint.crc import PIECE_BYTES, threads
from ptm_accel.checkpoint.manifest import check_manifest

BAR = 1.03
WAYS = ("without", "with", "control")


def trained(folder: Path, hidden: int, layers: int) -> Trainer:
    """A Trainer after one step, so that there is optimizer state."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=8192,
    )
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}]
    args = TrainingArguments(
        str(folder), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    options = {"host_memory": "70%", "disk": str(folder)}
    trainer = Trainer(model=LlamaForCausalLM(shape), args=args, train_dataset=rows, ptm_config=options)
    trainer.train()
    return trainer


def save(trainer: Trainer, folder: Path, *, hashes: bool) -> float:
    """Seconds of one save. Nothing is left to be written or removed when it begins."""
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    assert trainer.ptm_config is not None
    object.__setattr__(trainer.ptm_config, "checkpoint_hashes", hashes)
    os.sync()
    begin = time.perf_counter()
    trainer._save_checkpoint(trainer.model, None)
    return time.perf_counter() - begin


def rates(checkpoint: Path) -> None:
    """Prints how fast CRCs are computed, and a checkpoint compared."""
    octets = memoryview(os.urandom(PIECE_BYTES))
    begin = time.perf_counter()
    for _ in range(8):
        zlib.crc32(octets)
    one = 8 * PIECE_BYTES / (time.perf_counter() - begin)
    with threads() as pool:
        begin = time.perf_counter()
        list(pool.map(zlib.crc32, [octets] * 32))
        all_of_them = 32 * PIECE_BYTES / (time.perf_counter() - begin)
    print(f"\nzlib.crc32: {one / 1e9:.2f} GB/s by one thread, {all_of_them / 1e9:.2f} GB/s by all that are used")
    for where in ("memory", "disk"):
        for path in checkpoint.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED if where == "disk" else 0)
        begin = time.perf_counter()
        sums = check_manifest(checkpoint)
        assert sums is not None
        taken = time.perf_counter() - begin
        nbytes = sum(each.nbytes for each in sums.values())
        print(f"compared from {where}: {nbytes / 1e9:.2f} GB in {taken:.2f} s, {nbytes / taken / 1e9:.2f} GB/s")


def main() -> int:
    """Prints the table; 1 if hashing costs too much."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    print("# What the CRCs of a checkpoint cost\n")
    print(
        facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/checkpoint_hash.py {' '.join(sys.argv[1:])}".rstrip())
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        trainer = trained(folder, options.hidden, options.layers)
        save(trainer, folder, hashes=True)
        nbytes = sum(path.stat().st_size for path in (folder / "checkpoint-1").iterdir())
        print(f"* a checkpoint of {nbytes / 1e9:.2f} GB in {folder.absolute().parent}\n")
        print("| round | without | with | control | with/without | control/without |")
        print("| --- | --- | --- | --- | --- | --- |")
        ratios: dict[str, list[float]] = {"with": [], "control": []}
        for number in range(options.pairs):
            taken = {}
            for at in range(len(WAYS)):
                way = WAYS[(number + at) % len(WAYS)]
                taken[way] = save(trainer, folder, hashes=way == "with")
            for way, found in ratios.items():
                found.append(taken[way] / taken["without"])
            cells = [f"{taken[way]:.2f} s" for way in WAYS] + [f"{found[-1]:.3f}" for found in ratios.values()]
            print(f"| {number + 1} | {' | '.join(cells)} |", flush=True)
        quartiles = {way: statistics.quantiles(found, n=4) for way, found in ratios.items()}
        print()
        for way, (lower, median, upper) in quartiles.items():
            print(f"{way}/without: median {median:.3f}, quartiles {lower:.3f} and {upper:.3f}")
        save(trainer, folder, hashes=True)
        rates(folder / "checkpoint-1")
    lowest = quartiles["with"][0]
    return int(lowest > BAR and lowest > quartiles["control"][2])


if __name__ == "__main__":
    raise SystemExit(main())
