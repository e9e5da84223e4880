"""Trains the tiny model in a process of its own, which is sent a signal in the middle of a step.

Started by tests with one argument, a JSON object: the folder, the options, which signal, how often, and where.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_disk
import pytest
import tiny
from ptm_accel.integrations.transformers import Trainer
from transformers import trainer_jit_checkpoint


class AtOnce:
    """A timer without patience."""

    def __init__(self, seconds: float, then: Callable[[], object]) -> None:
        self.start = then


def main(job: dict[str, Any]) -> None:
    patch = pytest.MonkeyPatch()
    sent: list[bool] = []

    def send() -> None:
        if not sent:
            sent.append(True)
            for _ in range(job.get("times", 1)):
                os.kill(os.getpid(), getattr(signal, job["signal"]))

    jit = job.get("jit", False)
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": job["steps"], "enable_jit_checkpoint": jit}
    trainer = Trainer(
        model=tiny.model(),
        args=tiny.arguments(Path(job["folder"]), **changes),
        train_dataset=tiny.data(),
        ptm_config=job["options"],
        callbacks=[faulty_disk.call_at(job["place"], send, patch)],
    )
    patch.setattr(trainer_jit_checkpoint, "threading", SimpleNamespace(Timer=AtOnce))
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
