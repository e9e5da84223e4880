"""Checks a model before anything is changed, and gives each of its parameters a slot."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import nn

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.block import Part, placeholder
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.transfer import Source
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.away import AwayParameter
from ptm_accel.model.gradients import refuse_sparse
from ptm_accel.model.grouping import Sharding, groups_of
from ptm_accel.model.groups import ParamGroup
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor

_WRAPPERS = {
    "DeepSpeedEngine": "DeepSpeed",
    "FullyShardedDataParallel": "FSDP",
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
}

Paged = tuple[ParamGroup, Part]
"""A parameter's group of its own, and its values there."""

_SMALL_SHARE = 64
"""Tensors of less than a page divided by this stay in the compute tier: norms and biases, not worth a transfer."""


def small_bytes(page_bytes: int) -> int:
    """Parameters below this many bytes never leave the compute tier."""
    return page_bytes // _SMALL_SHARE


def check_model(model: nn.Module, paged: Container[nn.Parameter] = ()) -> None:
    """Refuses what cannot be put on pages.

    Args:
        model: the model.
        paged: parameters whose values are on pages already; they only hold placeholders.

    Raises:
        UnsupportedError: names the module or parameter and the reason.
    """
    for name, module in model.named_modules():
        kind = _WRAPPERS.get(type(module).__name__)
        if kind is None and type(module).__name__.startswith("FSDP"):
            kind = "FSDP2"
        if kind is not None:
            raise UnsupportedError(
                f"{name or 'the model'} is already wrapped by {kind} ({type(module).__name__}). ptm_accel takes its "
                "place; pass the unwrapped model and leave the other plugin out."
            )
    # Those that are on pages of another model are refused by its name, later.
    known = model.named_parameters()
    checked = {name: param for name, param in known if param not in paged and not isinstance(param, AwayParameter)}
    for name, param in checked.items():
        _check_parameter(name, param)
    _check_apart({n: p for n, p in checked.items() if p.device.type != "meta" and p.numel()})


def _check_apart(params: Mapping[str, nn.Parameter]) -> None:
    """No two lie in the same memory, or in parts of it."""
    last: tuple[torch.device | None, int, str] = (None, 0, "")
    for name, param in sorted(params.items(), key=lambda known: (str(known[1].device), known[1].data_ptr())):
        begin = param.data_ptr()
        device, end, other = last
        if device == param.device and begin < end:
            raise UnsupportedError(
                f"parameters {other} and {name} are two Parameter objects over the same memory, or parts of it. Tie "
                "them by using one Parameter in both places (as tie_weights() does), or give each memory of its own "
                "(`param.data = param.data.clone()`)."
            )
        last = param.device, begin + param.numel() * param.element_size(), name


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if hasattr(param, "ds_id"):
        raise UnsupportedError(
            f"parameter {name} is managed by DeepSpeed ZeRO-3. ptm_accel takes its place; leave DeepSpeed out."
        )
    if type(param).__name__ != "Parameter":
        raise UnsupportedError(
            f"parameter {name} is a {type(param).__name__}, not a plain nn.Parameter; quantised and distributed "
            "parameters cannot be put on pages. Load the model in a floating-point dtype, on one process."
        )
    if param.layout is not torch.strided or not param.is_contiguous():
        raise UnsupportedError(
            f"parameter {name} is not contiguous (shape {tuple(param.shape)}, strides {param.stride()}). "
            "Call `param.data = param.data.contiguous()` first."
        )
    if param.grad is not None:
        refuse_sparse(name, param.grad)


def take_parameters(
    model: nn.Module,
    executor: Executor,
    slots: SlotTable,
    table: ExtentTable,
    *,
    small: int,
    paged: Mapping[nn.Parameter, Paged],
    group_bytes: int = 0,
    known: SlotTable | None = None,
    sharding: Sharding | None = None,
    backing: Source | None = None,
) -> list[ParamSlot]:
    """Gives every parameter a slot, in the order of the model's parameters.

    Args:
        model: the model.
        executor: serves accesses.
        slots: gets the slots, under every name of a tied parameter.
        table: for the slots.
        small: parameters below this many bytes never leave the compute tier.
        paged: the values of parameters that are on pages already, and stay there if they are alone; all others get
            blank pages.
        group_bytes: the most that the values of a group of several parameters take.
        known: slots that there are already, which their parameters keep.
        sharding: the ranks that they are sharded over, if they are.
        backing: gathers them then.

    Returns:
        the new slots.
    """
    new: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.numel() and slots.of(param) is None and (known is None or known.of(param) is None):
            new.setdefault(param, name)
    made = {}
    sizes = {"small": small, "group_bytes": group_bytes}
    for param, (group, member) in groups_of(model, list(new), **sizes, sharding=sharding).items():
        if group.pieces:
            if param in paged and len(group.shapes) == 1:
                group, own = paged[param]
                group.rename(new[param])
            else:
                own = group.part(member, "", Tag.PARAM, param.dtype, executor.pool)
            assert backing is not None
            value = group.whole_part(member, param.shape, own.block, executor.pool, backing)
            made[param] = ParamSlot(new[param], param, group, member, value, executor, table, own)
            continue
        if param in paged and len(group.shapes) == 1:
            group, value = paged[param]
            group.rename(new[param])
        else:
            value = group.part(member, "", Tag.PARAM, param.dtype, executor.pool)
        made[param] = ParamSlot(new[param], param, group, member, value, executor, table)
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.numel():
            slots.put(name, made.get(param) or slots.of(param) or known.of(param))  # type: ignore[union-attr,arg-type]
    return [made[param] for param in new]


def leave_meta(model: nn.Module, slots: SlotTable, device: torch.device) -> set[nn.Parameter]:
    """Replaces every parameter on the meta device, whose data cannot be set, by a like one on `device`.

    Returns:
        the new parameters; they hold placeholders.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or param.device.type != "meta":
                continue
            if param not in made:
                stand_in = placeholder(param.shape, param.dtype, device)
                made[param] = nn.Parameter(stand_in, requires_grad=param.requires_grad)
                made[param].__dict__.update(param.__dict__)
            module._parameters[name] = made[param]
    slots.replace(made)
    return set(made.values())


def return_to_meta(model: nn.Module, param: nn.Parameter) -> None:
    """Undoes `leave_meta` for a parameter: a like one on the meta device is in its place."""
    made = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    for module in model.modules():
        module._parameters.update({name: made for name, other in module._parameters.items() if other is param})
