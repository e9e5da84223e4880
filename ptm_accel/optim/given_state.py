"""What `torch.optim.Optimizer.load_state_dict` makes of what it is given, but for what belongs on pages."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.states import is_full

Groups = list[dict[str, Any]]
Entries = dict[torch.Tensor, dict[str, Any]]


def completed(
    inner: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], state: Entries
) -> tuple[Groups, Entries]:
    """Groups and state with what the optimizer's class fills in where those of older versions lack it.

    Args:
        inner: the user's optimizer; it is not changed.
        groups: as many as the optimizer has; copied.
        state: by parameter.
    """
    given: Groups = []
    for here, there in zip(inner.param_groups, groups, strict=True):
        names = {"param_names": here["param_names"]} if "param_names" in here else {}
        values = {key: value for key, value in there.items() if key != "params"}
        given.append({**names, **copy.deepcopy(values), "params": here["params"]})
    # `__setstate__` is where its class does so; it sets what it is given on what it is called on.
    twin = object.__new__(type(inner))
    twin.__dict__.update({**inner.__dict__, "defaults": dict(inner.defaults)})
    twin.__setstate__({"state": defaultdict(dict, state), "param_groups": given})
    return twin.param_groups, dict(twin.state)


def converted(
    value: Any, slot: ParamSlot, dtype: torch.dtype | None, group: Mapping[str, Any], key: str | None = None
) -> Any:
    """A value of a parameter's state as torch casts and places it; what is full-size is left for the pages.

    Args:
        value: a tensor, a container of such, or anything else.
        slot: of the parameter.
        dtype: of what the parameter is updated in; None to keep the value's own.
        group: the hyperparameters that were saved with it.
        key: the optimizer's own key of it.
    """
    if isinstance(value, dict):
        return {name: converted(item, slot, dtype, group, name) for name, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, torch.Tensor)):
        items: Any = (converted(item, slot, dtype, group) for item in value)
        return type(value)(items)  # type: ignore[call-arg]
    if not isinstance(value, torch.Tensor) or (key is not None and is_full(slot, value)):
        return value
    device = slot.param.device
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return value.to(dtype=torch.float32, device=device) if on_device else value
    return value.to(dtype=dtype or value.dtype, device=device)
