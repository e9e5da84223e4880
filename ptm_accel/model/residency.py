"""Forward hooks that keep parameters in the compute tier while a forward uses them.

A module's own parameters are pinned, and ordinary parameters (`ParamSlot.show`), while its forward runs. A parameter
that another forward reads (a tied head, a mixer that reads its convolution's weight) is an `AwayParameter`: each torch
function on it brings it in. A compiled region (`ptm_accel.model.compiled`) pins all parameters under its module.

Within forwards the saved-tensor hooks of `ptm_accel.model.saved` are active, inside any other such hooks.
Recomputation inside backward (activation checkpointing) calls modules again and is an outermost forward of its own.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ptm_accel.memory.paged import Pin
from ptm_accel.memory.pool import Pool
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.casts import CastCache, Casting, Suspended, autocast_dtype
from ptm_accel.model.compiled import Bared, CompiledRegions, Handles, Region, refusal
from ptm_accel.model.hooks import Hook, RootHook
from ptm_accel.model.run_ahead import RunAhead
from ptm_accel.model.saved import SavedTensors
from ptm_accel.model.slots import ParamSlot, SlotTable, owned_by

logger = logging.getLogger(__name__)

_CALL = nn.Module._call_impl.__code__
"""The code that is on the stack while a module is being called."""

_LIBRARIES = ("torch.", "transformers.", "peft.")
"""Packages whose modules do not write to weights through `.data` in their own forwards, which torch does not count.
The parameters of other modules are `AwayParameter`s in their own forward too, where such a write is noticed."""

_READS_ITS_PARTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that pass parameters of their submodules to one kernel, if all of those are ordinary parameters."""


@dataclass(slots=True)
class _Frame:
    """One running module forward.

    Attributes:
        module: the module.
        pins: of the module's own parameters.
        shown: the slots whose parameters are ordinary ones while it runs.
        saved: the saved-tensor hooks, if this forward has put them on.
        casting: the casting mode, if this forward has entered it.
        bared: the hooks that a compiled region has removed.
        suspended: the casting mode of a forward around a compiled region, whose graph casts for itself.
        covered: modules under it whose forwards need no frame: all their parameters are pinned here.
    """

    module: nn.Module
    pins: list[Pin] = field(default_factory=list)
    shown: list[ParamSlot] = field(default_factory=list)
    saved: AbstractContextManager[Any] | None = None
    casting: Casting | None = None
    bared: Bared | None = None
    suspended: Suspended | None = None
    covered: Collection[nn.Module] = ()


