"""`torch.compile` on a paged model: pages come in at the boundary of a compiled region, outside its graph.

A compiled region is a module whose call is compiled: `torch.compile(module)`, `module.compile()`,
`module.forward = torch.compile(module.forward)`, or a class whose `forward` is decorated. Before a region runs, all
parameters under it are pinned and ordinary, and its modules have none of our hooks.
Dynamo then sees what it would see without pages, so nothing of ours breaks a graph or is guarded on. After it has
returned, pins are released and the modules get their hooks back; called eagerly, they fault as always. What AOTAutograd
saves for backward passes through the hooks of `ptm_accel.model.saved`, so parameters may leave in between.

What this costs in memory, and why it is checked when a region is found: a region is one autograd node, so all of its
parameters are in the compute tier at once, in forward and again in backward, and all of its gradients exist before the
first is taken. For a whole model that is the whole model; compiled per layer it is one layer.

Under autocast, casts of weights inside a region are nodes of its graph. Numbers are those of the same region without
pages, but what the partitioner saves of the casts (half the bytes of the region's matrix weights with `aot_eager`;
inductor mostly recomputes them) stays in memory until backward, as an activation that no budget counts.

Refused by name: CUDA graphs (`mode="reduce-overhead"`, `"max-autotune"`), which replay fixed addresses; inductor's
`freezing`, which copies weights into the graph; compiled autograd, which would trace the unpacking; and a compiled
function that merely calls the model, where there is no module boundary to bring pages in at.

A region that reads a parameter of a module outside itself gets right numbers by one graph break at that read.

Gradient checkpointing inside a region is part of its graph; around a region, the recomputation is a forward of its own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.model.floor import Floor
from ptm_accel.model.saved import CALLED_BY_AUTOGRAD
from ptm_accel.model.slots import ParamSlot

if TYPE_CHECKING:
    from ptm_accel.model.residency import Residency

Handles = tuple[RemovableHandle, RemovableHandle]
"""The hooks before and after a module's forward."""

_MARK = "_torchdynamo_orig_callable"
_REMEDY = (
    "Compile the model or its layers themselves (`torch.compile(model)`, `layer.compile()`); after `model.compile()` "
    "on a model that is already on pages, call `engine.refresh_compiled()`; for one that `torch.compile(model)` was "
    "called on before, `engine.refresh_compiled(compiled)`. For generate(), pass disable_compile=True."
)


@dataclass(frozen=True, slots=True)
class Region:
    """A module that runs compiled, and what is under it.

    Attributes:
        name: of the module in the model.
        module: the module whose parameters the graph reads.
        modules: it and all modules under it.
        slots: the parameters under it that are on pages.
    """

    name: str
    module: nn.Module
    modules: tuple[nn.Module, ...]
    slots: tuple[ParamSlot, ...]

    @property
    def param_bytes(self) -> int:
        """What is in the compute tier at once while it runs, forward and backward."""
        return sum(slot.value.slot_bytes for slot in self.slots if slot.value.movable)

    @property
    def grad_bytes(self) -> int:
        """The gradients that its backward returns at once."""
        return sum(s.value.slot_bytes for s in self.slots if s.value.movable and s.param.requires_grad)


