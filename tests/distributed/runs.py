"""Scripts that several processes run on a list of cases."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.prepared import run_ranks


def printed(child: Path, cases: list[Any], ranks: int, folder: Path) -> list[list[str]]:
    """Runs a script on cases in so many processes, all of which must end well; gives the lines that each printed.

    Args:
        child: the script; it is given the folder, and the cases as JSON.
        cases: what JSON can hold.
        ranks: how many processes.
        folder: for what they write.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = run_ranks(child, folder, json.dumps(cases), count=ranks, cwd=folder, env=environment)
    # What one rank raises, the others only hear of.
    assert not any(run.code for run in runs), "\n".join(f"{run.out}{run.err[-4000:]}" for run in runs)
    return [run.out.splitlines() for run in runs]
