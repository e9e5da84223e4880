"""The hooks of `torch.optim.Optimizer` on its state dictionaries (`register_state_dict_pre_hook` and its three like).

They are run as torch runs them where there is a state dictionary. Checkpoints are written and read tensor by tensor:
the hooks that are given no dictionary are run there as well, and of the others it is said that they are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

StateDict = dict[str, Any]


def before_saving(optimizer: torch.optim.Optimizer) -> None:
    """Runs what is to be run before a state dictionary is made."""
    for hook in _hooks(optimizer, "_optimizer_state_dict_pre_hooks"):
        hook(optimizer)


def after_saving(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """What the hooks make of a state dictionary."""
    for hook in _hooks(optimizer, "_optimizer_state_dict_post_hooks"):
        result = hook(optimizer, state_dict)
        if result is not None:
            state_dict = result
    return state_dict


def before_loading(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> StateDict:
    """What the hooks make of a state dictionary that is to be loaded; it is not changed itself."""
    # As in torch: a hook may put other entries into it.
    given = dict(state_dict)
    for hook in _hooks(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        result = hook(optimizer, given)
        if result is not None:
            given = result
    return given


def after_loading(optimizer: torch.optim.Optimizer) -> None:
    """Runs what is to be run after a state was loaded."""
    for hook in _hooks(optimizer, "_optimizer_load_state_dict_post_hooks"):
        hook(optimizer)


def warn_of_unsaved(optimizer: torch.optim.Optimizer) -> None:
    """Says of a state that is written without a state dictionary which hooks do not see it."""
    _warn(optimizer, "_optimizer_state_dict_post_hooks", "register_state_dict_post_hook", "saved")


def warn_of_unread(optimizer: torch.optim.Optimizer) -> None:
    """Says of a state that is read without a state dictionary which hooks do not see it."""
    _warn(optimizer, "_optimizer_load_state_dict_pre_hooks", "register_load_state_dict_pre_hook", "loaded")


def _hooks(optimizer: torch.optim.Optimizer, name: str) -> list[Callable[..., Any]]:
    return list(getattr(optimizer, name).values())


def _warn(optimizer: torch.optim.Optimizer, name: str, registered: str, done: str) -> None:
    if count := len(_hooks(optimizer, name)):
        logger.warning(
            "%d hooks of optimizer.%s were not run: the optimizer state of a checkpoint is %s tensor by tensor, "
            "without a state dictionary to give them. It is %s as it is; optimizer.state_dict() and load_state_dict() "
            "run them.",
            count,
            registered,
            done,
            done,
        )
