"""The state dictionaries of `torch.optim.Optimizer`, of state that is on pages, and what torch makes of a given one."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any

import torch

from ptm_accel.errors import CheckpointError
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.hyperparameters import apart
from ptm_accel.optim.others import Other
from ptm_accel.optim.states import MASTER_KEY, States, is_whole, owned

Groups = list[dict[str, Any]]
Entries = dict[torch.Tensor, dict[str, Any]]


def state_dict_of(kept: States, param_groups: Groups) -> dict[str, Any]:
    """As `torch.optim.Optimizer.state_dict`: positional, with the real values; what is away is mapped from its backing
    store.

    Args:
        kept: what the optimizer keeps for each parameter.
        param_groups: its groups.
    """
    states: dict[int, dict[str, Any]] = {}
    numbers = count()
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": list(islice(numbers, len(group["params"])))}
        for group in param_groups
    ]
    for number, slot in enumerate(chain.from_iterable(kept.groups())):
        entry = dict(kept.others.entries(slot)) if isinstance(slot, Other) else kept.values(kept.of(slot))
        if entry:
            states[number] = entry
    return {"state": states, "param_groups": groups}


def load_into(
    kept: States,
    inner: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    expect: Callable[[Groups], None],
    same: Container[str],
) -> None:
    """Loads as `torch.optim.Optimizer.load_state_dict` does, one tensor at a time onto pages.

    Args:
        kept: what the optimizer keeps for each parameter.
        inner: the user's optimizer.
        state_dict: what is loaded.
        expect: is told the groups before anything changes, and refuses those for which there is no room.
        same: names of parameters whose state keeps the dtypes that it has there; others' is cast, as torch does.

    Raises:
        CheckpointError: other parameter groups than this optimizer's, or a master of another shape.
    """
    refuse_other_groups(inner, state_dict["param_groups"], "the optimizer state")
    entries: Entries = {}
    masters: dict[torch.Tensor, torch.Tensor] = {}
    dtypes: dict[torch.Tensor, torch.dtype | None] = {}
    for slots, saved in zip(kept.groups(), state_dict["param_groups"], strict=True):
        for slot, number in zip(slots, saved["params"], strict=True):
            given = dict(state_dict["state"].get(number, {}))
            dtypes[slot.param] = None if slot.name in same else kept.dtype_of(slot)
            if MASTER_KEY in given:
                masters[slot.param] = _master(slot, given.pop(MASTER_KEY))
            if given:
                entries[slot.param] = converted(given, slot, dtypes[slot.param], saved)
    groups, entries = completed(inner, state_dict["param_groups"], entries)
    expect(groups)
    for group, values in zip(inner.param_groups, groups, strict=True):
        for key, now in group.items():
            if isinstance(now, torch.Tensor) and isinstance(values.get(key), torch.Tensor):
                values[key] = values[key].to(now.device)
        group.clear()
        group.update(values)
    for slot in chain.from_iterable(kept.groups()):
        given = entries.get(slot.param, {})
        if isinstance(slot, Other):
            kept.others.replace(slot, {key: apart(value) for key, value in given.items()})
            continue
        # What is full-size goes onto pages from wherever it is.
        master = {MASTER_KEY: masters[slot.param]} if slot.param in masters else {}
        kept.replace(kept.of(slot), {**given, **master}, dtypes[slot.param])


def _master(slot: ParamSlot | Other, value: Any) -> Any:
    """Returns what this rank owns of a master.

    Raises:
        CheckpointError: it has another shape than the parameter.
    """
    if value.shape != slot.value.shape:
        raise CheckpointError(
            f"the fp32 master of {slot.name} in the checkpoint has shape {tuple(value.shape)}, the parameter has "
            f"{tuple(slot.value.shape)}: this checkpoint is of another model."
        )
    return value if isinstance(slot, Other) else owned(slot, value)


def refuse_other_groups(inner: torch.optim.Optimizer, groups: Groups, where: str) -> None:
    """Refuses groups from `where` that have other numbers of parameters than those of the optimizer."""
    there, here = ([len(group["params"]) for group in each] for each in (groups, inner.param_groups))
    if there != here:
        raise CheckpointError(
            f"{where} has parameter groups of {there} parameters, this optimizer has {here}: it is of another model or "
            "of another grouping."
        )


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
    value: Any, slot: ParamSlot | Other, dtype: torch.dtype | None, group: Mapping[str, Any], key: str | None = None
) -> Any:
    """Returns a value of a parameter's state as torch casts and places it; what is full-size is left for the pages.

    Of what is full-size only this rank's range is left, where the parameter is sharded: no more of it is read then.

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
    if not isinstance(value, torch.Tensor):
        return value
    if key is not None and isinstance(slot, ParamSlot) and is_whole(slot, value):
        return owned(slot, value)
    device = slot.param.device
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return value.to(dtype=torch.float32, device=device) if on_device else value
    return value.to(dtype=dtype or value.dtype, device=device)