class _Watch:
    """The one hook of torch's through which every paged model hears of wrappers around its modules."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[CompiledRegions] = weakref.WeakSet()
        self.handle: RemovableHandle | None = None

    def add(self, regions: CompiledRegions) -> None:
        """Begins to tell `regions`."""
        self._listeners.add(regions)
        if self.handle is None:
            self.handle = register_module_module_registration_hook(self._registered)

    def discard(self, regions: CompiledRegions) -> None:
        """Ends telling `regions`."""
        self._listeners.discard(regions)
        if self.handle is not None and not len(self._listeners):
            self.handle.remove()
            self.handle = None

    def _registered(self, wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
        if name == "_orig_mod" and module is not None and _is_wrapper(wrapper):
            for regions in list(self._listeners):
                regions.wrapped(wrapper, module)


_watch = _Watch()


class Bared:
    """The modules of a running region without hooks of ours; `restore` puts them back.

    Args:
        region: the region.
        entered: the module whose own hooks are the boundary; they run outside the graph.
        handles: the forward hooks of each module that has some.
    """

    __slots__ = ("_hooks",)

    def __init__(self, region: Region, entered: nn.Module | None, handles: Mapping[nn.Module, Handles]) -> None:
        self._hooks: list[tuple[Any, int, Any]] = []
        if _watch.handle is not None:
            # Models that set modules in their forward have torch's own list of hooks traced and guarded on.
            self._take(_watch.handle.hooks_dict_ref(), _watch.handle.id)
        for module in region.modules:
            own = module.__dict__
            hooked = handles.get(module)
            if hooked is not None and module is not entered:
                self._take(own["_forward_pre_hooks"], hooked[0].id)
                self._take(own["_forward_hooks"], hooked[1].id)

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
    """The compiled regions of one model, found wherever they are made.

    `torch.compile(module)` is noticed when the wrapper takes the module in; compilation in place, before the model was
    put on pages, at the next forward of the root, or by `refresh`.

    Args:
        residency: brings parameters in around a region.

    Attributes:
        found: told of each new region before it first runs; may refuse it.
    """

    def __init__(self, residency: Residency) -> None:
        self.found: Callable[[Region], None] | None = None
        self._residency = residency
        self._known: weakref.WeakKeyDictionary[nn.Module, Region | None] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._modules: list[nn.Module] = []
        self._entries: list[tuple[nn.Module, Any, Any]] = []
        self._in_place: list[Region] = []

    def install(self, model: nn.Module) -> None:
        """Learns the model's modules and begins to watch for wrappers around them."""
        for name, module in model.named_modules():
            self._names[module] = name
            self._modules.append(module)
        _watch.add(self)

    def remove(self) -> None:
        """Ends watching, and gives modules compiled in place their own entry back."""
        _watch.discard(self)
        for module, ours, theirs in self._entries:
            if module.__dict__.get("_compiled_call_impl") is ours:
                module.__dict__["_compiled_call_impl"] = theirs
        self._entries.clear()
        self._in_place.clear()
        self._modules.clear()
        self._names.clear()
        self._known.clear()

    def running(self) -> list[Region]:
        """The regions found so far."""
        return [*self._in_place, *(region for region in self._known.values() if region is not None)]

    # ---- finding ---------------------------------------------------------------------------------------------

    def refresh(self, model: nn.Module) -> None:
        """Finds every region in `model`: the paged model, or something that wraps it or was rebuilt around its modules.

        Raises:
            UnsupportedError: a region that cannot work on pages, by name and mode.
            BudgetError: a region that does not fit the budget at once.
        """
        for module in model.modules():
            if _is_wrapper(module) and self._known.get(module) is None:
                self._expect(module)
            elif module in self._names and hasattr(type(module).forward, _MARK):
                self._look_at(module, type(module).forward)
        self.scan()
        for module in list(self._known):
            self.at(module)

    def scan(self) -> None:
        """Finds modules that were compiled in place. Cheap: done before each forward of the whole model."""
        for module in self._modules:
            own = module.__dict__
            if "_compiled_call_impl" in own and own["_compiled_call_impl"] is not None:
                self._wrap_call(module, own["_compiled_call_impl"])
            if "forward" in own and not _is_wrapper(module) and hasattr(own["forward"], _MARK):
                self._look_at(module, own["forward"])

    def at(self, module: nn.Module) -> Region | None:
        """The region that begins where `module` is called, if one does."""
        if module not in self._known:
            return None
        region = self._known[module]
        if region is None:
            context = module.__dict__.get("dynamo_ctx")
            region = self._known[module] = self._build(module.__dict__["_modules"]["_orig_mod"], context)
        return region

    def name_of(self, module: nn.Module) -> str:
        """The module's name in the model."""
        return self._names.get(module) or "the model"

    def wrapped(self, wrapper: nn.Module, module: nn.Module) -> None:
        """`torch.compile` is making `wrapper` around `module`."""
        if module in self._names:
            self._expect(wrapper)

    def _expect(self, wrapper: nn.Module) -> None:
        """A wrapper that is being made; what it compiles with is not known before it is called."""
        self._known[wrapper] = None
        self._residency.hook(wrapper)

    def _look_at(self, module: nn.Module, forward: Any) -> None:
        if module not in self._known and not getattr(forward, "_torchdynamo_disable", False):
            self._known[module] = self._build(module, _context(forward))
            self._residency.hook(module)

    def _wrap_call(self, module: nn.Module, compiled: Any) -> None:
        if any(ours is compiled for _, ours, _ in self._entries):
            return
        region = self._build(module, _context(compiled))
        residency = self._residency

        # Not a hook: `module.compile()` compiles the calling of hooks too.
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return compiled(*args, **kwargs)
            try:
                residency.enter(module, region)
                return compiled(*args, **kwargs)
            finally:
                residency.leave(module)

        module.__dict__["_compiled_call_impl"] = call
        self._entries.append((module, call, compiled))
        self._in_place.append(region)

    def _build(self, module: nn.Module, context: Any) -> Region:
        name = self.name_of(module)
        _check_context(name, context)
        # Where a graph breaks, Dynamo looks at every function that is called next, these among them.
        for function in CALLED_BY_AUTOGRAD:
            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
        of = self._residency.slots.of
        slots = [slot for param in module.parameters() if (slot := of(param)) is not None]
        region = Region(name, module, tuple(module.modules()), tuple(slots))
        if self.found is not None:
            self.found(region)
        return region


