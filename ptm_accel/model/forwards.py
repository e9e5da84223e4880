"""Forwards under way: what each module's forward has pinned, shown and put on, until it ends.

A module's own parameters are pinned, and ordinary parameters (`ParamSlot.show`), while its forward runs; where it owns
a whole group, all of that. A compiled region (`ptm_accel.model.compiled`) pins all under its module.

Within forwards the saved-tensor hooks of `ptm_accel.model.saved` are active, inside any other such hooks.
Recomputation inside backward (activation checkpointing) calls modules again and is an outermost forward of its own.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from ptm_accel.memory.block import Pin
from ptm_accel.memory.calls import Call, at_backward_end
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.assignments import regroup, take_in
from ptm_accel.model.away import bare
from ptm_accel.model.casts import CastCache, Casting, Suspended, autocast_dtype
from ptm_accel.model.compiled import Bared, CompiledRegions, Handles, Region, refusal
from ptm_accel.model.grouping import ONE_KERNEL, owned_by
from ptm_accel.model.saved import SavedTensors
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor
from ptm_accel.runtime.run_ahead import RunAhead

_CALL = nn.Module._call_impl.__code__
"""Code that is on the stack while a module is being called."""


@dataclass(slots=True)
class _RunningForward:
    """One running module forward.

    Attributes:
        module: the module.
        pins: of the module's own parameters.
        shown: the slots whose parameters are ordinary ones while it runs.
        saved: the saved-tensor hooks, if this forward has put them on.
        casting: the casting mode, if this forward has entered it.
        bared: the hooks that a compiled region has removed.
        suspended: the casting mode of a forward around a compiled region, whose graph casts for itself.
        fused: its module has no hook that would end it: it is over where the next hook is called.
        caches: autocast kept what it casts before this forward, and does not in it.
        covered: modules under it whose forwards need no frame: all their parameters are pinned here.
        task: of autograd, in which it began; -1 outside of backward.
    """

    module: nn.Module
    pins: list[Pin] = field(default_factory=list)
    shown: list[ParamSlot] = field(default_factory=list)
    saved: AbstractContextManager[Any] | None = None
    casting: Casting | None = None
    bared: Bared | None = None
    suspended: Suspended | None = None
    fused: bool = False
    caches: bool = False
    covered: Collection[nn.Module] = ()
    task: int = field(default_factory=torch._C._current_graph_task_id)


def shapes_of(args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the tensors among a forward's arguments."""
    return tuple(tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


def _being_called() -> list[nn.Module]:
    """Returns the modules whose calls are under way in this thread, the innermost first."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


class _Stack(threading.local):
    """Forwards that run in one thread, and whether one of them casts."""

    def __init__(self) -> None:
        self.frames: list[_RunningForward] = []
        self.casting = False


class Forwards:
    """Begins and ends the forwards of a model's modules.

    Args:
        executor: serves accesses.
        slots: the model's slots.
        table: finds the slot of a storage.
        regions: the model's compiled regions.

    Attributes:
        root: the model.
        owner: an object that the model keeps alive, through its hooks.
        hooked: the hooks of each module that has them.
        trusted: modules in whose forwards no write to a parameter is missed.
        outside_uses: number of uses of parameters outside of forwards since the model's own forward began.
        apart: parameters whose values may have left the blocks of their groups.
        between: called before the model's own forward, outside of backward, if it is set.
        beginning: called before an outermost forward with gradients.
        ended: called after an outermost forward with gradients.
    """

    def __init__(self, executor: Executor, slots: SlotTable, table: ExtentTable, regions: CompiledRegions) -> None:
        self.casts = CastCache(executor.pool, slots, table)
        self.saved = SavedTensors(table)
        self.run_ahead = RunAhead(executor)
        self.root: nn.Module | None = None
        self.owner: object = None
        self.hooked: weakref.WeakKeyDictionary[nn.Module, Handles] = weakref.WeakKeyDictionary()
        self.trusted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.outside_uses = 0
        self.apart: list[ParamSlot] = []
        self.between: Callable[[], object] | None = None
        self.beginning: Callable[[], object] | None = None
        self.ended: Callable[[], object] | None = None
        self._executor = executor
        self._pool = executor.pool
        self._slots = slots
        self._regions = regions
        self._owners: weakref.WeakKeyDictionary[nn.Module, tuple[list[ParamSlot], set[nn.Module]]]
        self._owners = weakref.WeakKeyDictionary()
        self._owned: weakref.WeakSet[ParamSlot] = weakref.WeakSet()
        self._owner_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._recomputed: _RunningForward | None = None
        self._backward = -1
        self._running = _Stack()
        self._refuse = refusal(regions.name_of)

    def find_owners(self, model: nn.Module) -> None:
        """Finds the modules whose parameters are a group."""
        self._owners.clear()
        self._owner_of.clear()
        self._owned.clear()
        for module in model.modules():
            slots = owned_by(module, self._slots)
            if slots:
                parts = {part for part in module.modules() if part in self.hooked}
                self._owners[module] = slots, parts
                self._owner_of |= dict.fromkeys(parts, weakref.ref(module))
                self._owned |= set(slots)

    def regroup(self) -> None:
        """Moves values back into the blocks of their groups, where that is possible."""
        before, self.apart = len(self.apart), regroup(self.apart)
        if len(self.apart) < before and self.root is not None:
            self.find_owners(self.root)

    def is_owned(self, slot: ParamSlot) -> bool:
        """Returns whether a parameter is of a module whose parameters are a group."""
        return slot in self._owned

    @property
    def under_way(self) -> bool:
        """Whether a forward is running in this thread."""
        return bool(self._running.frames)

    def call_begins(self, module: nn.Module, args: Any) -> None:
        """The hook before a module's forward."""
        if torch.compiler.is_dynamo_compiling():
            self._refuse(module)
        frames = self._running.frames
        if frames:
            if frames[-1].fused:
                self._pop()
            if isinstance(module, ONE_KERNEL) and self._may_fuse(module):
                self._enter_fused(module)
                return
            if module in frames[-1].covered and self.saved.on_top:
                return
            if frames[0].module is module:
                self._end_torn_down(module)
        elif module in self._owner_of and self._recomputes(module):
            return
        self.enter(module)

    def call_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook after a module's forward."""
        frames = self._running.frames
        if torch.compiler.is_dynamo_compiling() or not frames:
            return
        if frames[-1].fused:
            self._pop()
        if frames[-1].module is module or module not in frames[-1].covered:
            self.leave(module)

    def enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The hook before the model's own forward."""
        if torch.compiler.is_dynamo_compiling():
            self._refuse(module)
        if self._running.frames:
            self._end_torn_down(module)
        with self._pool.calls.during(Call.FORWARD, self._pool):
            if torch._C._current_graph_task_id() == -1:
                self._end_recomputed()
                if not self._running.frames:
                    self._begin_pass(module, args, kwargs)
            self.enter(module)

    def _begin_pass(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begins a pass of the whole model, outside of any other."""
        if self.run_ahead.step.goes_on:
            return
        self._tell_of_evaluation(module)
        if self.between is not None:
            self.between()
        if self.apart:
            self.regroup()
        grad, shapes = torch.is_grad_enabled(), shapes_of(args, kwargs)
        with bare():
            trained = bytes(slot.param.requires_grad for slot in self._slots)
        kind = self.run_ahead.step.next(module.training, grad, trained)
        self._pool.admission.begin_pass(shapes, evaluates=not kind.gradients)
        self.run_ahead.begin(kind, elements=sum(map(math.prod, shapes)) * (kind.together or 1))
        if self._executor.gathers is not None:
            # Not the kind: what is known of a step depends on whether this rank has plans.
            self._executor.gathers.begin((module.training, grad, trained))

    def _tell_of_evaluation(self, module: nn.Module) -> None:
        updates = self._executor.pending_updates
        if updates is not None and not (module.training and torch.is_grad_enabled()):
            updates.before_evaluation()

    def _end_torn_down(self, module: nn.Module) -> None:
        """Ends the forwards of this thread if none of them runs any more, where the call of `module` begins.

        torch calls the hooks at a forward's end after an `Exception`, but not after a `KeyboardInterrupt`, after which
        a loop may go on without a call of `abort`. Python's stack tells whether forwards still run; a model that calls
        itself is on it twice.
        """
        if torch._C._current_graph_task_id() != -1:
            # Recomputation within a backward.
            return
        calls, frames = _being_called(), self._running.frames
        # If the call that begins here is not on the stack, modules are called in an unknown way.
        if calls and calls[0] is module and not any(f.module is call for f in frames for call in calls[1:]):
            self.abort()

    def meet_autocast(self) -> bool:
        """Prepares for the use of a parameter outside of its own module's forward.

        Returns:
            whether a forward is under way.
        """
        frames = self._running.frames
        if frames:
            self._meet_autocast(frames[-1])
            self.saved.cover_others()
        return bool(frames)

    def enter(self, module: nn.Module, region: Region | None = None) -> None:
        """A module's forward begins: pins its own parameters, or those of the compiled region that begins here."""
        frames, frame = self._running.frames, _RunningForward(module)
        if not frames:
            self._begin_outermost(module)
        # From here on `_pop` ends what has begun.
        self.casts.enter()
        frames.append(frame)
        entered = None if region is not None else module
        region = region or self._regions.at(module)
        frame.saved = self.saved.cover(together=module in self._owner_of)
        if frame.saved is not None:
            frame.saved.__enter__()
        if region is not None:
            self._enter_region(frame, region, entered)
            return
        if isinstance(module, nn.TransformerEncoder) and module in self.trusted and self._may_fuse(module.layers[0]):
            # It looks at its first layer, which is called next, to choose how all are computed.
            self._enter_fused(module.layers[0])
            return
        if module in self._owners and self._enter_group(frame):
            return
        if module._parameters or isinstance(module, nn.MultiheadAttention):
            self._pool.admission.glance()
            shows = self._shows(module)
            for slot in self._used_by(module):
                if slot.group.movable:
                    frame.pins.append(self._executor.pin(slot.value))
                if shows:
                    frame.shown.append(slot)
                    slot.show()
            self._meet_autocast(frame)

    def _begin_outermost(self, module: nn.Module) -> None:
        calls = self._pool.calls
        calls.begin(Call.FORWARD, self._pool)
        try:
            if self._slots.given.by_slot:
                self._slots.given.take_over_all()
            self._pool.eviction.end_sparing()
            if module is not self.root and torch._C._current_graph_task_id() == -1:
                self._tell_of_evaluation(module)
            if module is self.root:
                self._regions.scan()
                if torch._C._current_graph_task_id() == -1:
                    self.outside_uses = 0
            elif self._executor.gathers is not None and torch._C._current_graph_task_id() == -1:
                # Code that calls parts of the model itself, such as the layers and then the head.
                part = self._regions.name_of(module)
                self._executor.gathers.begin((part, module.training, torch.is_grad_enabled()))
            task = torch._C._current_graph_task_id()
            if self.beginning is not None and torch.is_grad_enabled() and task == -1:
                self.beginning()
            if task not in (-1, self._backward):
                at_backward_end(partial(self._end_broken_off, task))
                self._backward = task
        except BaseException:
            calls.end()
            raise

    def _end_broken_off(self, task: int) -> None:
        """Ends recomputation that Ctrl-C has broken off, when its backward has ended."""
        frames = self._running.frames
        while frames and frames[-1].task == task:
            self._pop()

    def _enter_group(self, frame: _RunningForward) -> bool:
        """Pins the group of a repeated block for all of its forward, if nothing in there asks for more care."""
        if self._running.casting or autocast_dtype(self._pool.compute.device) is not None or self._regions.running():
            return False
        slots, modules = self._owners[frame.module]
        for module in modules:
            if not self._shows(module):
                return False
        self._pool.admission.glance()
        for block in dict.fromkeys([slot.value.block for slot in slots if slot.group.movable]):
            frame.pins.append(self._executor.pin(block))
        for slot in slots:
            frame.shown.append(slot)
            slot.show()
        frame.covered = modules
        return True

    def _recomputes(self, module: nn.Module) -> bool:
        """Pins a group until backward comes to the next one, where backward recomputes a part of the group's layer.

        Returns:
            whether the group of `module` is pinned, and its forward needs no frame.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or not self.saved.checkpointed:
            return False
        if task not in self._pool.calls.tasks:
            self._pool.calls.begin_backward(self._pool)
        owner, known = self._owner_of[module](), self._recomputed
        if known is not None and known.module is owner:
            return True
        # What is pinned cannot be updated in this backward.
        if owner is None or self.run_ahead.final_gradients:
            return False
        self._end_recomputed()
        frame = _RunningForward(owner)
        if not self._enter_group(frame):
            return False
        self._recomputed = frame
        if known is None:
            # Code that has caught an exception finds no ordinary parameters, writes to which would be missed.
            at_backward_end(self._end_recomputed)
        return True

    def _end_recomputed(self) -> None:
        """The backward of a group's layer is over, or was broken off."""
        frame, self._recomputed = self._recomputed, None
        if frame is not None:
            _let_go(frame)

    def _shows(self, module: nn.Module) -> bool:
        """Whether a module's own parameters may be ordinary ones in its forward: no uncounted writes are possible."""
        # Only our hooks: others may write.
        return module in self.trusted and len(module._forward_pre_hooks) == 1 == len(module._forward_hooks)

    def _used_by(self, module: nn.Module) -> list[ParamSlot]:
        if isinstance(module, nn.MultiheadAttention):
            params = list(module.parameters())
        else:
            params = [param for param in module._parameters.values() if param is not None]
        return [slot for param in params if (slot := self._slots.of(param)) is not None]

    def _enter_region(self, frame: _RunningForward, region: Region, entered: nn.Module | None) -> None:
        for slot in region.slots:
            if slot.group.movable:
                frame.pins.append(self._executor.pin(slot.value))
            frame.shown.append(slot)
            slot.show()
        frames = self._running.frames
        running = next((f.casting for f in frames if f.casting is not None), None)
        if running is not None and not any(f.suspended for f in frames):
            frame.suspended = Suspended(running)
        frame.bared = Bared(region, entered, self.hooked)

    def _may_fuse(self, module: nn.Module) -> bool:
        """Whether torch would compute a module by one kernel, if it had no hooks of ours and no mode were active."""
        if module.training or not isinstance(module, ONE_KERNEL) or torch.is_autocast_enabled():
            return False
        if torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters()):
            return False
        return all(self._shows(part) for part in module.modules() if part in self.hooked)

    def _enter_fused(self, module: nn.Module) -> None:
        """Enters a module that torch may compute by one kernel: all under it is pinned, and has no hooks."""
        slots = tuple(slot for param in module.parameters() if (slot := self._slots.of(param)) is not None)
        self._pool.admission.glance()
        self.enter(module, Region(self._regions.name_of(module), module, slots))
        frame = self._running.frames[-1]
        frame.fused = True
        # What autocast casts of it would be kept until its region ends, in memory that is charged to nobody.
        frame.caches = torch.is_autocast_cache_enabled() and not torch.is_grad_enabled()
        if frame.caches:
            torch.set_autocast_cache_enabled(False)

    def leave(self, module: nn.Module) -> None:
        """A module's forward has returned, well or not."""
        frames = self._running.frames
        # An exception may have torn down inner forwards whose hooks were not called; they end with this one.
        if not frames or (frames[-1].module is not module and not any(frame.module is module for frame in frames)):
            return
        while frames[-1].module is not module:
            self._pop()
        self._pop()

    def _pop(self) -> None:
        """Ends the innermost forward."""
        running = self._running
        frame = running.frames.pop()
        if frame.caches:
            torch.set_autocast_cache_enabled(True)
        if frame.bared is not None:
            frame.bared.restore()
        # With a backward that was broken off, torch has taken off what was put on in it.
        lasts = frame.task in (-1, torch._C._current_graph_task_id())
        if frame.suspended is not None and lasts:
            frame.suspended.resume()
        if frame.casting is not None:
            running.casting = False
            if lasts:
                frame.casting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if frame.saved is not None and lasts:
            frame.saved.__exit__(None, None, None)
        self.casts.leave()
        try:
            _let_go(frame)
            if not running.frames:
                self.casts.end()
                if self.ended is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                    self.ended()
                if frame.module is self.root:
                    self.run_ahead.forward_ended()
        finally:
            if not running.frames:
                self._pool.calls.end()

    def _meet_autocast(self, frame: _RunningForward) -> None:
        """Enters the casting mode for the rest of `frame`, if autocast is on and the mode is not."""
        if self._running.casting or frame.bared is not None:
            return
        device = self._pool.compute.device
        if autocast_dtype(device) is not None:
            frame.casting = Casting(self.casts, device)
            frame.casting.__enter__()  # type: ignore[no-untyped-call]
            self._running.casting = True

    def abort(self) -> None:
        """Ends forwards whose hooks an exception has skipped (Ctrl-C)."""
        self.run_ahead.give_up()
        while self._running.frames:
            self._pop()
        self._end_recomputed()


def _let_go(frame: _RunningForward) -> None:
    moved = [slot for slot in frame.shown if slot.hide()]
    try:
        if moved:
            take_in(moved)
    finally:
        for pin in frame.pins:
            pin.release()
