"""A script as people write them, with an Accelerator: it knows nothing of ptm_accel. Given: MODEL OUT."""

import sys

from accelerate import Accelerator
from accelerate.utils import set_seed


def main(source: str, out: str) -> None:
    import torch
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 512, (24,), generator=generator) for _ in range(40)]
    loader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=10)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    # Without accumulate(): as scripts do that were written for DDP.
    assert accelerator.num_processes == 1 or callable(model.no_sync)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                # Torch's own, as many scripts call it, is as good for gradients that are not scaled.
                clip = clip_grad_norm_ if number % 4 == 1 else accelerator.clip_grad_norm_
                clip(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).sum().item())
        if number == 7:
            break
    accelerator.print("RESULT", losses, flush=True)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        out, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
