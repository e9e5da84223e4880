"""Owners of calls: who waits, who is refused, and who acts for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ptm_accel.errors import PagedModelError
from ptm_accel.memory import calls as module
from ptm_accel.memory.calls import Call, Calls

MODEL, OTHER = object(), object()


def elsewhere(do: Callable[[], Any]) -> Any:
    """What `do` gives, or raises, in a thread of its own."""
    with ThreadPoolExecutor(1, thread_name_prefix="elsewhere") as threads:
        return threads.submit(do).result(60)


def once(calls: Calls, kind: Call = Call.ACCESS, model: object = MODEL) -> None:
    with calls.during(kind, model):
        pass


@pytest.mark.parametrize("met", [Call.FORWARD, Call.BACKWARD, Call.STEP])
@pytest.mark.parametrize("kind", Call)
def test_another_thread_is_refused(met: Call, kind: Call) -> None:
    calls = Calls()
    with calls.during(met, MODEL), calls.during(Call.ACCESS, MODEL):
        text = (
            f"^{kind.value} in thread 'elsewhere_0' met {met.value} that has been under way in thread 'MainThread'. A "
            "model on pages is used by one thread at a time. Wait for the other thread, or hold one lock of your own "
            "around both.$"
        )
        with pytest.raises(PagedModelError, match=text):
            elsewhere(lambda: once(calls, kind))
    elsewhere(lambda: once(calls, kind))


@pytest.mark.parametrize(("met", "model"), [(Call.ACCESS, MODEL), (Call.SAVE, MODEL), (Call.FORWARD, OTHER)])
def test_another_thread_waits(met: Call, model: object) -> None:
    calls = Calls()
    with ThreadPoolExecutor(1) as threads:
        with calls.during(met, model):
            waiting = threads.submit(lambda: once(calls, Call.FORWARD))
            while not calls._waiting:
                assert not waiting.done()
        waiting.result(60)


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAIT_S", 0.0)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    calls = Calls()
    with calls.during(Call.SAVE, MODEL), pytest.raises(PagedModelError, match="under way for more than 0 s in thread"):
        elsewhere(lambda: once(calls))


def test_what_comes_first_has_the_first_turn() -> None:
    calls, order = Calls(), []
    with ThreadPoolExecutor(2) as threads:
        with calls.during(Call.SAVE, MODEL):
            futures = []
            for number in range(2):
                futures.append(threads.submit(lambda number=number: (once(calls), order.append(number))))
                while len(calls._waiting) <= number:
                    pass
        for future in futures:
            future.result(60)
    assert order == [0, 1]


def test_a_thread_that_has_ended_owns_nothing() -> None:
    calls = Calls()
    thread = threading.Thread(target=lambda: calls.begin(Call.FORWARD, MODEL))
    thread.start()
    thread.join()
    once(calls)
    elsewhere(lambda: once(calls))


def test_a_registered_thread_acts_for_the_owner() -> None:
    calls = Calls()

    def act() -> None:
        with calls.acting():
            once(calls, Call.FORWARD)

    with calls.during(Call.STEP, MODEL):
        elsewhere(act)
        with pytest.raises(PagedModelError, match="met an optimizer step"):
            elsewhere(lambda: once(calls))


def noting(calls: Calls) -> Callable[[torch.Tensor], None]:
    """A hook as those of a model on pages are."""

    def hook(gradient: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() not in calls.tasks:
            calls.begin_backward(MODEL)
        once(calls, Call.FORWARD)

    return hook


def loss(calls: Calls, inside: Callable[[], object] = lambda: None) -> torch.Tensor:
    """Its backward calls the hook, then `inside`."""
    with torch.enable_grad():
        product = torch.ones(2, requires_grad=True) * 2
        total = product.sum()
    # Hooks of one tensor are called in their order.
    product.register_hook(noting(calls))
    product.register_hook(lambda gradient: None if inside() is None else gradient)
    return total


def test_a_backward_lasts_as_long_as_its_task() -> None:
    calls = Calls()

    def inside() -> None:
        with pytest.raises(PagedModelError, match="met a backward that has been under way in thread 'MainThread'"):
            elsewhere(lambda: once(calls))
        with pytest.raises(PagedModelError, match="^a backward in thread 'elsewhere_0' met a backward"):
            elsewhere(loss(calls).backward)

    loss(calls, inside).backward()
    assert not calls.tasks
    elsewhere(lambda: once(calls))


def test_a_backward_that_fails_has_ended() -> None:
    calls = Calls()

    def inside() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError):
        loss(calls, inside).backward()
    assert not calls.tasks
    elsewhere(lambda: once(calls))


def test_a_backward_within_another_call_belongs_to_it() -> None:
    calls = Calls()
    with calls.during(Call.STEP, MODEL):
        loss(calls).backward()
        with pytest.raises(PagedModelError, match="met an optimizer step"):
            elsewhere(lambda: once(calls))
    elsewhere(lambda: once(calls))


class _Deep(torch.autograd.Function):
    """Its backward makes another one, until autograd hands one to a thread of its own, as for a device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, last: Callable[[], object]) -> torch.Tensor:
        ctx.depth, ctx.last = depth, last
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                _Deep.apply(torch.ones(2, requires_grad=True), ctx.depth - 1, ctx.last).sum().backward()
        else:
            ctx.last()
        return gradient, None, None


@pytest.mark.parametrize("owner", [Call.BACKWARD, None])
def test_threads_of_autograd_act_for_the_owner(owner: Call | None) -> None:
    calls, numbers = Calls(), []

    def last() -> None:
        noting(calls)(torch.ones(1))
        numbers.append(threading.get_ident())
        # Within it: a node that makes a backward of its own, as re-entrant checkpointing does.
        loss(calls).backward()
        with pytest.raises(PagedModelError, match="met a backward"):
            elsewhere(lambda: once(calls))

    deep = _Deep.apply(torch.ones(2, requires_grad=True), 80, last).sum()
    if owner is None:
        deep.backward()
    else:
        with calls.during(owner, MODEL):
            deep.backward()
    assert len(numbers) == 1
    assert numbers[0] != threading.get_ident()
    assert not calls.tasks
    elsewhere(lambda: once(calls))
