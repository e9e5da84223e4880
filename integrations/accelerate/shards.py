"""Layers that are cut over processes (`shard: full`): whether they are, and what cannot be done with them yet."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ptm_accel.config import AUTO, FULL, PTMConfig
from ptm_accel.errors import UnsupportedError

logger = logging.getLogger(__name__)


def are_cut(config: PTMConfig, processes: int) -> bool:
    """Returns whether layers are cut over processes."""
    return config.shard == FULL and processes > 1


def may_be_cut(config: PTMConfig, processes: int) -> bool:
    """Returns whether layers are cut over processes that have no room for all of them."""
    other = (config.pipeline, config.pseudo_to_real, config.token_slices)
    return config.shard == AUTO and processes > 1 and other == (None, None, None)


def refuse_saving(config: PTMConfig, processes: int, asked: Iterable[str]) -> None:
    """Refuses to save layers that are cut over processes.

    Args:
        config: the options.
        processes: how many train together.
        asked: what would save; nothing is refused without.

    Raises:
        UnsupportedError: names it.
    """
    names = ", ".join(asked)
    if names and are_cut(config, processes):
        raise UnsupportedError(
            f"layers that are cut over {processes} processes (shard: full) cannot be saved yet; leave out {names}, or "
            "set shard to none."
        )


def refuse_own_directories(config: PTMConfig, processes: int, *, asked: bool) -> None:
    """Refuses output directories that not all processes see where layers are cut over them.

    Args:
        config: the options.
        processes: how many train together.
        asked: each machine is to write into a directory of its own (`save_on_each_node`).

    Raises:
        UnsupportedError: names it.
    """
    if asked and are_cut(config, processes):
        raise UnsupportedError(
            f"save_on_each_node=True: layers are cut over {processes} processes (shard: full), and each writes its "
            "part into the one output directory. Leave it out, with a directory that every machine sees, or set shard "
            "to none."
        )


def tell_of_one(config: PTMConfig, processes: int) -> None:
    """Says that there is nothing to cut over, if so."""
    if config.shard == FULL and processes == 1:
        logger.warning("shard: full has no effect with one process.")
