"""A script as people write them, with a Trainer: it knows nothing of ptm_accel. Given: MODEL OUT [DTYPE]."""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


def main(source: str, out: str, dtype: str = "float32") -> None:
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    model.resize_token_embeddings(520)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 512, (24,), generator=generator) for _ in range(40)]
    arguments = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print("RESULT", losses, loss, flush=True)
    trainer.save_model(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
