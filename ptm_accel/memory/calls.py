"""Calls of threads into the models on the pages: one at a time, by its owner.

A call under way (a forward, a backward, an optimizer step, a read, a save) has an owner, the thread that began it.
Pending updates and graphs that live between two calls have none: the next call finishes the updates, whoever makes it.
A thread that meets another thread's forward, backward or step of the same model is refused, since that call could wait
for it in turn; a thread that meets a read, a save, or any call on another model of the same tiers waits its turn.

Autograd computes in threads of its own on a device. They act for the owner of the backward, which is known by the
identity of its graph task.
"""

from __future__ import annotations

import enum
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from ptm_accel.errors import PagedModelError

_RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
"""The innermost Python code of a thread that waits for a backward."""

_MOST_WAIT_S = 600.0
"""Longest time that a call waits for those of other threads."""
_LOOK_EVERY_S = 1.0
"""Time between two looks whether their thread still lives."""


class Call(enum.Enum):
    """Kind of use of a model; the value is for messages."""

    FORWARD = "a forward"
    BACKWARD = "a backward"
    STEP = "an optimizer step"
    ACCESS = "an access to its parameters, gradients or state"
    SAVE = "a save or a load"

    @property
    def waited_for(self) -> bool:
        """Whether others wait for its end, and are not refused."""
        return self is Call.ACCESS or self is Call.SAVE


class _Life:
    """Lives as long as its thread."""


class _Thread(threading.local):
    """One thread, as an owner of calls; a later thread may have its number again."""

    def __init__(self) -> None:
        self.life = _Life()
        self.me = _Caller(self.life)


class _Caller:
    """A thread, as others know it.

    Args:
        life: of the thread; None for one of autograd's, whose Python state lasts for one hook.
    """

    def __init__(self, life: _Life | None) -> None:
        self.number = threading.get_ident()
        self._life = None if life is None else weakref.ref(life)

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._life is None or self._life() is not None

    @property
    def name(self) -> str:
        """Its name, for messages."""
        if self._life is None:
            return "of autograd"
        known = [thread.name for thread in threading.enumerate() if thread.ident == self.number]
        return repr(known[0]) if known else str(self.number)


class _BackwardEnd:
    """Is freed with autograd's graph task, which ends well or by an exception."""

    def __init__(self, calls: Calls, task: int) -> None:
        self._calls = calls
        self._task = task

    def __call__(self) -> None:
        """Does nothing: other callbacks of the same task may follow."""

    def __del__(self) -> None:
        self._calls._backward_ended(self._task)


class _BackwardOver:
    """Calls a function once, at the end of a backward: its callbacks are not called after an exception."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        """The backward has ended well."""
        call, self._call = self._call, None
        if call is not None:
            call()

    def __del__(self) -> None:
        self()


def at_backward_end(call: Callable[[], None]) -> None:
    """Has a function called when the backward that runs here has ended, well or by an exception."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(_BackwardOver(call))


