"""One of several processes: they save together what one process had saved, and every byte is compared.

Started by torchrun with a folder, and a list of cases (`tests/distributed/cases.py`) as JSON. The oracle of weights is
`save_pretrained` of the model in ordinary memory, that of the optimizer's state the files of one process.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ptm_accel.integrations.accelerate.sharded_saving import save_cut
from ptm_accel.integrations.transformers import saving

sys.path.insert(0, str(Path(__file__).parents[2]))
from ptm_accel.checkpoint.crc import sum_file, threads
from ptm_accel.checkpoint.training_state import save_optimizer_state
from ptm_accel.engine import Engine
from ptm_accel.optim.optimizer import PagedOptimizer
from tests.distributed.cases import Case
from tests.distributed.paged_ranks import train_paged
from tests.distributed.resumed_child import load_paged, make, whole_model

_SHARDS = "200KB"
_UNLIKE = ("README.md", "adapter_config.json")
"""These have sets in them, whose order is another in each process."""


def save(case: Case, saved: Path, engine: Engine, optimizer: PagedOptimizer) -> None:
    """Loads what one process has saved, saves it with all, and compares."""
    load_paged(case, saved, engine, optimizer)
    ranks, model = engine.training.shards.ranks, engine.model
    whole = saved / "whole"
    if ranks.rank == 0:
        # As it was built: one that is read is saved with its tensors in another order.
        built = case.build()
        built.load_state_dict(whole_model(case, saved).state_dict())
        for param in list(built.parameters())[-3:] if not case.masters else ():
            change(param)
        built.save_pretrained(whole, max_shard_size=_SHARDS)
    # All but the last of them are in a layer that is there, and has changed.
    for param in list(model.parameters())[-3:] if not case.masters else ():
        change(param)
    for is_known in (True, False):
        ours, before = saved / f"ours-{is_known}", ranks.stats.gathers
        ours.mkdir(exist_ok=True)
        with engine.saving():
            write = partial(model.save_pretrained, ours, max_shard_size=_SHARDS)
            found = save_cut(engine, lambda state, write=write: write(state_dict=state), ours, is_known=is_known)
            sums: dict[str, Any] = {}
            save_optimizer_state(optimizer, ours, sums, ranks)
        gathered = ranks.stats.gathers - before
        assert (gathered == 0) == is_known, f"{gathered} gathers"
        if ranks.rank == 0:
            compare(ours, whole, list(saved.glob("optimizer*")))
            sums |= {path.name: each for path, each in found.items()}
            assert bool(found) == is_known
            with threads() as pool:
                for name, each in sums.items():
                    assert sum_file(ours / name, pool) == each, name
        dist.barrier()


def change(param: torch.nn.Parameter) -> None:
    """What somebody does to a parameter between two steps, in every process."""
    with torch.no_grad():
        param.add_(0.5)


def compare(ours: Path, whole: Path, state: list[Path]) -> None:
    """All files of weights are those of the whole model, and all of the optimizer's those of one process."""
    theirs = {path.name: path.read_bytes() for path in (*whole.iterdir(), *state) if path.name not in _UNLIKE}
    found = {path.name: path.read_bytes() for path in ours.iterdir() if path.name not in _UNLIKE}
    assert found.keys() == theirs.keys()
    assert len(state) >= 2
    for name, content in theirs.items():
        assert found[name] == content, f"{name} differs"


def main(folder: Path, cases: list[Case]) -> None:
    dist.init_process_group("gloo")
    saving.install()
    for number, case in enumerate(cases):
        # It names the case of whatever fails.
        sys.stderr.write(f"case {case}\n")
        saved = folder / str(number)
        saved.mkdir(exist_ok=True)
        if dist.get_rank() == 0:
            make(case, "pages", saved)
        dist.barrier()
        train_paged(case, folder, begin=partial(save, case, saved))
        sys.stdout.write(f"{case}: every byte is the same\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Case(**case) for case in json.loads(sys.argv[2])])
