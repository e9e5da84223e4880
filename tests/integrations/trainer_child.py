"""Trains the tiny model in a process of its own; prints the log and the digest of the weights as JSON.

Started by tests with one argument, a JSON object: the folder, the options, when to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import tiny
from ptm_accel.integrations.transformers import Trainer

from ptm_accel.engine import engine_of

STEPS = 10


class Killed(Trainer):
    """Is killed while it saves (model and optimizer are written, the rest is not), or between forward and backward."""

    kill_at: int | None = None
    kill_in_step: int | None = None
    kill_after_s: float | None = None
    digests: Path | None = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step == self.kill_in_step:
            if self.kill_after_s is None:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(self.kill_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.digests is not None:
            state = tiny.state_digest(engine_of(self.model).optimizer.state_dict())
            found = self.digests / f"new-{self.state.global_step}"
            found.write_text(json.dumps([tiny.digest(self.model), state]), encoding="utf-8")
            found.rename(self.digests / f"checkpoint-{self.state.global_step}")

    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


def main(job: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    trainer = Killed(
        model=tiny.model(**job["sizes"]),
        args=tiny.arguments(
            folder,
            max_steps=job.get("steps", STEPS),
            save_strategy="steps",
            save_steps=job.get("save_steps", 100),
            **job["changes"],
        ),
        train_dataset=tiny.data(),
        ptm_config=job["options"],
    )
    trainer.kill_at = job.get("kill_at")
    trainer.kill_in_step = job.get("kill_in_step")
    trainer.kill_after_s = job.get("kill_after_s")
    trainer.digests = Path(job["digests"]) if "digests" in job else None
    trainer.train(resume_from_checkpoint=job.get("resume", False))
    engine_of(trainer.model).check_integrity()
    result = {"history": tiny.history(trainer), "weights": tiny.digest(trainer.model)}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