class Calls:
    """The call under way on the models that share tiers.

    Attributes:
        tasks: the graph tasks that belong to it, each with the number of autograd's thread that works on it, or 0.
        owner: whose it is; None if there is none.
        thread: of the code that asks; `thread.me` is its owner.
        backwards: what is called as an outermost backward begins, by its owner; weak.
        lock: guards all of it. No call begins while it is held: a short access may hold it in the place of a call,
            where it finds no owner but its own (`meet`).
    """

    def __init__(self) -> None:
        self.tasks: dict[int, int] = {}
        self.thread = _Thread()
        self.owner: _Caller | None = None
        self._kind = Call.ACCESS
        self._model: object = None
        self._depth = 0
        self.backwards: weakref.WeakKeyDictionary[object, weakref.WeakMethod[Callable[[], None]]]
        self.backwards = weakref.WeakKeyDictionary()
        self._registered: set[int] = set()
        self._waiting: deque[_Caller] = deque()
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    @property
    def kind(self) -> Call | None:
        """What is under way, by its outermost call."""
        return None if self.owner is None else self._kind

    # ---- a call ------------------------------------------------------------------------------------------------

    def begin(self, kind: Call, model: object) -> None:
        """Begins a call in this thread, or one within its own; `end` ends it.

        Args:
            kind: what it does.
            model: which model it is of: its pool.

        Raises:
            PagedModelError: another thread's forward, backward or step of this model is under way; or the wait for
                another call took too long.
        """
        me = self.thread.me
        if self.owner is not me:
            task = torch._C._current_graph_task_id()
            if task != -1 and task not in self.tasks:
                self.begin_backward(model)
        if self.owner is me:
            self._depth += 1
        elif not self._acts(me):
            with self.lock:
                self._wait(me, kind, model, waits=True)
                self._take(me, kind, model, 1)

    def meet(self, kind: Call, model: object) -> None:
        """Waits, under `lock`, for the end of the call of another thread. See `begin`."""
        me = self.thread.me
        if not self._acts(me):
            self._wait(me, kind, model, waits=True)

    def end(self) -> None:
        """Ends what `begin` has begun in this thread; does nothing in one that acts for the owner."""
        if self.owner is self.thread.me:
            self._depth -= 1
            self._let_go_if_ended()

    @contextmanager
    def during(self, kind: Call, model: object) -> Iterator[None]:
        """A context in which a call is under way; see `begin`."""
        self.begin(kind, model)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def acting(self) -> Iterator[None]:
        """A context in which this thread acts for the owner, which waits for it, of the call under way."""
        number = threading.get_ident()
        self._registered.add(number)
        try:
            yield
        finally:
            self._registered.discard(number)

    # ---- backward ----------------------------------------------------------------------------------------------

    def begin_backward(self, model: object) -> None:
        """Begins the backward in which this is called, or makes it a part of the call under way.

        Callers first look whether its graph task is in `tasks`. It ends with the task.

        Raises:
            PagedModelError: see `begin`.
        """
        task, me = torch._C._current_graph_task_id(), self.thread.me
        with self.lock:
            own = self.owner is me or _is_known(me)
            if self.owner is not me and not self._acts_in_backward(me, own):
                self._wait(me, Call.BACKWARD, model, waits=own)
                self._take(me if own else _Caller(None), Call.BACKWARD, model, 0)
            outermost = not self.tasks
            self.tasks[task] = 0 if own else me.number
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(_BackwardEnd(self, task))
        for known in list(self.backwards.values()) if outermost else ():
            if (begun := known()) is not None:
                begun()

    def _acts(self, me: _Caller) -> bool:
        """Returns whether this thread acts for the owner: in a backward of its, or since it was registered."""
        if self.owner is None:
            return False
        return torch._C._current_graph_task_id() in self.tasks or me.number in self._registered

    def _acts_in_backward(self, me: _Caller, own: bool) -> bool:
        """Returns whether the backward in which this thread is, with a task not yet known, belongs to the owner's call.

        Args:
            me: the thread.
            own: whether it is a thread of Python; otherwise it is one of autograd's.
        """
        if self.owner is None:
            return False
        if own:
            return me.number in self._registered
        if self.tasks:
            # Within a node of the owner's backward, as under re-entrant checkpointing.
            return me.number in self.tasks.values() and _is_within_backward()
        waiting = sys._current_frames().get(self.owner.number)
        return waiting is not None and waiting.f_code is _RUNS_BACKWARD

    def _backward_ended(self, task: int) -> None:
        with self.lock:
            if self.tasks.pop(task, None) is not None:
                self._let_go_if_ended()

    # ---- owners ------------------------------------------------------------------------------------------------

    def _take(self, caller: _Caller, kind: Call, model: object, depth: int) -> None:
        self.owner, self._kind, self._model, self._depth = caller, kind, model, depth

    def _let_go_if_ended(self) -> None:
        if self._depth or self.tasks:
            return
        with self.lock:
            self.owner = self._model = None
            self._changed.notify_all()

    def _wait(self, me: _Caller, kind: Call, model: object, *, waits: bool) -> None:
        """Waits until no call is under way and those that came before have had their turn.

        Args:
            me: who waits.
            kind: for what.
            model: of which model.
            waits: whether it may wait for calls on other models.
        """
        if self.owner is None and not self._waiting:
            return
        self._waiting.append(me)
        until = time.monotonic() + _MOST_WAIT_S
        try:
            while self.owner is not None or self._waiting[0] is not me:
                if self.owner is not None and not self.owner.alive:
                    # Its thread ended in the middle of it, by `SystemExit` for one.
                    self.tasks.clear()
                    self._depth = 0
                    self._let_go_if_ended()
                    continue
                if self.owner is not None and not self._kind.waited_for and not (waits and self._model is not model):
                    raise PagedModelError(self._refusal(me, kind, ""))
                if not self._changed.wait(_LOOK_EVERY_S) and time.monotonic() > until:
                    raise PagedModelError(self._refusal(me, kind, f" for more than {_MOST_WAIT_S:.0f} s"))
        finally:
            self._waiting.remove(me)
            self._changed.notify_all()

    def _refusal(self, me: _Caller, kind: Call, lasting: str) -> str:
        owner = "nobody, but others wait" if self.owner is None else f"{self.owner.name}"
        return (
            f"{kind.value} in thread {me.name} met {self._kind.value} that has been under way{lasting} in thread "
            f"{owner}. A model on pages is used by one thread at a time. Wait for the other thread, or hold one lock "
            "of your own around both."
        )


def _is_known(caller: _Caller) -> bool:
    """Returns whether Python has started the thread; otherwise it is one of autograd's."""
    threads = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    return any(thread.ident == caller.number for thread in threads)


def _is_within_backward() -> bool:
    """Returns whether this thread has called the backward that it is in."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _RUNS_BACKWARD:
            return True
        frame = frame.f_back
    return False
