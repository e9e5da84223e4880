"""All micro-batches of a step go through a layer before the next layer begins, forward and backward.

So weights that are streamed come in twice a step, and not twice a micro-batch (GreedySnake's schedule). Each
micro-batch is a job in a thread of its own, of which one runs at a time. A job stops where it calls a layer, so the
model's own loop supplies each layer's arguments. Gradients are added in the order of the micro-batches, as plain
accumulation adds them, and so to the bit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.activation_reserve import Shapes
from ptm_accel.micro_batches.borders import Chunks
from ptm_accel.micro_batches.layer_calls import (
    Autocast,
    Caught,
    LayerCall,
    RandomStates,
    run_backward,
    run_first,
    states_of,
)
from ptm_accel.micro_batches.turns import Worker

_CHECKPOINTS = "gradient_checkpointing"
"""The switch of transformers' own checkpointing: a layer would be run a third time."""
_CHECKPOINT = "_gradient_checkpointing_func"
"""What it calls: `torch.utils.checkpoint.checkpoint`, with options."""


class _Job:
    """One micro-batch.

    Attributes:
        worker: carries it out.
        calls: of layers, in order.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.calls: list[LayerCall | None] = []


class ByLayer:
    """Runs the micro-batches of a step layer by layer.

    Args:
        model: the model.
        layers: its layers, in the order in which each is called once.
        engine: of the pages that it is on; None where it is in ordinary memory.
        caught: what hooks catch of what happens within layers.
        inexact: layers may draw random numbers, which then differ from those of plain accumulation.

    Attributes:
        model: see above.
        order: the layers that have run, with the number of the micro-batch; of the last step.
        kept_bytes: what layers have been given, and what the last one has returned, in the last step.
        chunks: the micro-batches that run together.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], engine: Engine | None, caught: Caught, *, inexact: bool
    ) -> None:
        self.model = model
        self.order: list[tuple[int, int]] = []
        self.kept_bytes = 0
        self._layers = list(layers)
        # Those that plain accumulation runs in a re-entrant checkpoint.
        self._reentrant: set[nn.Module] = set()
        # Weak: the model keeps its engine.
        self._engine = None if engine is None else weakref.ref(engine)
        self._calls = None if engine is None else engine.pool.calls
        self._caught = caught
        self._inexact = inexact
        self.chunks = Chunks(None if engine is None else engine.pool)
        self._first = 0
        self._workers: list[Worker] = []
        self._jobs: dict[threading.Thread, _Job] = {}

    def run(
        self,
        works: Sequence[Callable[[], Any]],
        turn: Callable[[int], None] = lambda number: None,
        shapes: Sequence[Shapes] = (),
    ) -> list[Any]:
        """Runs one step, in chunks whose borders a device has room for.

        Args:
            works: forward and backward of each micro-batch, as plain accumulation calls them.
            turn: is told the number of the micro-batch that runs next.
            shapes: of the tensors of each micro-batch; by default all are alike.

        Returns:
            what they return.

        Raises:
            UnsupportedError: the model, or the loss, asks for something that this order cannot give.
            Exception: of a micro-batch.
        """
        self.order.clear()
        self.kept_bytes = self._first = 0
        results: list[Any] = []
        sizes = shapes or [()] * len(works)
        while (first := len(results)) < len(works):
            self._first, before = first, self.kept_bytes
            end = first + self.chunks.next(sizes[first:])
            results += self._chunk(works[first:end], lambda number: turn(self._first + number), of=len(works))
            self.chunks.ran(sizes[first:end], self.kept_bytes - before)
        return results

    def close(self) -> None:
        """Ends its threads."""
        self._workers.clear()

    def _chunk(self, works: Sequence[Callable[[], Any]], turn: Callable[[int], None], *, of: int) -> list[Any]:
        """Runs micro-batches together; `of` is how many the step has."""
        while len(self._workers) < len(works):
            self._workers.append(Worker(f"ptm_accel micro-batch {len(self._workers)}"))
        jobs = [_Job(worker) for worker in self._workers[: len(works)]]
        self._jobs = {job.worker.thread: job for job in jobs}
        device = next(self._layers[0].parameters()).device
        states, before, autocast = states_of(self._layers), RandomStates(device), Autocast(device)
        me = None if self._calls is None else self._calls.thread.me
        more = self._first + len(works) < of
        with self._layers_stop(), self._one_pass(len(works), more=more):
            try:
                for job, work in zip(jobs, works, strict=True):
                    job.worker.begin(work, (autocast.entered, lambda: self._acting(me)))
                gradients = self._with_gradients()
                self._forward(jobs, states, turn)
                if self._with_gradients() != gradients:
                    raise UnsupportedError(
                        "micro_batches: by_layer: the loss uses parameters of layers outside of their forward (a "
                        "penalty on weights), whose gradients are added in another order than in plain accumulation. "
                        "Leave micro_batches out."
                    )
                draws = not before.same_as(RandomStates(device))
                if draws and not (self._inexact or of == 1):
                    raise UnsupportedError(
                        "micro_batches: by_layer: random numbers are drawn in a forward (dropout), other ones for each "
                        "micro-batch than in plain accumulation. Set dropout to 0, or micro_batches to "
                        "by_layer_inexact to train with other draws."
                    )
                with nullcontext() if more else self._updates():
                    self._backward(jobs, turn, draws=draws)
                return [job.worker.result for job in jobs]
            finally:
                for job in jobs:
                    job.worker.abandon()
                    job.worker.result = None
                self._jobs = {}
                if self._calls is not None and me is not None:
                    me.number = threading.get_ident()

    def _with_gradients(self) -> int:
        """Counts the parameters of layers that have a gradient."""
        engine = None if self._engine is None else self._engine()
        known = [param for layer in self._layers for param in layer.parameters()]
        if engine is None or engine.gradients is None or engine.training.plain.active:
            return sum(param.grad is not None for param in known)
        slots = (engine.slots.of(param) for param in known)
        grads = (engine.gradients.known(slot) for slot in slots if slot is not None)
        return sum(grad is not None and grad.value is not None for grad in grads)

    # ---- threads ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _acting(self, me: Any) -> Iterator[None]:
        """A context in which a job's thread is the one that has begun the step, to the pages."""
        engine = None if self._engine is None else self._engine()
        if engine is None:
            yield
            return
        thread = engine.pool.calls.thread
        own, thread.me = thread.me, me
        try:
            yield
        except BaseException:
            # torch calls no hook at the end of a forward that ends so; what is pinned is known in this thread alone.
            engine.residency.forwards.abort()
            raise
        finally:
            thread.me = own

    def _turn(self, job: _Job) -> None:
        """Lets a job run until it stops."""
        if self._calls is not None:
            # Autograd's threads look for the thread that waits for them.
            me, thread = self._calls.thread.me, job.worker.thread.ident
            assert thread is not None
            me.number, before = thread, me.number
            try:
                job.worker.turn()
            finally:
                me.number = before
        else:
            job.worker.turn()

    def _one_pass(self, count: int, *, more: bool) -> AbstractContextManager[None]:
        """A context in which all that runs is one pass to the pages, and planned as such."""
        engine = None if self._engine is None else self._engine()
        return nullcontext() if engine is None else engine.run_ahead.step.together(count, more=more)

    def _updates(self) -> AbstractContextManager[None]:
        """A context in which updates begin with gradients that the last micro-batch completes, where they may."""
        engine = None if self._engine is None else self._engine()
        return nullcontext() if engine is None else engine.training.backward_by_layer()

    @contextmanager
    def _layers_stop(self) -> Iterator[None]:
        """A context in which layers that are called by a job stop it before they run."""
        checkpointed = [vars(layer).get(_CHECKPOINTS) for layer in self._layers]
        self._reentrant = {
            layer for layer, before in zip(self._layers, checkpointed, strict=True) if before and _is_reentrant(layer)
        }
        for number, layer in enumerate(self._layers):
            # All of a call is ours, its hooks too: a job that has stopped pins nothing.
            vars(layer)["_call_impl"] = self._stopping(number, layer)
            if checkpointed[number]:
                vars(layer)[_CHECKPOINTS] = False
        try:
            yield
        finally:
            for layer, before in zip(self._layers, checkpointed, strict=True):
                del vars(layer)["_call_impl"]
                if before:
                    vars(layer)[_CHECKPOINTS] = before

    def _stopping(self, number: int, layer: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            job = self._jobs.get(threading.current_thread())
            if job is None:
                return nn.Module._call_impl(layer, *args, **kwargs)
            return self._call(job, number, layer, args, kwargs)

        return call

    # ---- forward ---------------------------------------------------------------------------------------------------

    def _forward(self, jobs: Sequence[_Job], states: list[Any], turn: Callable[[int], None]) -> None:
        """Runs all jobs up to their ends: layer by layer, and at last one head after the other."""
        while waiting := [(number, job) for number, job in enumerate(jobs) if not job.worker.over]:
            for number, job in waiting:
                first = not job.calls
                turn(number)
                self._turn(job)
                if job.worker.over and job.calls and (last := job.calls[-1]) is not None:
                    # Its head has been there and back.
                    last.let_go()
                # Where a job has stopped, others meet what it has set for all.
                if (first or job.worker.over) and states_of(self._layers) != states:
                    raise UnsupportedError(
                        "micro_batches: by_layer: modes, adapters or attention backends are changed around the forward "
                        "of a micro-batch, which would change the forwards of the others. Leave micro_batches out."
                    )

    def _call(self, job: _Job, number: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """A job calls a layer."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return nn.Module._call_impl(layer, *args, **kwargs)

        if not torch.is_grad_enabled():
            # Generation, or a reference that a change of the model surrounds: others get no turn within it.
            return call(*args, **kwargs)
        job.worker.stop()
        self.order.append((number, self._first + self._workers.index(job.worker)))
        if number != len(job.calls):
            raise UnsupportedError(
                f"micro_batches: by_layer: layer {number} is call {len(job.calls)} of layers in a micro-batch: layers "
                "are left out or called again, or there are two forwards with gradients. Leave micro_batches out."
            )
        given = kwargs.get("hidden_states", args[0] if args else None)
        last = job.calls[-1] if job.calls else None
        if last is not None and not any(given is leaf for leaf in last.leaves):
            raise UnsupportedError(
                f"micro_batches: by_layer: the input of layer {number} is not the output of layer {number - 1}. Leave "
                "micro_batches out."
            )
        may_draw = self._inexact or len(self._jobs) == 1
        output, kept = run_first(
            layer, call, args, kwargs, self._caught, may_draw=may_draw, reentrant=layer in self._reentrant
        )
        job.calls.append(kept)
        self.kept_bytes += kept.given.nbytes
        if number == len(self._layers) - 1:
            self.kept_bytes += kept.leaves[0].nbytes
            # Heads come after the last layer has run for all.
            job.worker.stop()
        return output

    # ---- backward --------------------------------------------------------------------------------------------------

    def _backward(self, jobs: Sequence[_Job], turn: Callable[[int], None], *, draws: bool) -> None:
        """Runs the backward of all layers, from the last one, and then what is below the first."""
        below: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        after = RandomStates(next(self._layers[0].parameters()).device) if draws else None
        for number in reversed(range(max((len(job.calls) for job in jobs), default=0))):
            for index, job in enumerate(jobs):
                if number >= len(job.calls):
                    continue
                kept, job.calls[number] = job.calls[number], None
                assert kept is not None
                turn(index)
                self.order.append((number, self._first + index))
                layer = kept.module
                gradient = run_backward(
                    kept,
                    lambda *a, layer=layer, **k: nn.Module._call_impl(layer, *a, **k),
                    self._caught,
                    draws=draws,
                    reentrant=layer in self._reentrant,
                )
                if gradient is None:
                    continue
                if number == 0:
                    below.append((index, kept.given, gradient))
                else:
                    # It has a gradient already where the loss uses it beside the layer.
                    kept.given.grad = gradient if kept.given.grad is None else kept.given.grad + gradient
        if after is not None:
            after.restore()
        for index, given, gradient in below:
            if given.requires_grad:
                turn(index)
                torch.autograd.backward(given, gradient)


def _is_reentrant(layer: nn.Module) -> bool:
    return bool(getattr(vars(layer).get(_CHECKPOINT), "keywords", {}).get("use_reentrant"))
