"""Supervised fine-tuning with TRL, on pages: any of its Trainers, by `ptm_trainer`.

    pip install trl
    python examples/sft_trl.py MODEL_OR_PATH --text_file notes.txt --host_memory 8GiB --disk /mnt/ssd [--lora]

The result goes to --output_dir (default: outputs/sft_trl in the current directory).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from ptm_accel.integrations.transformers import ptm_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import ptm_accel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="A model id, or a directory.")
    parser.add_argument("--text_file", type=Path, required=True, help="Paragraphs, parted by empty lines.")
    parser.add_argument("--host_memory", default=None, help="What may be used in memory, such as 8GiB.")
    parser.add_argument("--disk", default=None, help="A folder on an SSD for what does not fit.")
    parser.add_argument("--page_size", default="4MiB")
    parser.add_argument("--lora", action="store_true", help="Train adapters only.")
    parser.add_argument("--max_steps", type=int, default=10)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--output_dir", default="outputs/sft_trl")
    options = parser.parse_args()

    names = ("host_memory", "disk", "page_size")
    ptm_options = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    model = ptm_accel.from_pretrained(AutoModelForCausalLM, options.model, ptm_options)
    paragraphs = [text for text in options.text_file.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    trainer = ptm_trainer(SFTTrainer)(
        model=model,
        args=SFTConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            max_length=options.max_length,
            per_device_train_batch_size=2,
            logging_steps=1,
            bf16=torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"text": paragraphs}),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear") if options.lora else None,
        ptm_config=ptm_options,
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{len(losses)} steps; loss {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end.")


if __name__ == "__main__":
    main()
