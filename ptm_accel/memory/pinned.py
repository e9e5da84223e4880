"""Host memory that is pinned, so that a card copies to and from it at full speed and without the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ptm_accel.memory.populate import populate
from ptm_accel.units import format_bytes

HostPin = Callable[[int, int], Callable[[], None]]
"""Locks (address, nbytes) of host memory for fast copies and returns what unlocks it; `OSError` if it cannot."""

_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every card, whichever is the current one."""


def register_pinned(address: int, nbytes: int) -> Callable[[], None]:
    """Registers host memory with CUDA, so that copies run at full speed and without the host.

    Args:
        address: start of the range, page-aligned.
        nbytes: its length; all of it becomes resident.

    Returns:
        What ends the registration.

    Raises:
        OSError: CUDA refuses; the message has its code.
    """
    # Where that cannot be done, registering does it, by one core.
    populate(address, nbytes)
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
    if code != 0:
        _forget_cuda_error()
        raise OSError(f"cudaHostRegister of {format_bytes(nbytes)} failed with CUDA error {code}")

    def unregister() -> None:
        cudart.cudaHostUnregister(address)

    return unregister


def host_pin() -> HostPin | None:
    """What pins host memory on this machine; None where there is no CUDA."""
    return register_pinned if torch.cuda.is_available() else None


def _forget_cuda_error() -> None:
    # CUDA keeps the code of a failed call, and torch would raise it at its next, unrelated, kernel.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return
