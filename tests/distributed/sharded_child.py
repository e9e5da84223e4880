"""One of several processes: trains models in ordinary memory and on pages, on the same data, and compares every bit.

Started by torchrun with two arguments: a folder for pages, and a list of cases (`tests/distributed/cases.py`) as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.distributed.cases import Case
from tests.distributed.paged_ranks import train_paged
from tests.distributed.plain_ranks import assert_alike, train_plain


def main(folder: Path, cases: list[Case]) -> None:
    dist.init_process_group("gloo")
    for case in cases:
        # It names the case of whatever fails.
        sys.stderr.write(f"case {case}\n")
        theirs = train_plain(case)
        ours = train_paged(case, folder)
        assert_alike(case, ours, theirs)
        assert ours.weights
        assert ours.state
        sys.stdout.write(f"{case}: {len(ours.losses)} losses agree\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Case(**case) for case in json.loads(sys.argv[2])])
