"""The hyperparameters of an optimizer's groups: as they are, and as they were when a step was asked for."""

from __future__ import annotations

from typing import Any

import torch

from ptm_accel.optim.units import Work

NAMES = "param_names"
"""Of a group that was made from named parameters: one for each."""


def hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of each group as they are now, all but its parameters.

    The names of parameters are in a dictionary, by the identity of their parameter: each part of a step has other ones,
    and looks up a few.
    """
    return [
        {k: _by_parameter(group) if k == NAMES else v for k, v in group.items() if k != "params"} for group in groups
    ]


def _by_parameter(group: dict[str, Any]) -> dict[int, str]:
    # Either may have been changed alone.
    return dict(zip(map(id, group["params"]), group[NAMES], strict=False))


def kept_hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `hyperparameters`, and they stay so: a learning rate that is a tensor is changed in place by its scheduler."""
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
    """What is changed in place nowhere else."""
    return value.clone() if isinstance(value, torch.Tensor) else value
