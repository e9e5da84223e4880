"""Works out on fake tensors what a pass holds beside parameters and gradients: nothing runs, nothing is allocated.

Fake tensors have shapes, types and storages, and no bytes. The model is given some in place of its own tensors, its
pass is gone through, and the storages that operations make are followed until they die. Copies of parameters in lower
precision, which autocast would keep, are not counted: on pages they are charged to the budget.

Nothing that depends on values can be known: an operation whose result decides what comes next (`tensor.item()`,
`nonzero`, a loop over the experts that were chosen) is refused by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptm_accel.errors import UnsupportedError
from ptm_accel.model.attach import check_model
from ptm_accel.model.away import is_on_pages

_BY_VALUE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors of fake tensors where an operation needs values, or has no rule for shapes."""


M = TypeVar("M", bound="Meter")


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """A tensor of a batch that need not exist.

    Attributes:
        shape: its shape.
        dtype: its element type; token ids by default.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.long


def forecast(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor | ShapeSpec | object],
    *,
    autocast_dtype: torch.dtype | None = None,
    backward: bool = True,
) -> int:
    """Returns the most bytes that one pass over `model` holds at once, without its parameters, buffers and gradients.

    Args:
        model: on any device, also the meta device; in the mode (train or eval) and with the gradient checkpointing
            that the pass will have. It is unchanged afterwards, and none of its values are read.
        batch: the model's keyword arguments. Of tensors only shape and dtype count; their bytes are included.
        autocast_dtype: the dtype of `torch.autocast`; None without it.
        backward: whether a backward follows, from the model's `loss` or the sum of the tensor that it returns; False
            is a pass under `torch.no_grad`.

    Raises:
        UnsupportedError: the model cannot be put on pages, or is already; it is compiled; an operation depends on
            values; there is no loss.
    """
    return followed(model, batch, Meter.over, autocast_dtype=autocast_dtype, backward=backward).peak_bytes


def followed(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor | ShapeSpec | object],
    make: Callable[[nn.Module], M],
    *,
    autocast_dtype: torch.dtype | None = None,
    backward: bool = True,
) -> M:
    """Goes through a pass, and returns the meter that has seen it.

    Args:
        model: as for `forecast`.
        batch: as for `forecast`.
        make: makes the meter, of the model with fake tensors in place of its own.
        autocast_dtype: as for `forecast`.
        backward: as for `forecast`.
    """
    check_model(model)
    _check_plain(model)
    known = (t.device for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta")
    device = next(known, torch.device("cpu"))
    with torch.random.fork_rng(devices=[]), FakeTensorMode(), _lent(model, device), ExitStack() as stack:
        meter = make(model)
        inputs = {name: _fake(value, device) for name, value in batch.items()}
        meter.add(inputs.values())
        for param in model.parameters():
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(meter.arrived)
                stack.callback(hook.remove)
        stack.enter_context(torch.set_grad_enabled(backward))
        stack.enter_context(meter)
        try:
            with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
                output = model(**inputs)
            if backward:
                _loss_of(output).backward()
        except _BY_VALUE as error:
            raise _refusal(error, inputs) from error
        return meter


def _check_plain(model: nn.Module) -> None:
    """Refuses models that are not plain modules of plain parameters at present."""
    paged = [name for name, param in model.named_parameters() if is_on_pages(param)]
    if paged:
        raise UnsupportedError(
            f"{paged[0]} and {len(paged) - 1} more of its parameters are on pages already, where a pass is "
            "recorded as it happens. Call forecast() before the model is attached, or on a copy on the meta device."
        )
    compiled = [
        name
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
    ]
    if compiled:
        raise UnsupportedError(
            f"{compiled[0] or 'the model'} and {len(compiled) - 1} more modules are compiled by torch.compile, and a "
            "forecast follows single operations. Call forecast() before the model is compiled."
        )


def _loss_of(output: Any) -> torch.Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor):
        given = list(output) if isinstance(output, Mapping) else type(output).__name__
        raise UnsupportedError(
            f"there is no loss to start a backward from: the model returned {given}. Add `labels` to the batch, or set "
            "backward=False."
        )
    return found.sum() if found.dim() else found


def _refusal(error: Exception, inputs: Mapping[str, Any]) -> UnsupportedError:
    what = getattr(error, "func", None) or getattr(error, "reason", error)
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in inputs.items() if isinstance(t, torch.Tensor))
    return UnsupportedError(
        f"the pass cannot be forecast: the result of {what} does not follow from shapes alone (batch: {shapes}). Leave "
        "the batch out, or choose a way that works on shapes (for experts: experts_implementation='grouped_mm')."
    )


def _fake(value: Any, device: torch.device) -> Any:
    """Returns a fake tensor like `value`; what is no tensor stays as it is."""
    if isinstance(value, ShapeSpec):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    if not isinstance(value, torch.Tensor):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if not isinstance(value, nn.Parameter):
        return like.requires_grad_(value.requires_grad)
    param = nn.Parameter(like, requires_grad=value.requires_grad)
    param.__dict__.update(value.__dict__)
    return param


@contextmanager
def _lent(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model with fake tensors in place of its own; at the end its modules have exactly what they had before."""
    made: dict[int, Any] = {}

    def fakes(values: Mapping[str, Any]) -> dict[str, Any]:
        # What is shared stays shared. The originals live in `before`, so that no address is used twice.
        return {name: made.setdefault(id(value), _fake(value, device)) for name, value in values.items()}

    before = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
    try:
        for module, attributes, _ in before:
            tensors = {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}
            lent = {"_parameters": fakes(module._parameters), "_buffers": fakes(module._buffers), **fakes(tensors)}
            vars(module).update(lent)
        yield
    finally:
        for module, attributes, children in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)


