"""One of several processes that save a checkpoint, in one of which something goes wrong meanwhile; or that resume.

Started by torchrun with a folder, and what is to happen as JSON (`Asked`).
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ptm_accel.integrations.transformers import Trainer
from transformers import TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2]))
from ptm_accel.checkpoint.training_state import save_optimizer_state
from ptm_accel.distributed import ranks
from ptm_accel.distributed.ranks import Ranks
from ptm_accel.engine import engine_of
from tests.integrations.sharded_child import Texts, model

TIMEOUT_S = 6
RESUMED = "resumed"
"""The folder in which what was resumed is saved again."""

_POINTS: list[tuple[Any, str]] = [
    (os, "pwrite"),
    (os, "fsync"),
    (os, "posix_fallocate"),
    (torch, "save"),
    (Path, "rename"),
    (Path, "write_text"),
    (Ranks, "told"),
    (Ranks, "all_of"),
    (Ranks, "meet"),
    (dist, "broadcast_object_list"),
]
"""What a save calls; a fault is before one of these calls."""


@dataclass(frozen=True)
class Asked:
    """What is to happen.

    Attributes:
        fault: `kill`, `exit`, `hang`, `full` (a disk), or `none`; `resume` loads what there is.
        rank: the process in which.
        at: how far the second save is then, from 0 to 1.
    """

    fault: str = "none"
    rank: int = 1
    at: float = 0.0


def happen(fault: str) -> None:
    """The fault, in this process."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exit":
        os._exit(0)
    elif fault == "hang":
        time.sleep(3 * TIMEOUT_S)
        os._exit(3)
    elif fault == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def counted(points: list[tuple[Any, str]], call: Callable[[int], None]) -> Iterator[None]:
    """Has `call` told the number of each call of `points`, before it."""
    number = 0
    with ExitStack() as stack:
        for owner, name in points:
            stock = getattr(owner, name)

            def counting(*args: Any, stock: Any = stock, **kwargs: Any) -> Any:
                nonlocal number
                number += 1
                call(number)
                return stock(*args, **kwargs)

            stack.enter_context(patch.object(owner, name, counting))
        yield


class Faulty(Trainer):
    """Something goes wrong in its second save."""

    def __init__(self, asked: Asked, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.asked = asked
        self.points = _POINTS[:1] if asked.fault == "full" else _POINTS
        self.total = 0

    def _save_checkpoint(self, *args: Any) -> None:
        first = self.state.global_step == 1
        here = (
            dist.is_initialized() and dist.get_rank() == self.asked.rank and self.asked.fault not in ("none", "resume")
        )
        fatal = 1 + int(self.asked.at * self.total)

        def tell(number: int) -> None:
            if first:
                self.total = number
            elif here and number == fatal:
                happen(self.asked.fault)

        with counted(self.points, tell):
            super()._save_checkpoint(*args)


class SavesAgain(TrainerCallback):
    """Saves what was resumed, before anything is trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: Trainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        again = self.folder / RESUMED
        self.trainer.save_model(str(again))
        engine = engine_of(self.trainer.model)
        assert engine is not None
        assert engine.optimizer is not None
        shards = engine.training.shards
        save_optimizer_state(engine.optimizer, again, ranks=None if shards is None else shards.ranks)
        if self.trainer.is_world_process_zero():
            (again / "step").write_text(str(state.global_step))


def main(folder: Path, asked: Asked) -> None:
    ranks.CONTROL_TIMEOUT_S = TIMEOUT_S
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        use_cpu=True,
        ddp_timeout=TIMEOUT_S if asked.fault == "hang" else 60,
        per_device_train_batch_size=2,
        max_steps=2,
        save_strategy="no" if asked.fault == "resume" else "steps",
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    several = int(os.environ["WORLD_SIZE"]) > 1
    options = {"shard": "full", "host_memory": "10MB" if several else "24MB", "disk": str(folder), "page_size": "16KiB"}
    again = SavesAgain(folder)
    trainer = Faulty(asked, model=model(), args=args, train_dataset=Texts(), ptm_config=options)
    if asked.fault == "resume":
        again.trainer = trainer
        trainer.add_callback(again)
    trainer.train(resume_from_checkpoint=asked.fault == "resume")
    sys.stdout.write("ended\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Asked(**json.loads(sys.argv[2])))
