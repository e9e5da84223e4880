"""Windows: parts of paged tensors, in the compute tier or on their page in host memory."""

from __future__ import annotations

import torch

from ptm_accel.memory.block import PART_ALIGN, Block, Part, Pin, Place
from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.transfer import ALIGN_BYTES, Buffer, Transfer, round_up

WINDOW_ALIGN = PART_ALIGN
"""Window starts are multiples of this many elements, as those of parts."""


def window_elements(window_bytes: int, element_bytes: int) -> int:
    """Counts the elements of a window of about `window_bytes`: a multiple of `WINDOW_ALIGN`, at least one."""
    return max(window_bytes // element_bytes // WINDOW_ALIGN, 1) * WINDOW_ALIGN


class Window:
    """Some elements of a paged tensor in the compute tier: a view of its extent, or a staged copy.

    Attributes:
        source: the tensor.
        start, stop: which of its elements.
        shape: that of the tensor, or of the part, if the window is all of it.
        tensor: the elements, 1-D, of a staged copy, and of an extent after `Windows.ready`; until `Windows.close`.
        pin: what keeps the extent, if the tensor is resident.
        buffer: the staged copy's memory, if it is not.
        reservation: the charge for the buffer.
        load: the transfer that fills the buffer.
    """

    __slots__ = ("buffer", "load", "pin", "reservation", "shape", "source", "start", "stop", "tensor")

    def __init__(self, source: Block | Part, start: int, stop: int) -> None:
        # All of it is given in its shape.
        self.shape = source.shape if start == 0 and stop == source.numel else None
        if isinstance(source, Part):
            start, stop, source = source.start + start, source.start + stop, source.block
        self.source = source
        self.start = start
        self.stop = stop
        self.tensor: torch.Tensor | None = None
        self.pin: Pin | None = None
        self.buffer: Buffer | None = None
        self.reservation: Reservation | None = None
        self.load: Transfer | None = None

    @property
    def awaited(self) -> Transfer | None:
        """Transfer that `Windows.ready` waits for, if any."""
        return self.load if self.tensor is not None else self.source.arrival


class Windows:
    """Opens and closes windows on a pool's tensors. Windows of one tensor are written in ascending order.

    Args:
        pool: whose tensors.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def open(self, source: Block | Part, start: int, stop: int, *, reads: bool = True) -> Window:
        """Elements [start, stop) for reading and writing; the byte offset of `start` is a multiple of `ALIGN_BYTES`.

        A resident or arriving tensor gives a view of its extent. One that is away is staged: the load is started here,
        unless the caller writes all elements and `reads` none.

        Raises:
            BudgetError: no room for the staged bytes.
            DiskError: the disk has failed.
        """
        pool = self._pool
        window = Window(source, start, stop)
        tensor, start, stop = window.source, window.start, window.stop
        with pool.lock:
            if tensor.place is Place.ARRIVING:
                # Pinned for each window: another may be closed before this one is ready.
                window.pin = pool.pin_arriving(tensor)
                return window
            if tensor.place.resident:
                window.pin = pool.pin(tensor)
                return window
            offset = start * tensor.dtype.itemsize
            assert offset % ALIGN_BYTES == 0, (tensor, start)
            nbytes = (stop - start) * tensor.dtype.itemsize
            loads = reads and tensor.place is Place.AWAY
            reservation, buffer = pool.admission.take_buffer(nbytes, Tag.STAGING, tensor.name, ordered=not loads)
            assert buffer.octets is not None
            typed = buffer.octets[:nbytes].view(tensor.dtype)
            window.tensor, window.buffer, window.reservation = typed, buffer, reservation
            if not reads:
                return window
            if not loads:
                typed.fill_(tensor.fill)
                return window
            behind, buffer.behind = buffer.behind, ()
            try:
                window.load = pool.traffic.start_load(tensor, offset, buffer.octets, typed, behind)
            except BaseException:
                pool.admission.released.add(buffer.octets, buffer, reservation)
                raise
            return window

    def ready(self, window: Window) -> torch.Tensor:
        """Returns the window's elements, 1-D, once they have arrived.

        Raises:
            DiskError: the load failed.
        """
        load, window.load = window.load, None
        if load is not None:
            self._pool.traffic.order(load)
        if window.tensor is None:
            elements = self._extent(window).view(-1)
            whole = window.stop - window.start == window.source.numel
            window.tensor = elements if whole else elements[window.start : window.stop]
        return window.tensor

    def shaped(self, window: Window) -> torch.Tensor:
        """Returns `ready`, in the shape of the tensor (or part) where the window is all of it."""
        if window.shape is None:
            return self.ready(window)
        if window.pin is None or window.tensor is not None or window.stop - window.start != window.source.numel:
            return self.ready(window).view(window.shape)
        # One call and not two views. Not the extent's own tensor, whose data an update might set.
        return self._extent(window).detach()

    def _extent(self, window: Window) -> torch.Tensor:
        """Returns the bytes of a window's source in the compute tier, waited for."""
        assert window.buffer is None, "window used after its end"
        if window.pin is None:
            window.pin = self._pool.pin(window.source)
        elif not window.source.place.resident:
            self._pool.fault(window.source)
        return window.pin.tensor

    def close(self, window: Window, *, wrote: bool) -> None:
        """Ends a window; what was written is on its way to the backing store (or in the extent) afterwards.

        Raises:
            BudgetError: the backing store has no room.
        """
        pool = self._pool
        with pool.lock:
            tensor, window.tensor = window.source, None
            if window.pin is not None:
                if wrote:
                    tensor.become(Place.DIRTY)
                window.pin.release()
                return
            buffer, reservation = window.buffer, window.reservation
            assert buffer is not None, "window closed twice"
            assert reservation is not None and buffer.octets is not None
            octets = buffer.octets
            transfer: Transfer | None = None
            try:
                if window.load is not None:
                    window.load.wait()
                if wrote and tensor.place is Place.ARRIVING:
                    pool.fault(tensor)
                if wrote and tensor.extent is not None:
                    # The tensor has been brought in meanwhile; its extent lacks what was written here.
                    self._write_through(window, octets)
                elif wrote:
                    offset = window.start * tensor.dtype.itemsize
                    transfer = pool.traffic.start_store(tensor, offset, octets)
                    tensor.become(Place.AWAY)
            finally:
                pool.admission.released.add(octets, buffer, reservation, transfer, alone=True)

    def _write_through(self, window: Window, octets: torch.Tensor) -> None:
        tensor = window.source
        assert tensor.extent is not None
        nbytes = min(octets.numel(), tensor.nbytes - window.start * tensor.dtype.itemsize)
        typed = octets[:nbytes].view(tensor.dtype)
        tensor.extent.tensor.view(-1)[window.start : window.start + typed.numel()].copy_(typed)
        tensor.become(Place.DIRTY)


class HostWindow(Window):
    """Elements of an away tensor in their pages in host memory, below a device; within `HostStore.reach`.

    Attributes:
        run: keeps the pages; `tensor` is not to be touched before its transfers have ended.

    Raises:
        BudgetError: it has to be read from the disk, and there is no frame for it.
        DiskError: a store of it had failed.
    """

    __slots__ = ("run",)

    def __init__(self, source: Block | Part, start: int, stop: int, backing: HostStore) -> None:
        super().__init__(source, start, stop)
        size = source.dtype.itemsize
        self.run = backing.hold(self.source.handle, self.start * size, round_up((stop - start) * size))
        self.tensor = self.run.octets[: (stop - start) * size].view(source.dtype)
