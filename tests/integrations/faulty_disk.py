"""A disk that becomes slow, hangs or fails when a run has come to a certain place."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from ptm_accel.memory.budget import Tag
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.scratch import Io
from ptm_accel.memory.traffic import Traffic
from ptm_accel.model.gradients import Gradients
from ptm_accel.optim.update_queue import UpdateQueue

HANGS_S = 2.0
"""How long a call hangs, if nothing else is said."""


class FaultyDisk:
    """The system calls of the scratch file: as they are until `armed`, then with a fault.

    Attributes:
        armed: from now on there is the fault.
        met: it has been met.
        calls: the calls that have it.
        delay_s: how long such a call takes longer.
        code: what it fails with; 0 for success.
        hangs: the first of each such call blocks for a while.
        on_hang: called when one does.
        answers: ends that early.
        hangs_s: how long it blocks.
        gave_up: how many have blocked to the end.
    """

    def __init__(self, *calls: str, delay_s: float = 0.0, code: int = 0, hangs: bool = False) -> None:
        self.armed = threading.Event()
        self.met = threading.Event()
        self.calls = calls
        self.delay_s = delay_s
        self.code = code
        self.hangs = hangs
        self.hangs_s = HANGS_S
        self.on_hang: Callable[[], object] = lambda: None
        self.answers = threading.Event()
        self.gave_up = 0
        self._hung: set[str] = set()
        self._lock = threading.Lock()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts the calls in place of the system's."""
        calls = [self._faulty(call) for call in (os.preadv, os.pwritev, os.posix_fallocate)]
        io = Io(*calls)
        patch.setattr("ptm_accel.memory.disk.Io", lambda: io)

    def _faulty(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if self.armed.is_set() and call.__name__ in self.calls:
                self._be_faulty(call.__name__)
            return call(*args)

        return run

    def _be_faulty(self, name: str) -> None:
        self.met.set()
        with self._lock:
            first = name not in self._hung
            self._hung.add(name)
        if self.hangs and first:
            self.on_hang()
            if not self.answers.wait(self.hangs_s):
                self.gave_up += 1
        time.sleep(self.delay_s)
        if self.code:
            raise OSError(self.code, os.strerror(self.code))


class FromStep(transformers.TrainerCallback):
    """Calls `then` at the beginning of every step from `step` on."""

    def __init__(self, step: int, then: Callable[[], object]) -> None:
        self.step = step
        self.then = then

    def on_step_begin(self, args: Any, state: transformers.TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            self.then()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def call_at(place: str, then: Callable[[], object], patch: pytest.MonkeyPatch) -> FromStep:
    """Has `then` called when a run is in a certain place, from its fourth step on.

    Args:
        place: `forward`, when a parameter is sent for; `backward`, when something is loaded; `update`, when a step is
            carried out beside the next forward; `arrival`, when a gradient arrives; `gradient`, when its store begins
            in backward.
        then: what to call.
        patch: takes all back.

    Returns:
        a callback that the Trainer must have.
    """
    begun: list[bool] = []

    def before(owner: type, name: str, here: Callable[..., bool]) -> None:
        plain = getattr(owner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if begun and here(self, *args):
                then()
            return plain(self, *args, **kwargs)

        patch.setattr(owner, name, wrapped)

    if place == "update":
        before(UpdateQueue, "_update", lambda queue, lane: not in_backward())
    elif place == "arrival":
        before(Gradients, "take", lambda gradients, param: True)
    elif place == "gradient":
        before(Traffic, "start_store_whole", lambda traffic, tensor: in_backward() and tensor.tag is Tag.GRAD)
    elif place == "backward":
        before(Traffic, "start_load", lambda traffic, *_: in_backward())
    else:
        before(Pool, "prefetch", lambda ahead, tensor, *_: not in_backward() and tensor.tag is Tag.PARAM)
    return FromStep(3, lambda: begun.append(True))
