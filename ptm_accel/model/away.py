"""Away parameters: any torch function on a parameter whose values are away brings them in first.

A parameter on pages has the class `AwayParameter` except while a forward of its own module runs. It changes class in
place, as torch's `UninitializedParameter` does. Shape, dtype, device and counts are answered as they stand; every
other torch function reaches `AwayParameter.__torch_function__`, which brings the values in, calls the function on an
ordinary parameter, and notes whether the values may have been changed. `p.grad` of such a parameter is an
`AwayGradient`, which does the same with the sum of gradients on pages.

The storage of a parameter that is away is one NaN expanded to its shape; only code that reads addresses without calling
torch functions can see it.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from ptm_accel.errors import PagedModelError
from ptm_accel.memory.calls import Call
from ptm_accel.model.away_functions import CONVERSIONS, LAYOUT, METADATA, WRITES, converts, one_tensor_at_a_time


class Uses(Protocol):
    """What parameters on pages ask of their engine."""

    def values(self, slot: Any, *, changes: bool) -> AbstractContextManager[torch.Tensor]:
        """A context in which the values are resident."""
        ...

    def take_over(self, slot: Any) -> None:
        """Takes over what was written to values in state dictionaries."""
        ...

    def alias_given(self, slot: Any) -> None:
        """Notes that user code has a view of the values."""
        ...

    def assign(self, slot: Any, data: torch.Tensor) -> None:
        """Makes `data` the values."""
        ...

    def gradient(self, slot: Any) -> torch.Tensor | None:
        """Returns `p.grad`."""
        ...

    def set_gradient(self, slot: Any, gradient: torch.Tensor | None) -> None:
        """Takes what `p.grad` was set to."""
        ...

    def let_go(self) -> None:
        """Releases what is only pinned until the next forward."""
        ...

    def snapshot_follows(self, module: nn.Module) -> bool:
        """Whether a hook puts the values into the state dictionary that `module` makes."""
        ...


class Slot(Protocol):
    """A parameter on pages (`ptm_accel.model.slots.Slot`), as its parameter sees it."""

    name: str
    param: nn.Parameter

    @property
    def accesses(self) -> Uses:
        """Serves uses of the parameter."""
        ...

    def copied(self) -> torch.Tensor:
        """A copy of the values in ordinary memory."""
        ...


class Sum(Protocol):
    """The sum of a parameter's gradients (`ptm_accel.model.grad_slot.Sum`), as `p.grad` sees it."""

    slot: Any

    def used_by(self) -> AbstractContextManager[torch.Tensor]:
        """A context in which the sum is in the compute tier."""
        ...

    def replace(self, gradient: torch.Tensor) -> None:
        """Makes `gradient` the sum."""
        ...

    def norm(self, norm_type: float) -> torch.Tensor:
        """The sum's norm."""
        ...


bare = torch._C.DisableTorchFunctionSubclass
"""A context in which our own code uses a parameter's storage without bringing the values in."""

_SAVE = nn.Module._save_to_state_dict.__code__
_PARAMETER = nn.Parameter.__new__.__code__
_T: Any = torch.Tensor


_slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
"""The slot of each parameter on pages, by the parameter's identity; a slot keeps its parameter alive."""


def register(slot: Slot) -> None:
    """Makes a slot known; from then on its parameter may be an `AwayParameter`."""
    _slots[id(slot.param)] = slot


def forget(slot: Slot) -> None:
    """Ends `register`."""
    if _slots.get(id(slot.param)) is slot:
        del _slots[id(slot.param)]


class AwayParameter(nn.Parameter):
    """A parameter on pages, outside of the forward of its module."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Brings the values in and calls `func`."""
        if torch.compiler.is_dynamo_compiling():
            return _call_outside_graph(func, args, kwargs or {})
        return call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            slot = slot_of(self)
            slot.accesses.take_over(slot)
            with bare():
                memo[id(self)] = nn.Parameter(slot.copied(), requires_grad=self.requires_grad)
        made: nn.Parameter = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)

    # Torch sends these functions to no subclass; what is called as a method comes here.

    def set_(self, *args: Any, **kwargs: Any) -> AwayParameter:
        """Gives the parameter a copy of what torch would have it share, as `p.data = x` does."""
        with bare():
            # Torch refuses here what it refuses for the parameter.
            made = torch.empty(0, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)
        args = tuple(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)
        kwargs = {key: arg.detach() if isinstance(arg, torch.Tensor) else arg for key, arg in kwargs.items()}
        self.data = made.set_(*args, **kwargs).data
        return self

    def as_subclass(self, cls: Any) -> Any:
        """Returns the values as a tensor of another class."""
        return _with_values(_T.as_subclass, (self, cls), {})

    def _use_count(self) -> int:
        """Refuses `torch.utils.swap_tensors`, which asks this first: it would exchange what only pages can."""
        raise PagedModelError(
            f"parameter {slot_of(self).name} cannot be exchanged by torch.utils.swap_tensors: it is on pages. Assign "
            "`p.data = x`, and call `torch.__future__.set_swap_module_params_on_conversion(False)`."
        )

    @property
    def _is_param(self) -> bool:
        return True

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # The last that `nn.Parameter(p)` does to what `detach` has given it, which had to be of the class of `p`.
        self.__class__ = nn.Parameter  # type: ignore[assignment]


