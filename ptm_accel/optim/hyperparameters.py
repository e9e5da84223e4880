"""The hyperparameters of an optimizer's groups: now, and at the time of `step()`."""

from __future__ import annotations

from typing import Any

import torch

from ptm_accel.optim.units import Work

NAMES = "param_names"
"""Of a group that was made from named parameters: one for each."""


def hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The present hyperparameters of each group; names of parameters are keyed by the identity of the parameter."""
    return [
        {k: _by_parameter(group) if k == NAMES else v for k, v in group.items() if k != "params"} for group in groups
    ]


def _by_parameter(group: dict[str, Any]) -> dict[int, str]:
    # Either may have been changed alone.
    return dict(zip(map(id, group["params"]), group[NAMES], strict=False))


def kept_hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `hyperparameters`, with tensors copied: a scheduler changes a learning rate in place."""
    return [{key: apart(value) for key, value in group.items()} for group in hyperparameters(groups)]


def still_hold(kept: list[dict[str, Any]], groups: list[dict[str, Any]], work: Work) -> bool:
    """Whether groups and their hyperparameters are still what they were.

    Args:
        kept: what the hyperparameters were.
        groups: those of now.
        work: whose parameters were in which group.
    """
    current = hyperparameters(groups)
    if len(current) != len(kept):
        return False
    members = [{id(param) for param in group["params"]} for group in groups]
    return all(id(state.slot.param) in members[group] for group, state, _ in work) and all(
        key in then and bool(then[key] == value)
        for then, now in zip(kept, current, strict=True)
        for key, value in now.items()
    )


def apart(value: Any) -> Any:
    """`value`, copied if it is a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value