class Meter(TorchDispatchMode):
    """Sees every operation, and follows the storages that operations make until they die.

    Args:
        parameters: tensors of the model, whose storages are not counted, nor those of copies in another type.

    Attributes:
        alive_bytes: in storages that live now.
        peak_bytes: the most that it was.
        made_bytes: of all storages that were made so far.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive_bytes = 0
        self.peak_bytes = 0
        self.made_bytes = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        parameters = list(parameters)
        self._parameters = {storage_key(param) for param in parameters}
        self.leave_out(parameters)

    @classmethod
    def over(cls, model: nn.Module) -> Meter:
        """A meter of passes over a model."""
        return cls([*model.parameters(), *model.buffers()])

    def arrived(self, param: torch.Tensor) -> None:
        """The gradient of a parameter has come; it is not counted."""
        self.leave_out([param.grad])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Two of three calls ask a fake tensor for its device, which uses nothing and makes nothing.
        return func(*args) if func is _DEVICE else self.carried_out(func, args, kwargs or {})

    def carried_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation, once its storages are counted."""
        result = _grouped_mm(func, *args, **kwargs) if func is GROUPED_MM else func(*args, **kwargs)
        if func is CAST and storage_key(args[0]) in self._parameters:
            self.leave_out([result])
        self.add(tree_leaves(result))
        return result

    def add(self, values: Iterable[Any]) -> None:
        """Counts the storages of those `values` that are tensors, as long as they live."""
        for value in values:
            if isinstance(value, torch.Tensor) and storage_key(value) not in self._known:
                nbytes = value.untyped_storage().nbytes()
                self._follow(value, nbytes)
                self.made_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def leave_out(self, values: Iterable[torch.Tensor | None]) -> None:
        """Counts the storages of `values` no more."""
        for value in values:
            if value is not None:
                self.alive_bytes -= self._known.pop(storage_key(value), (None, 0))[1]
                self._follow(value, 0)

    def _follow(self, tensor: torch.Tensor, nbytes: int) -> None:
        key = storage_key(tensor)

        def died(ref: weakref.ref[Any]) -> None:
            known = self._known.get(key)
            # The same address may be another storage's by now.
            if known is not None and known[0] is ref:
                del self._known[key]
                self.alive_bytes -= known[1]

        self._known[key] = weakref.ref(tensor.untyped_storage(), died), nbytes
        self.alive_bytes += nbytes


GROUPED_MM: Any = torch.ops.aten._grouped_mm.default
_DEVICE: Any = torch.ops.prim.device.default
CAST: Any = torch.ops.aten._to_copy.default


def _grouped_mm(func: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result's shape, asked for in the only type that torch's rule for fake tensors knows (kernels know more)."""
    out: torch.Tensor = func(a.bfloat16(), b.bfloat16(), *args, **{**kwargs, "out_dtype": None})
    return out.to(kwargs.get("out_dtype") or a.dtype)


def storage_key(tensor: torch.Tensor) -> int:
    """Tells a living storage from all others."""
    address: int = tensor.untyped_storage()._cdata
    return address
