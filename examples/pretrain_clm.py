"""Trains a tokenizer and a small Llama from scratch, in a quarter of the memory its states need, and compares.

The text is the source code of Python's own standard library, so nothing is downloaded. Run it as

    python examples/pretrain_clm.py            # trains on pages, then a few steps plain, and compares the two
    python examples/pretrain_clm.py --plain    # the same script without ptm_accel, for all steps, then compares

Everything it writes goes to --output_dir (default: outputs/pretrain_clm in the current directory). All options of
`TrainingArguments` can be given as well. Between the two runs, one line differs: see `make_trainer`.
"""

from __future__ import annotations

import os

# Before torch is imported: spinning OpenMP threads beside a busy neighbour are tens of times slower, silently.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

END_OF_TEXT = "<|endoftext|>"
MIB = 1 << 20
BYTES_PER_PARAMETER = 16
"""fp32 parameter, gradient and AdamW's two moments."""


@dataclass
class ScriptArguments:
    """What to train, and the options of ptm_accel."""

    plain: bool = field(default=False, metadata={"help": "Train without ptm_accel."})
    small: bool = field(default=False, metadata={"help": "A model of under a million parameters, a few steps: for CI."})
    compare_steps: int = field(
        default=8, metadata={"help": "After training on pages, this many steps plain, to compare; 0 for none."}
    )
    stop_after: int = field(default=0, metadata={"help": "End after this many steps of the schedule; 0 for all."})
    host_memory: str = field(default="128MiB", metadata={"help": "What ptm_accel may use of the memory."})
    device_memory: str | None = field(default=None, metadata={"help": "What it may use of a GPU's, if there is one."})
    disk: str | None = field(
        default=None, metadata={"help": "Folder for what does not fit; default: a temporary one in --output_dir."}
    )
    page_size: str = field(default="1MiB", metadata={"help": "The unit of booking and transfer."})
    sequence_length: int = field(default=256, metadata={"help": "Tokens in a sequence."})
    hidden_size: int = field(default=512, metadata={"help": "Width of the model; its MLP is 2.75 times as wide."})
    layers: int = field(default=8, metadata={"help": "Decoder layers."})
    vocabulary: int = field(default=8192, metadata={"help": "Size of the tokenizer's vocabulary."})
    text_bytes: int = field(default=4_000_000, metadata={"help": "How much source text to use."})


SMALL = {
    "max_steps": 8,
    "compare_steps": 4,
    "sequence_length": 64,
    "hidden_size": 128,
    "layers": 3,
    "vocabulary": 1024,
    "text_bytes": 300_000,
    "host_memory": "3MiB",
    "page_size": "64KiB",
}
"""What `--small` stands for; each can still be given."""


class StepClock(TrainerCallback):
    """Takes the time of each optimizer step, and ends the run early if asked to."""

    def __init__(self, stop_after: int) -> None:
        self.stop_after = stop_after
        self.seconds: list[float] = []
        self._begin = 0.0

    def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:  # noqa: ARG002
        """Starts the clock."""
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:  # noqa: ARG002
        """Stops the clock."""
        self.seconds.append(time.perf_counter() - self._begin)
        if state.global_step == self.stop_after:
            control.should_training_stop = True


def parse() -> tuple[ScriptArguments, TrainingArguments]:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="outputs/pretrain_clm",
        max_steps=30,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        warmup_steps=4,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    if "--small" in sys.argv:
        parser.set_defaults(**SMALL)
    return parser.parse_args_into_dataclasses()


