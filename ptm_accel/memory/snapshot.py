"""What lies on a card when torch gets no more memory there, in a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from ptm_accel.memory.budget import Budget

logger = logging.getLogger(__name__)


def keep_snapshot(error: torch.OutOfMemoryError, budgets: Iterable[Budget], file: Path) -> None:
    """Writes the budgets and torch's list of the card's memory to a file, which the error's message then names.

    Nothing has to be recorded beforehand, which would cost time at each allocation; so where a block was allocated is
    listed only if the script has called `torch.cuda.memory._record_memory_history()`. The file is JSON and no snapshot
    as `torch.cuda.memory._dump_snapshot` writes it: that is a pickle, which can run code where it is read, for a viewer
    that draws the history which is not there.

    Args:
        error: while its traceback holds what the failed pass had allocated.
        budgets: of all tiers.
        file: written anew. Where that fails, the log says so and the message stays as it is.
    """
    try:
        found = {
            "error": str(error),
            "budgets": {
                budget.tier.value: {
                    "capacity_bytes": budget.capacity_bytes,
                    "used_bytes": budget.used_bytes,
                    "peak_bytes": budget.peak_bytes,
                    "used_by_tag": {tag.value: nbytes for tag, nbytes in budget.used_by_tag().items()},
                }
                for budget in budgets
            },
            "statistics": torch.cuda.memory_stats(),
            "segments": torch.cuda.memory.memory_snapshot(),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    except (OSError, RuntimeError) as failure:
        logger.warning("the memory of the card could not be listed in %s: %s", file, failure)
        return
    # One argument, as `auto_find_batch_size` expects of errors that a smaller batch may cure.
    error.args = (f"{error} What lay on the card is listed in {file}.",)
