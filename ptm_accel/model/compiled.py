"""`torch.compile` on a paged model: parameters are brought in before a compiled region runs, outside its graph.

A compiled region is a module whose call is compiled, by `torch.compile(module)` (also accelerate's `compile_regions`)
or `module.compile()`. While a region runs, all parameters under it are pinned and ordinary and its modules have none of
our hooks, so Dynamo sees what it would see without pages. AOTAutograd saves tensors for backward through the hooks of
`ptm_accel.model.saved`, so parameters may be evicted between forward and backward.

A region is one autograd node: all of its parameters are in memory at once, in forward and in backward, and so are all
of its gradients. The budget is checked for that when a region is found. Under autocast, casts of weights are part of
the graph; those that the partitioner saves stay in memory until backward and are not counted.

CUDA graphs, inductor's `freezing`, compiled autograd and compiled functions that call modules of the model are refused
by name. A region that reads a parameter of a module outside itself has one graph break at that read.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.model.floor import Floor, blocks_of
from ptm_accel.model.saved import CALLED_BY_AUTOGRAD
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor
from ptm_accel.units import format_bytes, format_least


class ForwardCalls(Protocol):
    """Begins and ends the forwards of modules (`ptm_accel.model.forwards.Forwards`)."""

    def enter(self, module: nn.Module, region: Region | None = None) -> None:
        """A module's forward begins."""
        ...

    def leave(self, module: nn.Module) -> None:
        """A module's forward has returned."""
        ...


class Surroundings(Protocol):
    """What brings parameters in around regions (`ptm_accel.model.residency.Residency`)."""

    slots: SlotTable
    executor: Executor

    @property
    def forwards(self) -> ForwardCalls:
        """The forwards of the model's modules."""
        ...

    def hook(self, module: nn.Module) -> None:
        """Puts the forward hooks on a module."""
        ...


Handles = tuple[RemovableHandle, RemovableHandle]
"""The hooks before and after a module's forward."""

_REMEDY = (
    "Compile the model or its layers themselves (`torch.compile(model)`, `layer.compile()`); after `model.compile()` "
    "on a model that is already on pages, call `engine.follow()`; for one that `torch.compile(model)` was "
    "called on before, `engine.follow(compiled)`. For generate(), pass disable_compile=True."
)


@dataclass(frozen=True, slots=True)
class Region:
    """A module that runs compiled.

    Attributes:
        name: the module's name in the model.
        module: the module.
        slots: the parameters under it that are on pages.
    """

    name: str
    module: nn.Module
    slots: tuple[ParamSlot, ...]

    @property
    def param_bytes(self) -> int:
        """Bytes of parameters that are in memory at once while it runs."""
        return sum(block.slot_bytes for block in blocks_of(self.slots))

    @property
    def grad_bytes(self) -> int:
        """Bytes of gradients that its backward returns at once."""
        return sum(block.slot_bytes for block in blocks_of(s for s in self.slots if s.param.requires_grad))


