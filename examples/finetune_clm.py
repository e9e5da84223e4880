"""Fine-tunes a causal language model that does not fit, in full or with LoRA, on a text file or a dataset.

    python examples/finetune_clm.py MODEL_OR_PATH --text_file notes.txt --host_memory 8GiB --disk /mnt/ssd
    python examples/finetune_clm.py Qwen/Qwen3-0.6B --dataset roneneldan/TinyStories --lora --bf16

The model is read from safetensors straight onto pages, so it is never whole in memory. Options that are not given are
derived from the machine. All options of `TrainingArguments` can be given as well; the result goes to --output_dir
(default: outputs/finetune_clm in the current directory).
"""

from __future__ import annotations

import os

# Before torch is imported: spinning OpenMP threads beside a busy neighbour are tens of times slower, silently.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import ptm_accel
from ptm_accel import PTMConfig, Trainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class ModelArguments:
    """Which model, and how it is trained."""

    model: str = field(metadata={"help": "A Hub id or a local directory."})
    dtype: str = field(default="float32", metadata={"help": "Parameters' dtype.", "choices": list(DTYPES)})
    lora: bool = field(default=False, metadata={"help": "Train LoRA adapters instead of all parameters."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters."})


@dataclass
class DataArguments:
    """What it is trained on; a text file or a dataset."""

    text_file: str | None = field(default=None, metadata={"help": "A plain text file."})
    dataset: str | None = field(default=None, metadata={"help": "A dataset's Hub id or local path."})
    dataset_config: str | None = field(default=None, metadata={"help": "The dataset's configuration."})
    dataset_split: str = field(default="train", metadata={"help": "The split, e.g. 'train[:1%%]'."})
    text_column: str = field(default="text", metadata={"help": "The column with the text."})
    sequence_length: int = field(default=512, metadata={"help": "Tokens in a sequence."})

    def load(self) -> Dataset:
        """The rows of text."""
        if (self.text_file is None) == (self.dataset is None):
            raise SystemExit("Give either --text_file or --dataset.")
        if self.text_file is not None:
            return Dataset.from_dict({"text": [Path(self.text_file).read_text(encoding="utf-8")]})
        return load_dataset(self.dataset, self.dataset_config, split=self.dataset_split)


@dataclass
class PagingArguments:
    """The options of ptm_accel; each has a default that is derived on the machine."""

    ptm_config: str | None = field(
        default=None, metadata={"help": "A YAML file of options, instead of the flags here."}
    )
    device_memory: str | None = field(default=None, metadata={"help": "Of the GPU's memory, e.g. 10GB or 80%%."})
    host_memory: str | None = field(default=None, metadata={"help": "Of the machine's memory, e.g. 16GiB or 50%%."})
    disk: list[str] | None = field(default=None, metadata={"help": "Folders on SSDs for what does not fit."})
    page_size: str | None = field(default=None, metadata={"help": "The unit of booking and transfer."})
    master_weights: str | None = field(default=None, metadata={"help": "fp32: masters of low-precision parameters."})

    def options(self) -> PTMConfig:
        """What was given, as ptm_accel takes it."""
        names = ("device_memory", "host_memory", "disk", "page_size", "master_weights")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.ptm_config is None:
            return PTMConfig.load(given)
        if given:
            raise SystemExit(f"Give --ptm_config or --{', --'.join(given)}, not both.")
        return PTMConfig.load(self.ptm_config)


def parse() -> tuple[ModelArguments, DataArguments, PagingArguments, TrainingArguments]:
    parser = HfArgumentParser((ModelArguments, DataArguments, PagingArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="outputs/finetune_clm",
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        learning_rate=1e-5,
        warmup_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--model")
    return parser.parse_args_into_dataclasses(arguments)


def make_dataset(rows: Dataset, column: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Sequences of up to `length` tokens, cut from the rows one after another."""

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": tokenizer(batch[column], verbose=False)["input_ids"]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, Any]:
        tokens = [token for ids in batch["input_ids"] for token in ids]
        cut = [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
        return {"input_ids": cut, "labels": [list(row) for row in cut]}

    tokens = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
    data = tokens.map(group, batched=True)
    if len(data) == 0:
        raise SystemExit(f"The text has fewer than {length} tokens; give more, or a smaller --sequence_length.")
    return data


def main() -> None:
    model_arguments, data_arguments, paging, training = parse()
    options = paging.options()
    rows = data_arguments.load()
    set_seed(training.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_arguments.model)
    data = make_dataset(rows, data_arguments.text_column, tokenizer, data_arguments.sequence_length)
    model: Any = ptm_accel.from_pretrained(
        AutoModelForCausalLM, model_arguments.model, options, dtype=DTYPES[model_arguments.dtype]
    )
    if model_arguments.lora:
        rank = model_arguments.lora_rank
        lora = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        model = get_peft_model(model, lora)
        model.print_trainable_parameters()

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        ptm_config=options,
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{len(losses)} steps; loss {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end.")
    kind = "the LoRA adapter" if model_arguments.lora else "the model"
    print(f"Saved {kind} to {training.output_dir}.")


if __name__ == "__main__":
    main()