def standard_library_files(limit_bytes: int, seed: int) -> list[str]:
    """Texts of the standard library's modules, in an order that depends on the seed alone, up to a size."""
    folder = Path(os.__file__).parent
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    paths = sorted(p for p in folder.rglob("*.py") if not left_out & set(p.relative_to(folder).parts))
    random.Random(seed).shuffle(paths)
    texts: list[str] = []
    total = 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            texts.append(text)
            total += len(text)
        if total >= limit_bytes:
            break
    return texts


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=vocabulary, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def make_dataset(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Dataset:
    """Sequences of `length` tokens, cut from the texts one after another."""

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": tokenizer([text + END_OF_TEXT for text in batch["text"]])["input_ids"]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, Any]:
        tokens = [token for ids in batch["input_ids"] for token in ids]
        rows = [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
        return {"input_ids": rows, "labels": [list(row) for row in rows]}

    data = Dataset.from_dict({"text": texts})
    return data.map(tokenize, batched=True, remove_columns="text").map(group, batched=True, batch_size=None)


def make_model(script: ScriptArguments, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    heads = max(2, script.hidden_size // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=script.hidden_size,
            intermediate_size=script.hidden_size * 11 // 4,
            num_hidden_layers=script.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=script.sequence_length,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            use_cache=False,
        )
    )


def make_trainer(script: ScriptArguments, training: TrainingArguments, disk: str, **parts: Any) -> transformers.Trainer:
    """The one place where the plain script and the one on pages differ."""
    if script.plain:
        return transformers.Trainer(args=training, **parts)

    from ptm_accel import PTMConfig, Trainer

    options = PTMConfig(
        host_memory=script.host_memory, device_memory=script.device_memory, disk=disk, page_size=script.page_size
    )
    return Trainer(args=training, ptm_config=options, **parts)


def resident_bytes(key: str) -> int:
    """This process's resident memory by the kernel's account: `VmRSS` now, `VmHWM` at its peak; 0 if not told."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def forget_peak() -> None:
    """Lets the kernel count the peak of resident memory anew, so that preparing the data is left out of it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        print("(The kernel keeps no new peak: the process's peak below includes preparing the data.)")


def train(script: ScriptArguments, training: TrainingArguments) -> dict[str, Any]:
    """Trains, and returns what is kept of the run for the comparison."""
    folder = Path(training.output_dir)
    texts = standard_library_files(script.text_bytes, training.seed)
    tokenizer = train_tokenizer(texts, script.vocabulary)
    data = make_dataset(texts, tokenizer, script.sequence_length)
    digest = hashlib.sha256(json.dumps(data["input_ids"][:]).encode()).hexdigest()
    print(
        f"Data: {len(texts)} files of the standard library, {len(data)} sequences of {script.sequence_length} tokens."
    )

    forget_peak()
    before = resident_bytes("VmRSS")
    set_seed(training.seed)
    model = make_model(script, tokenizer)
    states = sum(p.numel() for p in model.parameters()) * BYTES_PER_PARAMETER
    print(f"Model: Llama, {model.num_parameters() / 1e6:.1f}M parameters; its states take {states / MIB:.0f} MiB.")

    clock = StepClock(script.stop_after)
    with ExitStack() as stack:
        disk = "" if script.plain else script.disk or stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        trainer = make_trainer(
            script,
            training,
            disk,
            model=model,
            train_dataset=data,
            data_collator=default_data_collator,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
        peak = resident_bytes("VmHWM")
        result = {
            "settings": settings(script, training, digest),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "step_s": clock.seconds,
            "states_bytes": states,
            "rss_before_bytes": before,
            "rss_peak_bytes": peak,
            "tiers": {} if script.plain else tiers(trainer.model),
        }
        if not script.plain:
            trainer.save_model(str(folder / "model"))
            print(
                f"Saved to {folder / 'model'}: an ordinary model directory, for AutoModelForCausalLM.from_pretrained."
            )
    return result


def tiers(model: torch.nn.Module) -> dict[str, list[int]]:
    """Of each tier, the peak and the budget, in bytes."""
    from ptm_accel import engine_of

    engine = engine_of(model)
    assert engine is not None, "the model is not on pages after training"
    budgets = engine.memory.budgets
    return {tier.value: [peak, budgets[tier].capacity_bytes] for tier, peak in engine.metrics.peaks().items()}


def settings(script: ScriptArguments, training: TrainingArguments, digest: str) -> dict[str, Any]:
    """What must be equal for two runs to be comparable."""
    model = {key: asdict(script)[key] for key in ("sequence_length", "hidden_size", "layers", "vocabulary")}
    names = (
        "seed", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
        "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16", "fp16",
    )  # fmt: skip
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {**model, **{name: str(getattr(training, name)) for name in names}, **versions, "data": digest}


def report(result: dict[str, Any], script: ScriptArguments) -> None:
    losses, seconds = result["losses"], result["step_s"]
    print(f"\n{'Plain' if script.plain else 'On pages'}: {len(losses)} steps")
    print(f"  loss             {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end")
    print(f"  time of a step   {statistics.median(seconds):.2f} s (median)")
    for tier, (peak, capacity) in result["tiers"].items():
        print(f"  peak, {tier:<10} {peak / MIB:.1f} MiB of {capacity / MIB:,.0f} MiB allowed")
    if result["rss_peak_bytes"]:
        model_bytes = result["rss_peak_bytes"] - result["rss_before_bytes"]
        print(
            f"  process          peak of {result['rss_peak_bytes'] / MIB:.0f} MiB, {model_bytes / MIB:.0f} MiB "
            f"above what it was before the model (states {result['states_bytes'] / MIB:.0f} MiB, and activations)"
        )


def compare(paged: dict[str, Any], plain: dict[str, Any]) -> bool:
    """Prints the comparison of two runs; returns whether their losses are equal."""
    differing = [key for key, value in paged["settings"].items() if plain["settings"].get(key) != value]
    if differing:
        print(f"\nNot compared with the earlier run: {', '.join(differing)} differ. Run both with the same options.")
        return True
    steps = min(len(paged["losses"]), len(plain["losses"]))
    equal = paged["losses"][:steps] == plain["losses"][:steps]
    # The first step warms up: allocators, threads, and on pages the first placement.
    times = [statistics.median(run["step_s"][1:steps] or run["step_s"]) for run in (paged, plain)]
    growth = [run["rss_peak_bytes"] - run["rss_before_bytes"] for run in (paged, plain)]
    print(f"\nOn pages against plain, over the first {steps} steps of both")
    print(f"  losses           {'bit-identical' if equal else 'DIFFERENT'}")
    if not equal:
        first = next(i for i in range(steps) if paged["losses"][i] != plain["losses"][i])
        print(f"    first at step {first + 1}: {paged['losses'][first]!r} on pages, {plain['losses'][first]!r} plain")
    print(f"  time of a step   {times[0]:.2f} s against {times[1]:.2f} s: {times[0] / times[1]:.2f}x")
    print(
        f"  memory           {growth[0] / MIB:.0f} MiB against {growth[1] / MIB:.0f} MiB above the start, per process"
    )
    print("  (one run of each, one after the other; on a busy machine such times vary)")
    return equal


def main() -> int:
    script, training = parse()
    disable_progress_bars()  # of preparing the data, which takes seconds
    folder = Path(training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    mine, other = folder / "paged.json", folder / "plain.json"
    if script.plain:
        mine, other = other, mine
    elif other.exists():
        other.unlink()  # of an earlier run; the comparison is made anew

    result = train(script, training)
    mine.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report(result, script)
    if script.plain and other.exists():
        return 0 if compare(json.loads(other.read_text(encoding="utf-8")), result) else 1
    if not script.plain and script.compare_steps:
        print(
            f"\nNow the first {script.compare_steps} of these steps without ptm_accel, in a process of its own.",
            flush=True,
        )
        steps = str(script.compare_steps)
        return subprocess.call([sys.executable, __file__, *sys.argv[1:], "--plain", "--stop_after", steps])
    return 0


if __name__ == "__main__":
    sys.exit(main())
