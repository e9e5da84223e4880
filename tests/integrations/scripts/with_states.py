"""A script as people write them, that saves its state and goes on from it. Given: MODEL OUT."""

import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


def main(source: str, out: str) -> None:
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM

    project = ProjectConfiguration(project_dir=out, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 512, (24,), generator=generator) for _ in range(40)]
    loader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = list(loader)

    def train(numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            loss = model(**batches[number]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).sum().item())
            if number < 4:
                accelerator.save_state()
        return losses

    losses = train(range(6))
    accelerator.load_state()
    again = train(range(4, 6))
    kept = sorted(path.name for path in Path(out, "checkpoints").iterdir())
    accelerator.print("RESULT", losses, again, kept, flush=True)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        out, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
