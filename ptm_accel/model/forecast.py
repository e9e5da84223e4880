"""The trace of a pass before there is one: made on fake tensors, without running or allocating anything.

Fake tensors have shapes, types and storages, and no bytes. The model is given some in place of its own tensors, is put
on pages that hold them, and its pass is gone through: by the very parts that meet a real pass (`Residency`, the
saved-tensor hooks, `Gradients`), so that what the pool is asked for, and when, is what it will be asked for. What
differs from a recorded trace is what was not lived through: times are reckoned from the arithmetic and the bytes of
each operation, and what else is held from the lives of the storages that operations make.

Nothing that depends on values can be known: an operation whose result decides what comes next (`tensor.item()`,
`nonzero`, a loop over the experts that were chosen) is refused by name. Such passes are recorded as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from ptm_accel.config import DEFAULT_PAGE_SIZE
from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.transfer import Block
from ptm_accel.model.attach import check_model, small_bytes, take_parameters
from ptm_accel.model.away import AwayParameter
from ptm_accel.model.gradients import Gradients
from ptm_accel.model.hooks import Hook
from ptm_accel.model.meter import Meter, storage_key
from ptm_accel.model.residency import Residency
from ptm_accel.model.run_ahead import RunAhead
from ptm_accel.model.slots import ExtentTable, SlotTable
from ptm_accel.schedule.trace import Recorder, Trace, Use
from ptm_accel.schedule.updates import Updates
from ptm_accel.units import parse_bytes

_PAGE_BYTES = parse_bytes(DEFAULT_PAGE_SIZE)

_UNBOUNDED_BYTES = 1 << 62
"""A budget that nothing exceeds."""

_BY_VALUE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""How fake tensors say that an operation needs values, or has no rule for shapes."""


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """A tensor of a batch that need not exist.

    Attributes:
        shape: its shape.
        dtype: its element type; token ids by default.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.long


def forecast(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor | ShapeSpec | object],
    *,
    autocast_dtype: torch.dtype | None = None,
    backward: bool = True,
    loss: Callable[[Any], torch.Tensor] | None = None,
    device: torch.device | None = None,
    page_bytes: int = _PAGE_BYTES,
    flops_s: float | None = None,
    bytes_s: float | None = None,
) -> Trace:
    """The trace of one pass over `model`, without running or allocating anything.

    Items, accesses and the trace's key are those that the engine records in the first pass over the same batch; see
    `Access.compute_s` and `Access.held_bytes` for the two that are reckoned here. `held_bytes` is what is pinned beside
    the access, the model's buffers and small tensors, and the most that everything else (activations, casts, gradients
    under way, the batch) comes to until the next access.

    Args:
        model: on any device, also the meta device; in the mode (train or eval) and with the gradient checkpointing
            that the pass will have. It is unchanged afterwards, and none of its values are read.
        batch: the model's keyword arguments. Of tensors only shape and dtype count.
        autocast_dtype: what `torch.autocast` will cast to; None without it.
        backward: whether backward follows; False is a pass under `torch.no_grad`.
        loss: makes the scalar to start from of what the model returns; by default its `loss`, or the sum of the
            tensor it returns.
        device: where the pass will run; by default where the model is, or the CPU if it is on the meta device.
        page_bytes: the page size the model will be attached with; by default the configuration's default. It decides
            which tensors are too small to move.
        flops_s: floating-point operations per second; None counts arithmetic as free.
        bytes_s: bytes per second that operations read and write; None counts them as free.

    Raises:
        UnsupportedError: the model cannot be put on pages, or is already; it is compiled; an operation depends on
            values; there is no loss; there is no such device here.
    """
    check_model(model)
    _check_plain(model)
    device = _where(model, device)
    meter = Meter(flops_s, bytes_s)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(), _lent(model, device):
        inputs = {name: _fake(value, device) for name, value in batch.items()}
        meter.add(inputs.values())
        with _on_fake_pages(model, meter, device, small_bytes(page_bytes)) as notes, ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(backward))
            stack.enter_context(meter)
            try:
                with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
                    output = model(**inputs)
                if backward:
                    _loss_of(output, loss).backward()
            except _BY_VALUE as error:
                raise _refusal(error, notes, inputs) from error
            return notes.trace()


def _where(model: nn.Module, device: torch.device | None) -> torch.device:
    """Where the pass will run."""
    if device is None:
        known = (t.device for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta")
        device = next(known, torch.device("cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"a pass on {device} cannot be forecast here: torch {torch.__version__} finds {torch.cuda.device_count()} "
            "CUDA devices, and its choice of kernels asks one. Leave `device` out to forecast it as on the CPU."
        )
    return device


def _check_plain(model: nn.Module) -> None:
    """Refuses models that are not plain modules of plain parameters at present."""
    paged = [name for name, param in model.named_parameters() if isinstance(param, AwayParameter)]
    if paged:
        raise UnsupportedError(
            f"{paged[0]} and {len(paged) - 1} more of its parameters are on pages already, where a pass is "
            "recorded as it happens. Call forecast() before the model is attached, or on a copy on the meta device."
        )
    compiled = [
        name
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
    ]
    if compiled:
        raise UnsupportedError(
            f"{compiled[0] or 'the model'} and {len(compiled) - 1} more modules are compiled by torch.compile, and a "
            "forecast follows single operations. Call forecast() before the model is compiled."
        )


def _loss_of(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    if loss is not None:
        return loss(output)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor):
        given = list(output) if isinstance(output, Mapping) else type(output).__name__
        raise UnsupportedError(
            f"there is no loss to start a backward from: the model returned {given}. Add `labels` to the batch, give "
            "forecast(loss=...), or set backward=False."
        )
    return found.sum() if found.dim() else found


def _refusal(error: Exception, notes: _Notes, inputs: Mapping[str, Any]) -> UnsupportedError:
    what = getattr(error, "func", None) or getattr(error, "reason", error)
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in inputs.items() if isinstance(t, torch.Tensor))
    return UnsupportedError(
        f"the pass cannot be forecast: the result of {what} does not follow from shapes alone (after {len(notes)} "
        f"accesses, the last to {notes.last or 'nothing'}; batch: {shapes}). Let the engine record the first pass as "
        "it happens, or choose a way that works on shapes (for experts: experts_implementation='grouped_mm')."
    )


# ---- fake tensors and pages ------------------------------------------------------------------------------------------


def _fake(value: Any, device: torch.device) -> Any:
    """A fake tensor like `value`; what is no tensor stays as it is."""
    if isinstance(value, ShapeSpec):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    if not isinstance(value, torch.Tensor):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if not isinstance(value, nn.Parameter):
        return like.requires_grad_(value.requires_grad)
    param = nn.Parameter(like, requires_grad=value.requires_grad)
    param.__dict__.update(value.__dict__)
    return param


@contextmanager
def _lent(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model with fake tensors in place of its own; at the end its modules have exactly what they had before."""
    made: dict[int, Any] = {}

    def fakes(values: Mapping[str, Any]) -> dict[str, Any]:
        # What is shared stays shared. The originals live in `before`, so that no address is used twice.
        return {name: made.setdefault(id(value), _fake(value, device)) for name, value in values.items()}

    before = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
    try:
        for module, attributes, _ in before:
            tensors = {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}
            lent = {"_parameters": fakes(module._parameters), "_buffers": fakes(module._buffers), **fakes(tensors)}
            vars(module).update(lent)
        yield
    finally:
        for module, attributes, children in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)