class _CompileWatch:
    """Tells every paged model of each `torch.compile(module)`, by one global hook while there is such a model."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[CompiledRegions] = weakref.WeakSet()
        self.handle: RemovableHandle | None = None

    def add(self, regions: CompiledRegions) -> None:
        self._listeners.add(regions)
        if self.handle is None:
            self.handle = register_module_module_registration_hook(self._registered)

    def discard(self, regions: CompiledRegions) -> None:
        self._listeners.discard(regions)
        if self.handle is not None and not len(self._listeners):
            self.handle.remove()
            self.handle = None

    def _registered(self, wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
        if name == "_orig_mod" and module is not None and isinstance(wrapper, OptimizedModule):
            for regions in list(self._listeners):
                regions.wrapped(wrapper, module)


_watch = _CompileWatch()


class Bared:
    """Removes our hooks (`handles`) from a running region's modules until `restore`.

    `entered` keeps its hooks: they are the boundary of the region and run outside the graph.
    """

    __slots__ = ("_hooks",)

    def __init__(self, region: Region, entered: nn.Module | None, handles: Mapping[nn.Module, Handles]) -> None:
        self._hooks: list[tuple[Any, int, Any]] = []
        if _watch.handle is not None:
            # Dynamo guards on torch's global hooks where a forward sets modules.
            self._take(_watch.handle.hooks_dict_ref(), _watch.handle.id)
        for module in region.module.modules():
            hooked = handles.get(module)
            if hooked is not None and module is not entered:
                self._take(module._forward_pre_hooks, hooked[0].id)
                self._take(module._forward_hooks, hooked[1].id)

    def _take(self, hooks: Any, number: int) -> None:
        hook = hooks.pop(number, None)
        if hook is not None:
            self._hooks.append((hooks, number, hook))

    def restore(self) -> None:
        """Gives the modules their hooks back."""
        for hooks, number, hook in self._hooks:
            hooks[number] = hook
            hooks.move_to_end(number, last=False)


class CompiledRegions:
    """The compiled regions of one model.

    `torch.compile(module)` is noticed as the wrapper is made; `module.compile()` at attach, at the next forward of the
    whole model, or by `refresh`.

    Args:
        residency: brings parameters in around a region.

    Attributes:
        found: called with each new region before it first runs; may refuse it.
    """

    def __init__(self, residency: Surroundings) -> None:
        self.found: Callable[[Region], None] | None = None
        self._residency = residency
        self._wrappers: weakref.WeakKeyDictionary[nn.Module, Region | None] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._in_place: list[tuple[Region, Any, Any]] = []

    def install(self, model: nn.Module) -> None:
        """Notes the model's modules and begins to watch for wrappers around them."""
        self._names.update((module, name) for name, module in model.named_modules())
        _watch.add(self)

    def remove(self) -> None:
        """Stops watching, and gives modules compiled in place their own compiled call back."""
        _watch.discard(self)
        for region, ours, theirs in self._in_place:
            if region.module._compiled_call_impl is ours:
                region.module._compiled_call_impl = theirs
        self._in_place.clear()
        self._names.clear()
        self._wrappers.clear()

    def running(self) -> list[Region]:
        """Returns the regions found so far."""
        in_place = [region for region, _, _ in self._in_place]
        return in_place + [region for region in self._wrappers.values() if region is not None]

    def refresh(self, model: nn.Module) -> None:
        """Finds every region in `model`: the paged model, or something that wraps it or was rebuilt around its modules.

        Raises:
            UnsupportedError: a region that cannot work on pages, by name and mode.
            BudgetError: a region that does not fit the budget at once.
        """
        for module in model.modules():
            if isinstance(module, OptimizedModule) and self._wrappers.get(module) is None:
                self._expect(module)
        self.scan()
        for module in list(self._wrappers):
            self.at(module)

    def scan(self) -> None:
        """Finds modules that were compiled in place. Cheap: called before each forward of the whole model."""
        for module in self._names:
            if module.__dict__.get("_compiled_call_impl") is not None:
                self._wrap_call(module, module.__dict__["_compiled_call_impl"])

    def at(self, module: nn.Module) -> Region | None:
        """Returns the region that begins where `module` is called, if `module` is a wrapper."""
        if module not in self._wrappers:
            return None
        region = self._wrappers[module]
        if region is None:
            region = self._build(module._modules["_orig_mod"], module.__dict__.get("dynamo_ctx"))
            self._wrappers[module] = region
        return region

    def name_of(self, module: nn.Module | None) -> str:
        """Returns the module's name in the model."""
        return self._names.get(module) or "the model"  # type: ignore[arg-type]

    def wrapped(self, wrapper: nn.Module, module: nn.Module) -> None:
        """Called while `torch.compile` makes `wrapper` around `module`."""
        if module in self._names:
            self._expect(wrapper)

    def _expect(self, wrapper: nn.Module) -> None:
        # A wrapper that is being made has no backend and options yet: `at` builds its region.
        self._wrappers[wrapper] = None
        self._residency.hook(wrapper)

    def _wrap_call(self, module: nn.Module, compiled: Any) -> None:
        if any(ours is compiled for _, ours, _ in self._in_place):
            return
        # The Dynamo context that a function was compiled with, the only holder of its backend and options.
        reader = getattr(compiled, "get_compiler_config", None)
        region = self._build(module, reader and inspect.getclosurevars(reader).nonlocals.get("self"))
        residency, own_work = self._residency, self._residency.executor.own_work

        # Not a hook: `module.compile()` compiles the calling of hooks too.
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return compiled(*args, **kwargs)
            try:
                with own_work():
                    residency.forwards.enter(module, region)
                return compiled(*args, **kwargs)
            finally:
                with own_work():
                    residency.forwards.leave(module)

        module._compiled_call_impl = call
        self._in_place.append((region, call, compiled))

    def _build(self, module: Any, context: Any) -> Region:
        name = self.name_of(module)
        _check_context(name, context)
        # Where a graph breaks, Dynamo looks at every function that is called next, these among them.
        for function in CALLED_BY_AUTOGRAD:
            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
        of = self._residency.slots.of
        region = Region(name, module, tuple(slot for p in module.parameters() if (slot := of(p)) is not None))
        if self.found is not None:
            self.found(region)
        return region