class AwayGradient(torch.Tensor):
    """`p.grad` of a parameter on pages: its sum of gradients.

    Attributes:
        source: the sum; None once a step has used it or it was dropped.
        parameter: its name.
    """

    source: Sum | None
    parameter: str

    @staticmethod
    def of(source: Sum, name: str, stand_in: torch.Tensor) -> AwayGradient:
        """Returns the gradient of parameter `name`, with the shape, dtype and device of `stand_in`."""
        with bare():
            made: AwayGradient = torch.Tensor._make_subclass(AwayGradient, stand_in)
        made.source, made.parameter = source, name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Brings the sum in and calls `func`."""
        return call(func, args, kwargs or {})


def is_on_pages(param: nn.Parameter) -> bool:
    """Returns whether an open engine has the parameter, in memory or away."""
    slot = _slots.get(id(param))
    return slot is not None and slot.param is param


def slot_of(param: nn.Parameter) -> Slot:
    """Returns the slot of a parameter on pages.

    Raises:
        PagedModelError: its model is gone, or its engine was closed, and its values are lost.
    """
    slot = _slots.get(id(param))
    if slot is None or slot.param is not param:
        with bare():
            shape = tuple(param.shape)
        raise PagedModelError(
            f"the values of a parameter of shape {shape} are gone: its model is no longer in use, or its engine was "
            "closed. Keep the model as long as the parameter, and call `engine.detach()` instead of `close()`."
        )
    return slot


def _gradient_source(gradient: AwayGradient) -> Sum:
    if gradient.source is None:
        raise PagedModelError(
            f"the gradient of {gradient.parameter} was used after an optimizer step or zero_grad() had used it up. "
            "Keep a copy of it (p.grad.clone()) before that."
        )
    return gradient.source


# ---- one call ------------------------------------------------------------------------------------------------------


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a torch function on arguments some of which are away.

    Raises:
        PagedModelError: the function cannot work on pages.
        BudgetError: the values do not fit the budget at once.
    """
    if func in METADATA:
        with bare():
            return func(*args, **kwargs)
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    if func in LAYOUT:
        with bare():
            twin = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        return func(twin, *args[1:], **kwargs)
    if func in CONVERSIONS and type(args[0]) in (AwayParameter, AwayGradient) and not converts(func, args, kwargs):
        return args[0]
    if getattr(func, "__name__", "").startswith(("_foreach_", "_fused_")):
        return one_tensor_at_a_time(_with_values, func, args, kwargs)
    return _with_values(func, args, kwargs)


_call_outside_graph = torch.compiler.disable(
    call,
    reason="a compiled region reads a parameter on pages of a module that is not under it. Without fullgraph=True the "
    "graph breaks there; or compile a module that holds both.",
)


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    away: dict[int, Any] = {}
    _find((*args, *kwargs.values()), away)
    writes = func in WRITES or getattr(func, "__name__", "").startswith("_fused_")
    with ExitStack() as stack:
        shown: dict[int, tuple[AwayGradient, torch.Tensor]] = {}
        for number, tensor in away.items():
            if type(tensor) is AwayGradient:
                shown[number] = tensor, stack.enter_context(_gradient_source(tensor).used_by())
        slots = [slot_of(tensor) for tensor in away.values() if type(tensor) is AwayParameter]
        views = [stack.enter_context(slot.accesses.values(slot, changes=writes)) for slot in slots]
        if shown:
            args, kwargs = _exchanged(args, shown), _exchanged(kwargs, shown)
        result = func(*args, **kwargs)
        for slot, view in zip(slots, views, strict=True):
            if not writes and any(_is_alias(tensor, view) for tensor in _tensors(result)):
                slot.accesses.alias_given(slot)
    for gradient, values in shown.values():
        if result is values:
            return gradient
        if type(result) in (list, tuple) and any(each is values for each in result):
            # In-place functions over lists give them back, and who keeps the values keeps their memory.
            result = type(result)(gradient if each is values else each for each in result)
    return result


def _find(values: Iterable[Any], away: dict[int, Any]) -> None:
    """Collects what is away among arguments, each once."""
    for value in values:
        if type(value) in (AwayParameter, AwayGradient):
            away[id(value)] = value
        elif type(value) in (list, tuple):
            _find(value, away)
        elif type(value) is dict:
            _find(value.values(), away)


