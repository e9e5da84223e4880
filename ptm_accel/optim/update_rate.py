"""How fast the CPU updates parameters: measured with the pieces, threads and kernel that updates have.

Gradients are multiplied by a factor, as the Trainer's clipping does by default.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from functools import partial

import torch

from ptm_accel.hardware.measure import fused_adamw
from ptm_accel.hardware.rates import update_rate
from ptm_accel.machine import available_bytes
from ptm_accel.memory.mapping import anonymous_run
from ptm_accel.optim.arithmetic import InPieces
from ptm_accel.optim.core_threads import CoreThreads
from ptm_accel.units import MIB

_BYTES = 256 * MIB
"""More than caches hold."""
_STEP_BYTES = 4 * MIB
_PARAMETERS = 8
_PASSES = 9
_ALIGN = 64


def cpu_update_rate(dtype: torch.dtype = torch.float32, *, masters: bool = False) -> float | None:
    """Parameters per second of AdamW on the CPU, with torch's threads; uses 256 MiB while it is measured.

    Args:
        dtype: of parameters and gradients.
        masters: whether narrower parameters have fp32 masters, and so moments in fp32.

    Returns:
        None where it cannot be measured, which the log explains. Never an error.
    """
    masters = masters and dtype.itemsize < 4
    kept = " and fp32 masters" if masters else ""
    what = f"{str(dtype).removeprefix('torch.')}{kept} with {torch.get_num_threads()} threads"
    return update_rate(what, partial(measure_cpu_update, dtype, masters=masters))


def measure_cpu_update(dtype: torch.dtype, *, masters: bool = False) -> float:
    """Measures what `cpu_update_rate` returns.

    Raises:
        BudgetError: the machine gives no memory.
    """
    wide = torch.float32 if masters else dtype
    # Value, gradient, moments and master.
    dtypes = [dtype, dtype, wide, wide, *([wide] if masters else [])]
    nbytes = max(_STEP_BYTES, min(_BYTES, available_bytes() // 4 // _STEP_BYTES * _STEP_BYTES))
    # Huge pages, as those that training updates.
    memory = anonymous_run(nbytes, "the measurement of updates").tensor()
    each = nbytes // sum(kind.itemsize for kind in dtypes) // (_PARAMETERS * _ALIGN) * _ALIGN
    columns, start = [], 0
    for kind, value in zip(dtypes, (0.1, 1e-3, 1e-4, 1e-6, 0.1), strict=False):
        stop = start + each * _PARAMETERS * kind.itemsize
        columns.append(memory[start:stop].view(kind).fill_(value).split(each))
        start = stop
    threads = CoreThreads("ptm_accel update rate")
    try:
        update = _updater(columns, threads)
        # Threads begin, and memory is touched.
        update()
        seconds = statistics.median(timeit.repeat(update, number=1, repeat=_PASSES))
    finally:
        threads.close()
    return each * _PARAMETERS / seconds


def _updater(columns: list[tuple[torch.Tensor, ...]], threads: CoreThreads) -> Callable[[], None]:
    """One update of parameters, whose values, gradients, moments and masters, if any, are given."""
    values, grads, averages, squares = columns[:4]
    masters = columns[4] if len(columns) > 4 else None
    steps = [torch.zeros((), dtype=torch.float32) for _ in values]
    scale = torch.ones((), dtype=torch.float32)
    # There is room to widen the gradient of one parameter; without masters a group is updated at once.
    groups = [slice(None)] if masters is None else [slice(index, index + 1) for index in range(len(values))]

    @torch.no_grad()
    def update() -> None:
        for group in groups:
            pieces = InPieces(scale, threads)
            params = list((values if masters is None else masters)[group])
            rounded = [None] * len(params) if masters is None else values[group]
            taken = [pieces.take(*each) for each in zip(params, grads[group], rounded, strict=True)]
            with pieces:
                fused_adamw([params, taken, list(averages[group]), list(squares[group])], steps[group])
            pieces.check_done()

    return update