def refusal(names: Callable[[nn.Module], str]) -> Callable[[nn.Module], None]:
    """Makes the function that a hook calls while Dynamo traces it; `names` gives the name of a module.

    Dynamo calls a disabled function outside the graph, which raises; with `fullgraph=True` it reports the reason.
    """

    def refuse(module: nn.Module) -> NoReturn:
        raise UnsupportedError(
            f"{names(module)} is called from code compiled by torch.compile that is not a module of the paged model, "
            f"so its pages cannot be brought in outside the graph. {_REMEDY}"
        )

    reason = f"a model on pages is called from a compiled function. {_REMEDY}"
    disabled: Callable[[nn.Module], None] = torch.compiler.disable(refuse, reason=reason)
    return disabled


def region_bytes(region: Region, floor: Floor, landing_bytes: int) -> int:
    """Returns the least budget of a model with a compiled region.

    Args:
        region: the region.
        floor: the least budget without it.
        landing_bytes: the part of `floor` that is reserved for one arriving gradient.
    """
    moving_bytes = max(floor.moving_bytes, region.param_bytes + 16 * 4096)
    return floor.fixed_bytes + max(region.grad_bytes - landing_bytes, 0) + moving_bytes


def refuse_oversized_region(region: Region, need_bytes: int, budget: Budget) -> None:
    """Refuses a region that needs (`region_bytes`) more than the compute tier's budget.

    Raises:
        BudgetError: with the numbers and the remedy.
    """
    capacity_bytes = budget.capacity_bytes
    option = "device_memory" if budget.tier is Tier.DEVICE else "host_memory"
    if need_bytes <= capacity_bytes:
        return
    remedy = "Compile smaller parts of it, or"
    if any(isinstance(module, nn.ModuleList) for module in region.module.modules()):
        remedy = "Compile per layer (`layer.compile()` for each; in accelerate, use_regional_compilation=True), or"
    raise BudgetError(
        f"{region.name} is compiled as one region, so its {format_bytes(region.param_bytes)} of parameters and "
        f"{format_bytes(region.grad_bytes)} of gradients must be in memory at once: with the rest "
        f"{format_least(need_bytes)}, and {option} is {format_bytes(capacity_bytes)}. {remedy} set "
        f"{option} to at least {format_least(need_bytes)}."
    )


def _check_context(name: str, context: Any) -> None:
    dynamo: Any = torch._dynamo
    if getattr(dynamo.config, "compiled_autograd", False):
        raise UnsupportedError(
            f"{name} is compiled with compiled autograd (torch._dynamo.config.compiled_autograd = True), which would "
            "trace the pages that backward brings in into its graph. Set it to False."
        )
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    chosen: dict[str, Any] = getattr(backend, "config", None) or {}
    label = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "")
    inductor: Any = sys.modules.get("torch._inductor.config") if label == "inductor" else None
    if label == "cudagraphs" or chosen.get("triton.cudagraphs", inductor is not None and inductor.triton.cudagraphs):
        mode = 'mode="max-autotune"' if chosen.get("max_autotune") else 'mode="reduce-overhead"'
        what = 'backend="cudagraphs"' if label == "cudagraphs" else f"{mode} (triton.cudagraphs)"
        raise UnsupportedError(
            f"{name} is compiled with {what}: CUDA graphs replay the addresses they were recorded with, and pages "
            'move. Use mode="default" or "max-autotune-no-cudagraphs".'
        )
    if chosen.get("freezing", inductor is not None and inductor.freezing):
        raise UnsupportedError(
            f"{name} is compiled with inductor's freezing, which copies weights into the graph; on pages they would be "
            "counted nowhere and go out of date. Set freezing to False."
        )
