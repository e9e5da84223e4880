"""One of two processes in which something goes wrong in one of them: the other has to learn of it, and by name.

Started by torchrun with a folder for pages, what goes wrong (a name in `FAULTS`) and `full` or `none`, for replicas.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from ptm_accel.errors import BudgetError, PTMError
from tests.distributed.cases import Case
from tests.distributed.paged_ranks import attach

TIMEOUT_S = 5
_SLACK_S = 15
"""What a busy machine takes beside it."""

ALIKE = "(?i)every rank has to do the same"
UNLIKE = "different models|all ranks need the same"
KILLED = "killed_at"
"""The file with the time at which a process kills itself."""


@contextmanager
def in_time() -> Iterator[None]:
    """It ends before long, whatever the other process does."""
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert took < TIMEOUT_S + _SLACK_S, f"{took:.1f} s"


def reads_alone(case: Case, folder: Path) -> None:
    """The first process looks at a weight, the other begins a forward: both have the error."""
    rank, model = dist.get_rank(), case.build()
    engine = attach(case, model, folder)
    weight, batch = model.get_parameter("model.layers.1.mlp.up_proj.weight"), case.batch(0, rank)
    with in_time(), pytest.raises(PTMError, match=ALIKE):
        _ = weight.norm() if rank == 0 else model(**batch)
    engine.close()


def reads_alone_after_steps(case: Case, folder: Path) -> None:
    """Each looks at another weight, once the order of a pass is known."""
    rank, model = dist.get_rank(), case.build()
    engine = attach(case, model, folder)
    optimizer = engine.bind_optimizer(case.make_optimizer(model))
    for step in range(3):
        model(**case.batch(step, rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model.get_parameter("lm_head.weight" if rank == 0 else "model.layers.2.self_attn.o_proj.weight")
    with in_time(), pytest.raises(PTMError, match=ALIKE):
        weight.norm()
    engine.close()


def nobody_else_reads(case: Case, folder: Path) -> None:
    """The first process looks at a weight, the other does nothing: the error comes after the timeout."""
    model = case.build()
    engine = attach(case, model, folder)
    if dist.get_rank() == 0:
        weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
        with in_time(), pytest.raises(PTMError, match=r"model\.layers\.1"):
            weight.norm()
    dist.barrier()
    engine.close()


def refused(case: Case, folder: Path, match: str, error: type[PTMError] = PTMError, **changes: Any) -> None:
    """Both processes refuse to train."""
    with in_time(), pytest.raises(error, match=match) as caught:
        attach(case, case.build(), folder, **changes)
    sys.stderr.write(f"refused as it has to be: {caught.value}\n")
    dist.barrier()


def models_differ(case: Case, folder: Path) -> None:
    """In their parameters."""
    model = "llama" if dist.get_rank() == 0 else "llama-wide"
    refused(replace(case, model=model), folder, UNLIKE)


def dtypes_differ(case: Case, folder: Path) -> None:
    """In the dtype of all parameters."""
    dtype = "fp32" if dist.get_rank() == 0 else "bf16"
    refused(replace(case, dtype=dtype), folder, UNLIKE)


def options_differ(case: Case, folder: Path) -> None:
    """In what is cut: with larger pages, larger parameters are small."""
    refused(case, folder, UNLIKE, page_size="64KiB" if dist.get_rank() == 0 else "128KiB")


def budget_refused(case: Case, folder: Path) -> None:
    """The second process has too little for any model, and says so; the other does not wait for it."""
    rank = dist.get_rank()
    error, match = (PTMError, "") if rank == 0 else (BudgetError, "Set host_memory to at least")
    refused(case, folder, match, error, host_memory=case.budget_bytes(rank) if rank == 0 else "256KiB")


def _die(folder: Path) -> None:
    Path(folder, KILLED).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def killed(case: Case, folder: Path, where: str) -> None:
    """The second process is killed in its second step; the first one is not to wait for it for ever."""
    case = replace(case, clip=0.5)
    rank, model = dist.get_rank(), case.build()
    engine = attach(case, model, folder)
    optimizer = engine.bind_optimizer(case.make_optimizer(model))
    dies = False
    layer = model.get_submodule("model.layers.1")
    layer.register_forward_pre_hook(lambda *_: _die(folder) if dies and where == "forward" else None)
    layer.register_full_backward_hook(lambda *_: _die(folder) if dies and where == "backward" else None)
    for step in range(4):
        dies = rank == 1 and step == 1
        model(**case.batch(step, rank)).loss.backward()
        if dies and where == "step":
            _die(folder)
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write("trained on alone\n")


FAULTS: dict[str, tuple[Callable[..., None], ...]] = {
    "alone": (reads_alone,),
    "alone-after-steps": (reads_alone_after_steps,),
    "nobody-else": (nobody_else_reads,),
    "models": (models_differ,),
    "unlike": (models_differ, dtypes_differ, options_differ),
    "budget": (budget_refused,),
}


def main(folder: Path, fault: str, shard: str) -> None:
    dist.init_process_group("gloo")
    case = Case(shard=shard)
    with pytest.MonkeyPatch.context() as patched:
        if shard == "full":
            patched.setattr("ptm_accel.distributed.ranks.CONTROL_TIMEOUT_S", TIMEOUT_S)
        if fault.startswith("killed-"):
            killed(case, folder, fault.removeprefix("killed-"))
        else:
            for each in FAULTS[fault]:
                each(case, folder)
                sys.stdout.write(f"{each.__name__}\n")
                sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
