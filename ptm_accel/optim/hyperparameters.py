"""The hyperparameters of an optimizer's groups: now, and at the time of `step()`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ptm_accel.optim.units import Work

NAMES = "param_names"
"""Key of a group that was made from named parameters: one name for each."""


def hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the present hyperparameters of each group; names of parameters are keyed by the identity of the
    parameter.
    """
    return [
        {k: _by_parameter(group) if k == NAMES else v for k, v in group.items() if k != "params"} for group in groups
    ]


def of_step(inner: torch.optim.Optimizer, work: Work, others: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """As `hyperparameters`, with what torch takes from the first parameter, for calls that update some of them each.

    Of torch's optimizers only Adafactor does: where its `eps` is None, that of the first dtype is for all parameters.

    Args:
        inner: the user's optimizer.
        work: what the step updates.
        others: the optimizer's parameters that the model does not have.
    """
    groups = hyperparameters(inner.param_groups)
    if not isinstance(inner, torch.optim.Adafactor):
        return groups
    dtypes = {id(param): param.dtype for param in others if param.grad is not None}
    dtypes |= {id(state.slot.param): state.wide.dtype for _, state, _ in work}
    for values, group in zip(groups, inner.param_groups, strict=True):
        first, second = values["eps"]
        updated = [param for param in group["params"] if id(param) in dtypes]
        if first is None and updated:
            like = [torch.empty(0, dtype=dtypes[id(param)], device=param.device) for param in updated]
            values["eps"] = torch.finfo(_first_dtype(like, foreach=values["foreach"])).eps, second
    return groups


def _first_dtype(tensors: list[torch.Tensor], *, foreach: bool | None) -> torch.dtype:
    """Returns the dtype that an optimizer of torch comes to first."""
    if not foreach:
        return tensors[0].dtype
    grouped = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([list(tensors)])
    return next(iter(grouped))[1]


def _by_parameter(group: dict[str, Any]) -> dict[int, str]:
    # Either may have been changed alone.
    return dict(zip(map(id, group["params"]), group[NAMES], strict=False))


def kept_hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns `hyperparameters` with tensors copied: a scheduler changes a learning rate in place."""
    return [{key: apart(value) for key, value in group.items()} for group in hyperparameters(groups)]


def still_hold(kept: list[dict[str, Any]], groups: list[dict[str, Any]], work: Work) -> bool:
    """Returns whether groups and their hyperparameters are still what they were.

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
