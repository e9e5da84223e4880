"""Keeps parameters in the compute tier while a forward uses them.

A module's own parameters are pinned from before its forward until after it. A parameter read by somebody else's
forward (a tied head, a mixer that reads its convolution's weight) stays pinned until that forward returns, since the
reader holds the `Parameter` and may use it later. One that a forward returns stays pinned for its caller.

A compiled region (`ptm_accel.model.compiled`) is one such module with everything under it: all its parameters are
pinned, and its modules are plain while it runs.

Within forwards the saved-tensor hooks of `ptm_accel.model.saved` are active, inside whatever other hooks there are.
Recomputation inside backward (activation checkpointing) calls modules again and is an outermost forward of its own.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ptm_accel.memory.pin import Pin
from ptm_accel.memory.pool import Pool
from ptm_accel.model.casts import CastCache, Casting, Suspended, autocast_dtype
from ptm_accel.model.compiled import Bared, CompiledRegions, Handles, Region, outside_graph, refusal
from ptm_accel.model.copying import copy_parameter
from ptm_accel.model.faults import FaultDict
from ptm_accel.model.hooks import Hook
from ptm_accel.model.newly_registered import watch
from ptm_accel.model.run_ahead import RunAhead
from ptm_accel.model.saved import SavedTensors
from ptm_accel.model.slots import ExtentTable, ParamSlot, SlotTable
from ptm_accel.model.unseen import checksum, names_data

_BORROWED_AT_ONCE = 8
"""How many parameters code outside is taken to work on at a time."""

_CALL = nn.Module._call_impl.__code__
"""What runs for as long as a module is being called."""


@dataclass(slots=True)
class _Frame:
    """One running module forward.

    A compiled region has its modules bared, and casting suspended: its graph casts for itself.

    Attributes:
        module: whose forward.
        pins: of the module's own parameters.
        reads: of parameters of others that it has read, by slot.
        sums: the checksums with which both were met, where they may be written through `.data`.
        saved: the saved-tensor hooks, if it was this forward that put them on.
        casting: the casting mode, if this is where autocast was first met.
        bared: the modules of the compiled region that this is.
        suspended: the casting mode of a forward around this region.
    """

    module: nn.Module
    pins: list[Pin] = field(default_factory=list)
    reads: dict[int, Pin] = field(default_factory=dict)
    sums: dict[ParamSlot, int] | None = None
    saved: AbstractContextManager[Any] | None = None
    casting: Casting | None = None
    bared: Bared | None = None
    suspended: Suspended | None = None


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
    """The hooks and parameter dictionaries that let unchanged modules meet paged parameters.

    Args:
        pool: where the parameters live.
        slots: the model's slots.
        table: finds the slot of a storage.
    """

    def __init__(self, pool: Pool, slots: SlotTable, table: ExtentTable) -> None:
        self.pool = pool
        self.slots = slots
        self.casts = CastCache(pool, slots, table)
        self.saved = SavedTensors(table)
        self.regions = CompiledRegions(self)
        self.run_ahead = RunAhead(pool)
        self.writing = False
        self.beginning: Callable[[], object] | None = None
        """Called before a forward whose gradients are on, from outside of all others."""
        self.root: nn.Module | None = None
        self.owner: object = None
        """Whom the model keeps alive: its parameter dictionaries hold this object, and this one holds the owner."""
        self._borrowed: deque[ParamSlot] = deque(maxlen=_BORROWED_AT_ONCE)
        self._frames = _Frames()
        self._refuse = refusal(self.regions.name_of)
        self.read_outside_graph = outside_graph(self.read)
        self._hooked: weakref.WeakKeyDictionary[nn.Module, Handles] = weakref.WeakKeyDictionary()
        self._dicts: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
        self._names_data: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._covered: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter | None]] = (
            weakref.WeakKeyDictionary()
        )
        self.covered: Callable[[nn.Module], object] | None = None
        """Called with each module that `cover` was called with."""

    # ---- installing ------------------------------------------------------------------------------------------

    def install(self, model: nn.Module) -> None:
        """Puts fault dictionaries on modules that own parameters, and forward hooks on all that could read some."""
        self.root = model
        readers = {""}
        for name, module in model.named_modules(remove_duplicate=False):
            if module._parameters:
                parts = name.split(".")
                readers.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
        for name, module in model.named_modules(remove_duplicate=False):
            if module._parameters and not isinstance(module._parameters, FaultDict):
                self._dicts.append((module, module._parameters))
                module._parameters = FaultDict(module._parameters, self)
            if name in readers:
                self.hook(module)
        self.regions.install(model)
        watch.add(self)

    def cover(self, module: nn.Module) -> None:
        """A module that is no part of what was installed has parameters of it now: brings them in there, too."""
        self._covered[module] = module._parameters
        module._parameters = FaultDict(module._parameters, self)
        self.hook(module)
        if self.covered is not None:
            self.covered(module)

    def hook(self, module: nn.Module) -> None:
        """Puts the forward hooks on a module that has none of them yet."""
        if module in self._hooked:
            return
        if names_data(module):
            self._names_data.add(module)
        if module is self.root:
            before = module.register_forward_pre_hook(self._enter_root_hook(), prepend=True, with_kwargs=True)
        else:
            before = module.register_forward_pre_hook(self._enter_hook(), prepend=True, with_kwargs=True)
        after = module.register_forward_hook(self._leave_hook(), always_call=True)
        self._hooked[module] = before, after

    def remove(self) -> None:
        """Takes hooks and dictionaries off again; the modules get ordinary dictionaries with the same parameters."""
        watch.discard(self)
        self._borrowed.clear()
        self.regions.remove()
        for handle in self.hooks:
            handle.remove()
        self._hooked.clear()
        for module, original in (*self._dicts, *self._covered.items()):
            current = module._parameters
            if isinstance(current, FaultDict):
                original.clear()
                original.update(current.plain())
                module._parameters = original
        self._dicts.clear()
        self._covered.clear()

    @property
    def hooks(self) -> tuple[RemovableHandle, ...]:
        """The hooks that are on the model's modules."""
        return tuple(handle for handles in list(self._hooked.values()) for handle in handles)

    def _enter_hook(self) -> Any:
        refuse = self._refuse

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                refuse(module)
            stack = self._frames.stack
            if stack and stack[0].module is module:
                self._end_torn_down(module)
            self.enter(module)
            self._pin_given((*args, *kwargs.values()))

        return Hook(enter)

    def _enter_root_hook(self) -> Any:
        refuse = self._refuse

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                refuse(module)
            if self._frames.stack:
                self._end_torn_down(module)
            if not self._frames.stack and torch._C._current_graph_task_id() == -1:
                grad = torch.is_grad_enabled()
                kind, evaluates = (module.training, grad, shapes_of(args, kwargs)), not module.training and not grad
                self.pool.room.begin_pass(kind[-1], evaluates=not grad)
                self.run_ahead.begin(kind, evaluates=evaluates)
            self._enter(module, None)

        return Hook(enter)

    def _leave_hook(self) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():
                self.leave(module, output)

        return Hook(leave)

    def _end_torn_down(self, module: nn.Module) -> None:
        """Ends the forwards of this thread if none of them runs any more, where the call of `module` begins.

        torch calls the hooks at a forward's end after an `Exception`, and not after a `KeyboardInterrupt`. A loop whose
        owner knows nothing of `abort` goes on with another forward. One within a forward is told from that by the calls
        on Python's stack, where a model that calls itself is found a second time.
        """
        if torch._C._current_graph_task_id() != -1:
            # Recomputation: a forward that a backward calls.
            return
        calls = _being_called()
        # Without the call that begins here, how modules are called is not what we know: nothing can be said.
        if calls and calls[0] is module and not any(f.module is call for f in self._frames.stack for call in calls[1:]):
            self.abort()

    # ---- reads -----------------------------------------------------------------------------------------------

    def owns(self, param: torch.Tensor) -> bool:
        """Whether `param` is on pages."""
        return self.slots.of(param) is not None

    def read(self, param: nn.Parameter | None) -> None:
        """An attribute read: brings the parameter in, and keeps it until the forward that reads it returns."""
        slot = self.slots.of(param)
        if slot is None:
            return
        slot.meet()
        self.pool.room.glance()
        value = slot.value
        stack = self._frames.stack
        if stack:
            self._meet_autocast(self._frames, stack[-1])
            self.saved.cover_others()
        elif not self.writing:
            self.saved.cover_outside()
        if value.movable and self.pool.owed is not None:
            # A pin may be that of the update which is still owed to it.
            self.pool.owed.before_use(value)
        stays = not self.writing and value.place.resident and (value.pins > 0 or not value.movable)
        if not stack and not self.writing and torch._C._current_graph_task_id() == -1:
            self._lend(slot)
        elif not stack and self._names_data and not self.writing:
            # A hook in backward may write to it, and torch would not count that.
            slot.lend()
        elif not stack and not stays:
            self.pool.fault(value, write=self.writing)
        elif stack and not stays and id(slot) not in stack[-1].reads:
            stack[-1].reads[id(slot)] = self.pool.pin(value, write=self.writing)
        self._sum(stack, slot)

    @staticmethod
    def _sum(stack: list[_Frame], slot: ParamSlot) -> None:
        """Takes note of what is there, where a forward may change it and torch would not count that."""
        if stack and stack[-1].sums is not None and slot not in stack[-1].sums:
            stack[-1].sums[slot] = checksum(slot.param)

    def _lend(self, slot: ParamSlot) -> None:
        """No forward and no backward: somebody's own code reads a parameter, and may want to write."""
        # What it has given to those before comes onto pages, so that it never has them all in memory of its own.
        for before in self._borrowed:
            before.meet()
        self._borrowed.append(slot)
        slot.lend()

    def copied(self, param: nn.Parameter | None, memo: dict[int, Any]) -> nn.Parameter | None:
        """A copy of a parameter in ordinary memory, for a deep copy of a part of the model."""
        return copy_parameter(param, self.slots, self.pool, memo)

    @contextmanager
    def written(self) -> Iterator[None]:
        """While it lasts, every parameter that is read counts as changed (initialisation, loading)."""
        before, self.writing = self.writing, True
        try:
            yield
        finally:
            self.writing = before

    # ---- forwards --------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, region: Region | None = None) -> None:
        """A module's forward begins: pins its own parameters, or those of the compiled region that begins here."""
        self._enter(module, region)

    def _enter(self, module: nn.Module, region: Region | None) -> None:
        frames = self._frames
        if not frames.stack:
            for borrowed in self._borrowed:
                borrowed.meet()
            self._borrowed.clear()
            self.pool.shelf.end_loans()
            if module is self.root:
                self.regions.scan()
            if self.beginning is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                self.beginning()
        entered = None if region is not None else module
        region = region or self.regions.at(module)
        frame = _Frame(module, saved=self.saved.cover(), sums={} if module in self._names_data else None)
        if frame.saved is not None:
            frame.saved.__enter__()
        self.casts.enter()
        frames.stack.append(frame)
        if region is not None:
            self._enter_region(frames, frame, region, entered)
            return
        for param in dict.values(module._parameters):
            slot = self.slots.of(param)
            if slot is None:
                continue
            slot.meet()
            if slot.value.movable:
                frame.pins.append(self.pool.pin(slot.value, write=self.writing))
            self._sum(frames.stack, slot)
        if module._parameters:
            self._meet_autocast(frames, frame)

    def _pin_given(self, values: Iterable[Any]) -> None:
        """Pins parameters that a forward is given: a recomputation reads no name for them."""
        for value in values:
            slot = self.slots.of(value) if isinstance(value, nn.Parameter) else None
            if slot is not None and slot.value.movable:
                slot.meet()
                self._frames.stack[-1].pins.append(self.pool.pin(slot.value, write=self.writing))

    def _enter_region(self, frames: _Frames, frame: _Frame, region: Region, entered: nn.Module | None) -> None:
        for slot in region.slots:
            slot.meet()
            frame.pins.append(self.pool.pin(slot.value, write=self.writing))
        running = next((f.casting for f in frames.stack if f.casting is not None), None)
        if running is not None and not any(f.suspended for f in frames.stack):
            frame.suspended = Suspended(running)
        frame.bared = Bared(region, entered, self._hooked)

    def leave(self, module: nn.Module, output: Any = None) -> None:
        """A module's forward has returned, well or not (then without an output)."""
        frames = self._frames
        # An exception may have torn down inner forwards whose hooks were not called; they end with this one.
        if not any(frame.module is module for frame in frames.stack):
            return
        while frames.stack[-1].module is not module:
            self._pop(frames)
        if len(frames.stack) > 1:
            self._hand_up(frames.stack[-2], output)
        self._pop(frames)

    def _hand_up(self, caller: _Frame, output: Any) -> None:
        """Pins parameters that a forward returns for the forward that called it."""
        if isinstance(output, Mapping):
            output = output.values()
        for value in output if isinstance(output, Iterable) and not isinstance(output, torch.Tensor) else (output,):
            slot = self.slots.of(value) if isinstance(value, nn.Parameter) else None
            if slot is not None and slot.value.movable and id(slot) not in caller.reads:
                caller.reads[id(slot)] = self.pool.pin(slot.value, write=self.writing)

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
        for slot, met in (frame.sums or {}).items():
            if checksum(slot.param) != met:
                slot.written()
        for pin in (*frame.pins, *frame.reads.values()):
            pin.release()
        if not frames.stack:
            self.casts.end()
            if frame.module is self.root:
                self.run_ahead.forward_ended()

    def _meet_autocast(self, frames: _Frames, frame: _Frame) -> None:
        """Turns casting on for the rest of `frame`, if autocast is on and it is not yet."""
        if frames.casting or frame.bared is not None:
            return
        device = self.pool.compute.device
        if autocast_dtype(device) is not None:
            frame.casting = Casting(self.casts, device)
            frame.casting.__enter__()  # type: ignore[no-untyped-call]
            frames.casting = True

    def abort(self) -> None:
        """Ends forwards that an exception has torn down without their hooks being called (Ctrl-C)."""
        self.run_ahead.give_up()
        while self._frames.stack:
            self._pop(self._frames)
