"""A training loop of one's own, with accelerate. Nothing in it knows of ptm_accel; the flag does it.

    accelerate launch examples/accelerate_loop.py
    accelerate launch --use_ptm --ptm_host_memory 16MiB --ptm_page_size 64KiB --ptm_disk . examples/accelerate_loop.py

Both print the same losses. The text is this file, one character a token; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, get_scheduler

LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="outputs/accelerate_loop")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=options.gradient_accumulation_steps)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor([min(ord(character), 127) for character in Path(__file__).read_text(encoding="utf-8")])
    rows = [{"input_ids": row, "labels": row} for row in text.unfold(0, LENGTH, 16)]
    loader = DataLoader(rows, batch_size=4)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=options.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    done = 0
    while done < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                accelerator.print(f"step {done}: loss {loss.item():.6f}")
            if done == options.steps:
                break

    accelerator.save_state(f"{options.output_dir}/state")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        f"{options.output_dir}/model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