def refusal(names: Callable[[nn.Module], str]) -> Callable[[nn.Module], None]:
    """What a hook calls when it finds itself being traced: a compiled function that we know nothing of.

    Dynamo leaves a disabled function out of the graph and calls it, which raises; with `fullgraph=True` it reports the
    reason itself.

    Args:
        names: the name of a module in the model.
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
    """The least budget of a model with a compiled region, whose parameters are in memory at once.

    Args:
        region: the region.
        floor: the least budget of the model where nothing is compiled.
        landing_bytes: what of it is room for one gradient to arrive in; here all of a region's do.
    """
    moving_bytes = max(floor.moving_bytes, region.param_bytes + 16 * 4096)
    return floor.fixed_bytes + max(region.grad_bytes - landing_bytes, 0) + moving_bytes


def refuse_oversized_region(region: Region, need_bytes: int, budget: Budget) -> None:
    """Refuses a region that does not fit the budget at once.

    Args:
        region: the region.
        need_bytes: what it needs (`region_bytes`).
        budget: the compute tier's.

    Raises:
        BudgetError: with the numbers and the remedy.
    """
    capacity_bytes = budget.capacity_bytes
    dial = "device_memory" if budget.tier is Tier.DEVICE else "host_memory"
    if need_bytes <= capacity_bytes:
        return
    remedy = "Compile smaller parts of it, or"
    if len([m for m in region.module.modules() if isinstance(m, nn.ModuleList)]):
        remedy = "Compile per layer (`layer.compile()` for each; in accelerate, use_regional_compilation=True), or"
    raise BudgetError(
        f"{region.name} is compiled as one region, so its {region.param_bytes} bytes of parameters and "
        f"{region.grad_bytes} bytes of gradients must be in memory at once: with the rest {need_bytes} bytes, and "
        f"{dial} is {capacity_bytes} bytes. {remedy} set {dial} to at least {need_bytes} bytes."
    )


def _is_wrapper(module: nn.Module) -> bool:
    """Whether `module` is what `torch.compile(module)` returns."""
    return isinstance(module, OptimizedModule)


def _context(compiled: Any) -> Any:
    """The Dynamo context a function was compiled with: the only holder of its backend and options."""
    reader = getattr(compiled, "get_compiler_config", None)
    return None if reader is None else inspect.getclosurevars(reader).nonlocals.get("self")


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
    graphs = chosen.get("triton.cudagraphs", inductor is not None and inductor.triton.cudagraphs)
    if graphs or label == "cudagraphs":
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