class _FakeTier:
    """A compute tier of fake blocks."""

    tier = Tier.HOST

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.device = device
        self._meter = meter

    def allocate(self, nbytes: int) -> Block:
        """See `ComputeTier`."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._meter.leave_out([buffer])
        return Block(buffer, None)

    def recycle(self, block: Block) -> None:
        """See `ComputeTier`."""

    def close(self) -> None:
        """See `ComputeTier`."""

    def check_integrity(self) -> None:
        """See `ComputeTier`."""


class _FakeTable(ExtentTable):
    """Fake storages have no address in memory, and can be told apart all the same."""

    kinds = (FakeTensor,)

    @staticmethod
    def address(tensor: torch.Tensor) -> int:
        """See `ExtentTable`."""
        return storage_key(tensor)


@contextmanager
def _on_fake_pages(model: nn.Module, meter: Meter, device: torch.device, small: int) -> Iterator[_Notes]:
    """The model, which holds fake tensors, on pages where everything fits; as `Engine.attach` puts it there."""
    pool = Pool(_FakeTier(device, meter), Budget(Tier.HOST, _UNBOUNDED_BYTES), None)
    slots, table = SlotTable(), _FakeTable()
    take_parameters(model, pool, slots, table, small=small, paged={})
    for slot in slots:
        meter.leave_out([slot.param])
        pool.adopt(slot.value, slot.param.data)
        # As if the home had the bytes too: then the pool counts what nobody pins as idle.
        slot.value.place = Place.CLEAN
        pool.shelf.touch(slot.value)
    meter.leave_out(model.buffers())
    trainable = [slot for slot in slots if slot.param.requires_grad]
    for slot in trainable:
        # Before the hook that takes the gradient: from there on it is a tensor on pages.
        slot.param.register_post_accumulate_grad_hook(Hook(lambda param: meter.leave_out([param.grad])))
    gradients = Gradients(trainable, pool, wide=False)
    residency = Residency(pool, slots, table)
    fixed = sum(buffer.nbytes for buffer in model.buffers())
    notes = residency.run_ahead = _Notes(pool, meter, fixed)
    residency.install(model)
    try:
        yield notes
    finally:
        residency.abort()
        residency.remove()
        gradients.remove()


class _Notes(RunAhead):
    """Writes down what the pool is asked for, and what is held meanwhile.

    Args:
        pool: who is asked.
        meter: knows what operations take.
        fixed_bytes: what is there at all times and not on pages.
    """

    def __init__(self, pool: Pool, meter: Meter, fixed_bytes: int) -> None:
        super().__init__(pool)
        self.last: str | None = None
        self._meter = meter
        self._notebook: Recorder | None = None
        # For each access: when it was, what is pinned beside it, and the most that is alive until the next.
        self._times_s: list[float] = []
        self._beside: list[int] = []
        self._alive: list[int] = []
        params = list(pool.tensors())
        self._movable_bytes = sum(t.nbytes for t in params if t.movable)
        self._fixed_bytes = fixed_bytes + sum(t.slot_bytes for t in params if not t.movable)

    def __len__(self) -> int:
        return len(self._beside)

    def begin(self, kind: Hashable, *, evaluates: bool = False) -> None:
        """See `RunAhead`."""
        if self._notebook is None:
            self._notebook = Recorder((kind, self.sums(), Updates.APART))
            self._pool.adviser = self

    def end(self) -> None:
        """See `RunAhead`."""

    def give_up(self) -> None:
        """See `RunAhead`."""
        self._pool.adviser = None

    def accessed(self, tensor: PagedTensor, *, write: bool) -> None:
        """See `Adviser`."""
        self._note(tensor, Use.WRITE if write else Use.READ)

    def awaited(self, tensor: PagedTensor) -> None:
        """See `Adviser`."""

    def created(self, tensor: PagedTensor) -> None:
        """See `Adviser`."""
        if not tensor.movable:
            self._fixed_bytes += tensor.slot_bytes
        self._note(tensor, Use.CREATE)

    def victim(self, idle: Iterable[PagedTensor]) -> PagedTensor | None:
        """See `Adviser`."""
        return None

    def trace(self) -> Trace:
        """What was noted."""
        notebook = self._notebook
        assert notebook is not None
        trace = notebook.finish([0.0, *self._times_s, self._meter.seconds])
        alive = [*self._alive, self._meter.take_peak()][1:]
        held = [beside + most for beside, most in zip(self._beside, alive, strict=True)]
        accesses = (replace(access, held_bytes=n) for access, n in zip(trace.accesses, held, strict=True))
        return replace(trace, accesses=tuple(accesses))

    def _note(self, tensor: PagedTensor, use: Use) -> None:
        if not tensor.movable:
            return
        assert self._notebook is not None
        self.last = tensor.name
        pinned = self._movable_bytes - self._pool.idle_bytes
        if tensor.pins and tensor.tag is Tag.PARAM:
            pinned -= tensor.nbytes
        self._beside.append(self._fixed_bytes + pinned)
        self._alive.append(self._meter.take_peak())
        backward = torch._C._current_graph_task_id() != -1
        self._times_s.append(self._meter.seconds)
        self._notebook.record(tensor.name, tensor.slot_bytes, use, held_bytes=0, backward=backward)
