"""Looks a model over before anything is changed, and gives each of its parameters a slot."""

from __future__ import annotations

import torch
from torch import nn

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.pool import Pool
from ptm_accel.model.slots import ExtentTable, ParamSlot, SlotTable

_WRAPPERS = {
    "DeepSpeedEngine": "DeepSpeed",
    "FullyShardedDataParallel": "FSDP",
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
}
_DEEPSPEED_MARK = "ds_id"


def check_model(model: nn.Module) -> None:
    """Refuses what cannot be put on pages.

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
    seen: dict[int, str] = {}
    for name, param in model.named_parameters():
        _check_parameter(name, param)
        if param.device.type == "meta" or not param.numel():
            continue
        other = seen.setdefault(param.data_ptr(), name)
        if other != name:
            raise UnsupportedError(
                f"parameters {other} and {name} are two Parameter objects over the same memory. Tie them by using one "
                "Parameter in both places (as tie_weights() does)."
            )


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if hasattr(param, _DEEPSPEED_MARK):
        raise UnsupportedError(
            f"parameter {name} is managed by DeepSpeed ZeRO-3. ptm_accel takes its place; leave DeepSpeed out."
        )
    if type(param) is not nn.Parameter and type(param).__name__ not in ("Parameter",):
        raise UnsupportedError(
            f"parameter {name} is a {type(param).__name__}, not a plain nn.Parameter; quantised and distributed "
            "parameters cannot be put on pages. Load the model in a floating-point dtype, on one process."
        )
    if param.layout is not torch.strided or not param.is_contiguous():
        raise UnsupportedError(
            f"parameter {name} is not contiguous (shape {tuple(param.shape)}, strides {param.stride()}). "
            "Call `param.data = param.data.contiguous()` first."
        )


def take_parameters(
    model: nn.Module, pool: Pool, slots: SlotTable, table: ExtentTable, *, small_bytes: int
) -> list[ParamSlot]:
    """Gives every parameter a slot with blank pages.

    Args:
        model: the model.
        pool: where the pages will be.
        slots: gets the slots, under every name of a tied parameter.
        table: for the slots.
        small_bytes: parameters below this many bytes never leave the compute tier.

    Returns:
        the slots, in the order of the model's parameters.
    """
    taken: list[ParamSlot] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if not param.numel():
            continue
        known = slots.of(param)
        if known is not None:
            slots.by_name[name] = known
            continue
        taken.append(make_slot(name, param, pool, slots, table, small_bytes=small_bytes))
    return taken


def make_slot(
    name: str, param: nn.Parameter, pool: Pool, slots: SlotTable, table: ExtentTable, *, small_bytes: int
) -> ParamSlot:
    """A slot with blank pages for one parameter."""
    movable = param.numel() * param.dtype.itemsize >= small_bytes
    value = pool.create(name, Tag.PARAM, param.shape, param.dtype, movable=movable)
    slot = ParamSlot(name, param, value, pool, table)
    slots.add(slot)
    return slot
