"""A script that trains a model with the Trainer: the same with a pipeline, in several processes, and without.

One argument: a JSON object with `kind`, `out` (a folder), and what is given to the Trainer: `options`, `arguments`.
Prints what was logged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

import ptm_accel
from ptm_accel.pipeline.cutting import Cutting

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.pipeline.models import VOCABULARY, build

LENGTH, ROWS = 96, 40


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts, some of them padded."""

    def __init__(self, padded: bool) -> None:
        self.ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
        self.padded = padded

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        mask = torch.ones_like(ids)
        if self.padded and index % 3 == 0:
            mask[LENGTH - 10 - index :] = 0
        return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


class Failing(TrainerCallback):
    """Ends one process in the middle, or has it save without the other."""

    def __init__(self, how: str, trainer: Any) -> None:
        self.how = how
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and args.process_index == 1 and self.how == "save":
            self.trainer.save_model()
        elif state.global_step == 3 and args.process_index == 1:
            # One clock for all processes of a machine.
            Path(args.output_dir, "failed").write_text(str(time.monotonic()), encoding="utf-8")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("something is wrong")


def cut(self: Cutting, ids: torch.Tensor) -> Any:
    """Uneven slices of some rows, and the others whole, whatever has been measured."""
    rows, length = ids.shape
    assert length == LENGTH
    return [(rows - 1, (50, 7, length - 57)), (1, (length,))]


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked.get("cut", True):
        Cutting.parts = cut  # type: ignore[method-assign]
    torch.manual_seed(0)
    model: Any = build(asked["kind"]).to(getattr(torch, asked.get("dtype", "float32")))
    model.config.use_cache = False
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    if asked.get("reads"):
        folder = os.path.join(asked["out"], f"model-{os.environ.get('RANK', 'alone')}")
        model.save_pretrained(folder)
        model = type(model).from_pretrained(folder)
        if asked.get("options"):
            model = ptm_accel.from_pretrained(type(model), folder, ptm_config=asked["options"])
    arguments: dict[str, Any] = {
        "output_dir": asked["out"],
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        # With less, AdamW makes as much of the rounding of a gradient that is nearly zero as of any gradient.
        "adam_epsilon": 1e-5,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        **asked.get("arguments", {}),
    }
    trainer: Any = ptm_accel.Trainer if asked.get("options") is not None else __import__("transformers").Trainer
    more = {} if asked.get("options") is None else {"ptm_config": asked["options"]}
    rows = Rows(asked.get("padded", False))
    if asked.get("differs"):
        rows.ids += int(os.environ["RANK"])
        rows.ids %= VOCABULARY
    trainer = trainer(model, TrainingArguments(**arguments), train_dataset=rows, eval_dataset=rows, **more)
    if "fails" in asked:
        trainer.add_callback(Failing(asked["fails"], trainer))
    if asked.get("predicts"):
        trainer.predict(rows)
    if asked.get("evaluates_first"):
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=asked.get("resume"))
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(os.path.join(asked["out"], "last"))
    logged = [[each["loss"], each["grad_norm"]] for each in trainer.state.log_history if "grad_norm" in each]
    # Threads of the launcher's store may print as well.
    sys.stdout.write("RESULT " + json.dumps({"logged": logged, "evaluated": evaluated}) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