def shapes_of(args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors among a forward's arguments."""
    return tuple(tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


def _being_called() -> list[nn.Module]:
    """The modules whose calls are under way in this thread, the innermost first."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


class _Frames(threading.local):
    """The forwards that are running in one thread."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        self.casting = False


class Residency:
    """The forward hooks, and what serves uses of parameters and gradients outside of them.

    Args:
        pool: where the parameters live.
        slots: the model's slots.
        table: finds the slot of a storage.

    Attributes:
        root: the model.
        owner: an object that the model keeps alive, through its hooks.
        between: called before the model's own forward, outside of backward, if it is set.
        beginning: called before an outermost forward with gradients.
        ended: called after an outermost forward with gradients.
        outside: called before a parameter is used outside of its module's forward.
        gradient_of: returns `p.grad` of a parameter.
        set_gradient_of: called with what `p.grad` of a parameter was set to.
        snapshots_of: modules with a hook that puts the values into their state dictionaries.
    """

    def __init__(self, pool: Pool, slots: SlotTable, table: ExtentTable) -> None:
        self.pool = pool
        self.slots = slots
        self.casts = CastCache(pool, slots, table)
        self.saved = SavedTensors(table)
        self.regions = CompiledRegions(self)
        self.run_ahead = RunAhead(pool)
        self.between: Callable[[], object] | None = None
        self.beginning: Callable[[], object] | None = None
        self.ended: Callable[[], object] | None = None
        self.outside: Callable[[], object] | None = None
        self.gradient_of: Callable[[ParamSlot], torch.Tensor | None] | None = None
        self.set_gradient_of: Callable[[ParamSlot, torch.Tensor | None], None] | None = None
        self.snapshots_of: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.root: nn.Module | None = None
        self.owner: object = None
        self._frames = _Frames()
        self._refuse = refusal(self.regions.name_of)
        self._hooked: weakref.WeakKeyDictionary[nn.Module, Handles] = weakref.WeakKeyDictionary()
        self._trusted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._owners: weakref.WeakKeyDictionary[nn.Module, tuple[list[ParamSlot], set[nn.Module]]]
        self._owners = weakref.WeakKeyDictionary()
        self._outside = 0
        self._told_of_outside = False

    # ---- installing ------------------------------------------------------------------------------------------

    def install(self, model: nn.Module) -> None:
        """Puts forward hooks on modules that own parameters, and on modules around them, which may read some."""
        self.root = model
        readers = {""}
        for name, module in model.named_modules(remove_duplicate=False):
            if module._parameters:
                parts = name.split(".")
                readers.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
        for name, module in model.named_modules(remove_duplicate=False):
            if name in readers:
                self.hook(module)
        for module in model.modules():
            slots = owned_by(module, self.slots)
            if slots:
                self._owners[module] = slots, {part for part in module.modules() if part in self._hooked}
        self.regions.install(model)

    def hook(self, module: nn.Module) -> None:
        """Puts the forward hooks on a module that has none of them yet."""
        if module in self._hooked:
            return
        if type(module).__module__.startswith(_LIBRARIES) and "forward" not in vars(module):
            self._trusted.add(module)
        if module is self.root:
            before = module.register_forward_pre_hook(self._enter_root_hook(), prepend=True, with_kwargs=True)
        else:
            before = module.register_forward_pre_hook(self._enter_hook(), prepend=True)
        after = module.register_forward_hook(self._leave_hook(), always_call=True)
        self._hooked[module] = before, after

    def covers(self, model: nn.Module) -> bool:
        """Whether all modules that own parameters have the hooks."""
        return all(module in self._hooked for module in model.modules() if module._parameters)

    def remove(self) -> None:
        """Takes the hooks off again."""
        self.regions.remove()
        for handle in self.hooks:
            handle.remove()
        self._hooked.clear()
        self._owners.clear()

    @property
    def hooks(self) -> tuple[RemovableHandle, ...]:
        """The hooks that are on the model's modules."""
        return tuple(handle for handles in list(self._hooked.values()) for handle in handles)

    def _enter_hook(self) -> Any:
        refuse = self._refuse

        def enter(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                refuse(module)
            stack = self._frames.stack
            if stack:
                if module in stack[-1].covered and self.saved.on_top:
                    return
                if stack[0].module is module:
                    self._end_torn_down(module)
            self.enter(module)

        return Hook(enter)

    @property
    def under_way(self) -> bool:
        """Whether a forward is running in this thread."""
        return bool(self._frames.stack)

    def enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The model's own forward begins."""
        if self._frames.stack:
            self._end_torn_down(module)
        if not self._frames.stack and torch._C._current_graph_task_id() == -1:
            if self.between is not None:
                self.between()
            grad = torch.is_grad_enabled()
            kind, evaluates = (module.training, grad, shapes_of(args, kwargs)), not module.training and not grad
            self.pool.room.begin_pass(kind[-1], evaluates=not grad)
            self.run_ahead.begin(kind, evaluates=evaluates)
        self.enter(module)

    def _enter_root_hook(self) -> Any:
        refuse = self._refuse

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                refuse(module)
            self.enter_root(module, args, kwargs)

        return RootHook(enter)

    def _leave_hook(self) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            stack = self._frames.stack
            if torch.compiler.is_dynamo_compiling() or not stack:
                return
            if stack[-1].module is module or module not in stack[-1].covered:
                self.leave(module)

        return Hook(leave)

    def _end_torn_down(self, module: nn.Module) -> None:
        """Ends the forwards of this thread if none of them runs any more, where the call of `module` begins.

        torch calls the hooks at a forward's end after an `Exception`, but not after a `KeyboardInterrupt`, after which
        a loop may go on without a call of `abort`. Python's stack tells whether forwards still run; a model that calls
        itself is on it twice.
        """
        if torch._C._current_graph_task_id() != -1:
            # Recomputation within a backward.
            return
        calls = _being_called()
        # If the call that begins here is not on the stack, modules are called in an unknown way.
        if calls and calls[0] is module and not any(f.module is call for f in self._frames.stack for call in calls[1:]):
            self.abort()

    # ---- accesses outside of a parameter's own forward ---------------------------------------------------------

    @contextmanager
    def values(self, slot: ParamSlot, *, changes: bool) -> Iterator[torch.Tensor]:
        """A context in which the values are resident, in an ordinary parameter; gives their storage's view.

        They stay afterwards while there is room (LRU).

        Args:
            slot: the parameter.
            changes: the values count as changed in any case.
        """
        stack = self._frames.stack
        if stack:
            self._meet_autocast(self._frames, stack[-1])
            self.saved.cover_others()
        else:
            self._tell_of_outside(slot)
        if self.outside is not None:
            self.outside()
        # Where no forward does that already.
        saved = self.saved.cover() if torch.is_grad_enabled() and not stack else None
        with self.pool.pin(slot.value) as tensor, saved or nullcontext():
            if changes:
                slot.changed()
            slot.show()
            try:
                yield tensor
            finally:
                slot.hide()
        self.pool.shelf.spare(slot.value.block)

    def alias_given(self, slot: ParamSlot) -> None:
        """A view of the values was given to user code; writes to it outside of forwards are not noticed otherwise."""
        if not self._frames.stack:
            slot.changed()

    def gradient(self, slot: ParamSlot) -> torch.Tensor | None:
        """What `p.grad` of a parameter is."""
        return None if self.gradient_of is None else self.gradient_of(slot)

    def set_gradient(self, slot: ParamSlot, gradient: torch.Tensor | None) -> None:
        """Takes what `p.grad` of a parameter was set to."""
        if self.set_gradient_of is not None:
            self.set_gradient_of(slot, gradient)

    def snapshot_follows(self, module: nn.Module) -> bool:
        """Whether a hook puts the values into the state dictionary that `module` makes."""
        return module in self.snapshots_of

    def _tell_of_outside(self, slot: ParamSlot) -> None:
        """Warns once if a step uses all parameters outside of forwards."""
        self._outside += 1
        if self._outside == 2 * len(self.slots) and self.run_ahead.enabled and not self._told_of_outside:
            self._told_of_outside = True
            logger.warning(
                "all %d parameters are used outside of the forwards of their modules, the last one %s (an average of "
                "the weights, say, or the step of an optimizer that was not prepared). The numbers are right; each use "
                "brings one parameter in and waits for it, which is slow if it happens in every step.",
                len(self.slots),
                slot.name,
            )

    # ---- forwards --------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, region: Region | None = None) -> None:
        """A module's forward begins: pins its own parameters, or those of the compiled region that begins here."""
        frames = self._frames
        if not frames.stack:
            self._begin_outermost(module)
        entered = None if region is not None else module
        region = region or self.regions.at(module)
        frame = _Frame(module, saved=self.saved.cover())
        if frame.saved is not None:
            frame.saved.__enter__()
        self.casts.enter()
        frames.stack.append(frame)
        if region is not None:
            self._enter_region(frames, frame, region, entered)
            return
        if module in self._owners and self._enter_group(frame):
            return
        if module._parameters or isinstance(module, _READS_ITS_PARTS):
            self.pool.room.glance()
            shows = self._shows(module)
            for slot in self._used_by(module):
                if slot.group.movable:
                    frame.pins.append(self.pool.pin(slot.value))
                if shows:
                    frame.shown.append(slot)
                    slot.show()
            self._meet_autocast(frames, frame)

    def _begin_outermost(self, module: nn.Module) -> None:
        self.pool.shelf.end_sparing()
        if module is self.root:
            self.regions.scan()
            if torch._C._current_graph_task_id() == -1:
                self._outside = 0
        if self.beginning is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.beginning()

    def _enter_group(self, frame: _Frame) -> bool:
        """Pins the group of a repeated block for all of its forward, if nothing in there asks for more care."""
        if self._frames.casting or autocast_dtype(self.pool.compute.device) is not None or self.regions.running():
            return False
        slots, modules = self._owners[frame.module]
        for module in modules:
            if not self._shows(module):
                return False
        self.pool.room.glance()
        for block in dict.fromkeys([slot.value.block for slot in slots if slot.group.movable]):
            frame.pins.append(self.pool.pin(block))
        for slot in slots:
            frame.shown.append(slot)
            slot.show()
        frame.covered = modules
        return True

    def _shows(self, module: nn.Module) -> bool:
        """Whether a module's own parameters may be ordinary ones in its forward: no uncounted writes are possible."""
        # Only our hooks: others may write.
        return module in self._trusted and len(module._forward_pre_hooks) == 1 == len(module._forward_hooks)

    def _used_by(self, module: nn.Module) -> list[ParamSlot]:
        if isinstance(module, _READS_ITS_PARTS):
            params = list(module.parameters())
        else:
            params = [param for param in module._parameters.values() if param is not None]
        return [slot for param in params if (slot := self.slots.of(param)) is not None]

    def _enter_region(self, frames: _Frames, frame: _Frame, region: Region, entered: nn.Module | None) -> None:
        for slot in region.slots:
            if slot.group.movable:
                frame.pins.append(self.pool.pin(slot.value))
            frame.shown.append(slot)
            slot.show()
        running = next((f.casting for f in frames.stack if f.casting is not None), None)
        if running is not None and not any(f.suspended for f in frames.stack):
            frame.suspended = Suspended(running)
        frame.bared = Bared(region, entered, self._hooked)

    def leave(self, module: nn.Module) -> None:
        """A module's forward has returned, well or not."""
        frames = self._frames
        # An exception may have torn down inner forwards whose hooks were not called; they end with this one.
        if not frames.stack or (
            frames.stack[-1].module is not module and not any(frame.module is module for frame in frames.stack)
        ):
            return
        while frames.stack[-1].module is not module:
            self._pop(frames)
        self._pop(frames)

    def _pop(self, frames: _Frames) -> None:
        """Ends the innermost forward."""
        frame = frames.stack.pop()
        if frame.bared is not None:
            frame.bared.restore()
        if frame.suspended is not None:
            frame.suspended.resume()
        if frame.casting is not None:
            frame.casting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            frames.casting = False
        if frame.saved is not None:
            frame.saved.__exit__(None, None, None)
        self.casts.leave()
        for slot in frame.shown:
            slot.hide()
        for pin in frame.pins:
            pin.release()
        if not frames.stack:
            self.casts.end()
            if self.ended is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                self.ended()
            if frame.module is self.root:
                self.run_ahead.forward_ended()

    def _meet_autocast(self, frames: _Frames, frame: _Frame) -> None:
        """Enters the casting mode for the rest of `frame`, if autocast is on and the mode is not."""
        if frames.casting or frame.bared is not None:
            return
        device = self.pool.compute.device
        if autocast_dtype(device) is not None:
            frame.casting = Casting(self.casts, device)
            frame.casting.__enter__()  # type: ignore[no-untyped-call]
            frames.casting = True

    def abort(self) -> None:
        """Ends forwards whose hooks an exception has skipped (Ctrl-C)."""
        self.run_ahead.give_up()
        while self._frames.stack:
            self._pop(self._frames)