def _exchanged(value: Any, shown: dict[int, tuple[AwayGradient, torch.Tensor]]) -> Any:
    """Arguments with each gradient exchanged for the sum that it shows."""
    if type(value) is AwayGradient:
        return shown[id(value)][1]
    if type(value) in (list, tuple):
        return type(value)(_exchanged(each, shown) for each in value)
    if type(value) is dict:
        return {key: _exchanged(each, shown) for key, each in value.items()}
    return value


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from _tensors(each)


def is_transformed() -> bool:
    """Returns whether a function runs that `torch.func` or `torch.vmap` transforms: its tensors have no storage."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_alias(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    if is_transformed():
        # No storage to compare.
        return True
    with bare():
        if tensor.layout is not torch.strided or tensor.device != view.device:
            return False
        return tensor.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()


# ---- functions that are answered in another way --------------------------------------------------------------------


def _grad(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    if type(args[0]) is AwayGradient:
        return None
    slot = slot_of(args[0])
    return slot.accesses.gradient(slot)


def _set_grad(func: Any, args: Any, kwargs: Any) -> None:
    param, gradient = args
    if type(param) is AwayParameter:
        slot = slot_of(param)
        slot.accesses.set_gradient(slot, gradient)
    else:
        _with_values(func, args, kwargs)


def _drop_grad(func: Any, args: Any, kwargs: Any) -> None:
    slot = slot_of(args[0])
    slot.accesses.set_gradient(slot, None)


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    target, data = args
    if target is data:
        return
    if type(data) in (AwayParameter, AwayGradient):
        data = data.clone()
    if type(target) is AwayGradient:
        source = _gradient_source(target)
        with source.slot.pool.calls.during(Call.ACCESS, source.slot.pool):
            source.replace(data)
    elif type(target) is AwayParameter:
        slot = slot_of(target)
        slot.accesses.assign(slot, data)
    else:
        func(target, data)


def _data(func: Any, args: Any, kwargs: Any) -> Any:
    # A gradient has no graph to leave, and what is written to it must reach the sum.
    return args[0] if type(args[0]) is AwayGradient else _with_values(func, args, kwargs)


def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    if type(args[0]) is AwayGradient:
        return args[0]
    caller = sys._getframe(3)
    if caller.f_code is _PARAMETER:
        # `nn.Parameter(p)`: see `AwayParameter._is_param`.
        return torch.Tensor._make_subclass(AwayParameter, _with_values(func, args, kwargs))
    saves = caller.f_code is _SAVE
    if saves and slot_of(args[0]).accesses.snapshot_follows(caller.f_locals["self"]):
        # A hook puts a snapshot into the state dictionary afterwards.
        with bare():
            return func(*args, **kwargs)
    return _with_values(func, args, kwargs)


def _autograd_grad(func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.autograd.grad`: needs the parameters' place in the graph, not their values."""

    def edge(value: Any) -> Any:
        if type(value) is AwayParameter:
            with bare():
                return torch.autograd.graph.get_gradient_edge(value)
        return type(value)(map(edge, value)) if isinstance(value, (list, tuple)) else value

    if "inputs" in kwargs:
        kwargs = {**kwargs, "inputs": edge(kwargs["inputs"])}
    else:
        args = (args[0], edge(args[1]), *args[2:])
    away: dict[int, Any] = {}
    _find((*args, *kwargs.values()), away)
    return _with_values(func, args, kwargs) if away else func(*args, **kwargs)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.linalg.vector_norm`, which torch's clipping calls on gradients: known without bringing them in."""
    plain = len(args) <= 2 and kwargs.keys() <= {"ord"}
    if not plain or type(args[0]) is not AwayGradient:
        return _with_values(func, args, kwargs)
    source = _gradient_source(args[0])
    if source.slot.sharded:
        # The sum here is a range of it.
        return _with_values(func, args, kwargs)
    with source.slot.pool.calls.during(Call.ACCESS, source.slot.pool):
        return source.norm(float(args[1] if len(args) > 1 else kwargs.get("ord", 2)))


def _refuse(func: Any, args: Any, kwargs: Any) -> Any:
    raise PagedModelError(
        f"{func.__name__} cannot work on a tensor of shape {tuple(args[0].shape)} that is on pages, which have memory "
        "of their own. Call `ptm_accel.engine_of(model).detach()` first."
    )


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _T.grad.__get__: _grad,
    _T.grad.__set__: _set_grad,
    _T.grad.__delete__: _drop_grad,
    _T.data.__get__: _data,
    _T.data.__set__: _set_data,
    _T.detach: _detach,
    torch.detach: _detach,
    torch.autograd.grad: _autograd_grad,
    torch.linalg.vector_norm: _norm,
    _T.share_memory_: _refuse,
    _T.resize_: _refuse,
}
