"""Transfers that threads of the C library carry out (POSIX `aio_read` and `aio_write`, see aio(7)).

A thread of Python's that moves bytes takes the interpreter before and after each system call, from the thread that
trains: with many small tensors that costs more than the transfers. The C library's threads never need it. The price is
that nobody is told when a transfer has ended; whoever wants to know looks (`ended`) or waits (`wait`).

The library moves what is asked for on one descriptor in order, one after the other (`ptm_accel.memory.channels`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from typing import Any, Protocol

_MOMENT_S = 0.2
"""How long a wait may last before whoever waits looks around."""
NEVER_STARTED = -(1 << 20)
"""The result of what was prepared and not started: no error number is so large."""


class Background(Protocol):
    """Who carries out transfers while nobody waits."""

    def prepared(self, fd: int, *, writes: bool, address: int, offset: int, nbytes: int) -> Any:
        """A transfer between memory and a file, ready to be started; it is kept until it has ended.

        Args:
            fd: of the file.
            writes: to the file, or from it.
            address: of the memory, which stays where it is until the end.
            offset: in the file.
            nbytes: how many.

        """
        ...

    def start(self, prepared: Any) -> None:
        """Starts a transfer.

        Raises:
            OSError: it cannot be started.
        """
        ...

    def result(self, prepared: Any) -> int | None:
        """How many bytes were moved, or an error number, negated; None as long as it is under way. Never blocks."""
        ...

    def wait(self, started: Sequence[Any]) -> None:
        """Blocks until one of some transfers has ended, and a moment at the most."""
        ...

    def cancel(self, fd: int) -> None:
        """Ends transfers of a file that have not begun to move anything; their result is an error."""
        ...


class _Event(ctypes.Structure):
    """`struct sigevent`: nobody is told of the end."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    ]


class _Request(ctypes.Structure):
    """`struct aiocb` of the GNU C library, where pointers and offsets have 64 bits."""

    _fields_ = [
        ("fildes", ctypes.c_int),
        ("lio_opcode", ctypes.c_int),
        ("reqprio", ctypes.c_int),
        ("buf", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("sigevent", _Event),
        ("own_link", ctypes.c_void_p),
        ("own_numbers", ctypes.c_int * 2),
        ("own_error", ctypes.c_int),
        ("own_result", ctypes.c_ssize_t),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_byte * 32),
    ]


_SIGEV_NONE = 1


class CLibrary:
    """The GNU C library's, see `Background`.

    Raises:
        OSError: this process has another C library, or its structures are not those that are known here.
    """

    def __init__(self) -> None:
        # Calls that do not block keep the interpreter: to give it away is what costs.
        quick, slow = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        known = struct.calcsize("P") == 8 and ctypes.sizeof(_Request) == 168
        if not (known and hasattr(quick, "gnu_get_libc_version") and hasattr(quick, "aio_read")):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._read, self._write = quick.aio_read, quick.aio_write
        self._error, self._return, self._suspend = quick.aio_error, quick.aio_return, slow.aio_suspend
        self._return.restype = ctypes.c_ssize_t
        self._cancel = quick.aio_cancel
        self._moment = (ctypes.c_int64 * 2)(0, int(_MOMENT_S * 1e9))

    def prepared(self, fd: int, *, writes: bool, address: int, offset: int, nbytes: int) -> Any:
        """See `Background`."""
        request = _Request(fildes=fd, buf=address, nbytes=nbytes, offset=offset)
        request.lio_opcode = writes
        request.sigevent.notify = _SIGEV_NONE
        request.own_error = -NEVER_STARTED
        return request

    def start(self, prepared: Any) -> None:
        """See `Background`."""
        # The library sets this itself, to the same.
        call = self._write if prepared.lio_opcode else self._read
        if call(ctypes.byref(prepared)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def result(self, prepared: Any) -> int | None:
        """See `Background`."""
        code: int = self._error(ctypes.byref(prepared))
        if code == errno.EINPROGRESS:
            return None
        return -code if code else int(self._return(ctypes.byref(prepared)))

    def wait(self, started: Sequence[Any]) -> None:
        """See `Background`."""
        requests = (ctypes.c_void_p * len(started))(*map(ctypes.addressof, started))
        # Whatever it says (time is up, a signal has come), whoever waits looks again.
        self._suspend(requests, len(started), self._moment)

    def cancel(self, fd: int) -> None:
        """See `Background`."""
        self._cancel(fd, None)
