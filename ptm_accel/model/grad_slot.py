"""The gradient of one parameter: a sum over micro-batches, on pages.

Its norm must be taken over the whole tensor in one call to be bit-equal to torch's, so it is taken for clipping, or
just before the sum is evicted, while all of it is in memory.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.block import Part, Place, placeholder
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.calls import Call
from ptm_accel.model.away import AwayGradient, bare
from ptm_accel.model.norms import NORM_TYPE, Norms, is_narrow
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor
from ptm_accel.schedule.updates import GRAD_SUFFIX


class _WantedNorms:
    """The sums in one block whose norms are still wanted."""

    __slots__ = ("grads",)

    def __init__(self) -> None:
        self.grads: list[GradSlot] = []

    def arrived(self, tensor: torch.Tensor) -> None:
        """The pool has brought the block in."""

    @property
    def views(self) -> int:
        """None."""
        return 0

    def was_written(self) -> bool:
        """Writers to a sum call `GradSlot.changed`."""
        return False

    def leaving(self, tensor: torch.Tensor) -> None:
        """The pool is about to evict the block: takes the norms."""
        for grad in self.grads:
            grad.leaving(tensor)


class GradSlot:
    """The summed gradient of one parameter.

    Args:
        slot: the parameter.
        executor: serves accesses.
        norms: takes its norm; where that is in fp32, so are sums of several gradients, although the parameter is
            narrower (fp32 master weights).

    Attributes:
        value: the sum on pages, or None while there is none.
        spent: whether an update during backward has consumed the sum; its norm is still known.
        used: whether a step has consumed a sum since `zero_grad`: torch would still have it.
    """

    __slots__ = ("_executor", "_norm", "_norm_type", "_norms", "_pool", "_view", "slot", "spent", "used", "value")

    def __init__(self, slot: ParamSlot, executor: Executor, norms: Norms) -> None:
        self.slot = slot
        self.value: Part | None = None
        self.spent = self.used = False
        self._view: weakref.ref[AwayGradient] | None = None
        self._executor = executor
        self._pool = executor.pool
        self._norms = norms
        self._norm: torch.Tensor | None = None
        self._norm_type = NORM_TYPE

    def add(self, gradient: torch.Tensor, *, held: bool = False) -> None:
        """Adds a gradient to the sum; the first becomes the sum, since adding to zeros loses -0.0.

        Args:
            gradient: the gradient.
            held: user code keeps it too, so the first is copied.
        """
        if self.value is None:
            self._norm = None
            value = self.paged(gradient.dtype)
            self._hold(value)
            if value.alone:
                self._executor.adopt(value.block, gradient, copied=held)
            else:
                write_first(self._executor, value, gradient)
                # The block may have left before that, and taken a norm of what was there.
                self._norm = None
            return
        self.widen()
        with self._executor.pin(self.value, write=True) as total:
            # The norm may have been taken by an eviction just before.
            self._norm = None
            begin = time.perf_counter()
            total.add_(gradient)
            self._pool.stats.elsewhere_s += time.perf_counter() - begin

    def widen(self) -> None:
        """Converts the sum to fp32 where sums are kept in fp32."""
        if self.widens:
            narrow = self.value
            assert narrow is not None
            with self._executor.pin(narrow) as total:
                wide = self._copied(total, torch.float32)
            self.drop()
            self._hold(wide)

    @property
    def widens(self) -> bool:
        """Whether there is a sum that is to be fp32 and is not yet."""
        return self._norms.wide and self.value is not None and is_narrow(self.value.dtype)

    def paged(self, dtype: torch.dtype | None = None) -> Part:
        """Pages for a gradient, by default of the parameter's type."""
        slot = self.slot
        return slot.group.part(slot.member, GRAD_SUFFIX, Tag.GRAD, dtype or slot.own.dtype, self._pool)

    def _copied(self, source: torch.Tensor, dtype: torch.dtype) -> Part:
        copy = self.paged(dtype)
        try:
            write_first(self._executor, copy, source)
        except BaseException:
            self._executor.forget(copy)
            raise
        return copy

    def _hold(self, value: Part) -> None:
        self.value = value
        if value.block.occupant is None:
            value.block.occupant = _WantedNorms()
        assert isinstance(value.block.occupant, _WantedNorms)
        value.block.occupant.grads.append(self)

    def _let_go(self, value: Part) -> None:
        """The norm of a sum is not wanted any more."""
        if isinstance(value.block.occupant, _WantedNorms) and self in value.block.occupant.grads:
            value.block.occupant.grads.remove(self)

    def leaving(self, block: torch.Tensor) -> None:
        """The pool is about to evict the block of the sum: takes its norm."""
        if self._norm is None and self.value is not None:
            self._norm = self._norms.of(self.value.of(block), self._norm_type, part=self.slot.sharded)

    def norm(self, norm_type: float) -> torch.Tensor:
        """Returns the norm of the whole sum, as torch's clipping computes it for one tensor.

        Raises:
            UnsupportedError: another norm than the usual one, of a sum that has been used up.
        """
        if self._norm is None or self._norm_type != norm_type:
            if self.value is None:
                raise UnsupportedError(
                    f"the {norm_type:g}-norm of the gradient of {self.slot.name} was asked for after its update, which "
                    "was carried out during backward. Set update='blocking'."
                )
            self._norm_type = norm_type
            with self._executor.pin(self.value) as total:
                self._norm = self._norms.of(total, norm_type, part=self.slot.sharded)
        return self._norm

    def changed(self) -> None:
        """The sum was scaled, or written by the user."""
        self._norm = None

    def spend(self) -> GradSlot:
        """Hands over during backward: keeps the norm for clipping; no further gradient may arrive."""
        norm = self.norm(NORM_TYPE)
        other = self.hand_over()
        self._norm, self.spent = norm, True
        return other

    def hand_over(self) -> GradSlot:
        """Moves the sum to a new slot for an update; the next gradient starts a new sum."""
        other = GradSlot(self.slot, self._executor, self._norms)
        other.value, self.value = self.value, None
        self._end_view()
        self._norm, self.used = None, True
        if other.value is not None:
            self._let_go(other.value)
        return other

    def go_on_with(self, other: GradSlot) -> None:
        """Moves the sum of another slot of the same parameter here."""
        self.used = other.used
        value, other.value = other.value, None
        if value is not None:
            self._hold(value)

    def forget(self) -> None:
        """Drops as `drop` does, also a gradient whose hook did not run because backward was interrupted."""
        with bare():
            self.slot.param.grad = None
        self.used = False
        self.drop()

    def zero(self) -> None:
        """Replaces a gradient that torch would have by zeros (`zero_grad(set_to_none=False)`)."""
        with bare():
            arrived = self.slot.param.grad is not None
        if self.used or self.value is not None or arrived:
            self.forget()
            value = self.paged()
            self._hold(value)
            if value.block.place is not Place.BLANK:
                # Otherwise zeros take no memory until something is added to them.
                self._executor.fault(value, write=True).zero_()
                self._norm = None

    # ---- what `p.grad` shows ------------------------------------------------------------------------------------

    def view(self) -> AwayGradient | None:
        """Returns `p.grad`: the same object as long as the sum exists and user code keeps the object."""
        if self.value is None:
            return None
        known = None if self._view is None else self._view()
        if known is None:
            value = self.slot.value
            stand_in = placeholder(value.shape, value.dtype, self._pool.compute.device)
            known = AwayGradient.of(self, self.slot.name, stand_in)
            self._view = weakref.ref(known)
        return known

    def _end_view(self) -> None:
        if self._view is not None:
            known, self._view = self._view(), None
            if known is not None:
                known.source = None

    @contextmanager
    def used_by(self) -> Iterator[torch.Tensor]:
        """The sum, in the parameter's dtype; in-place changes to it are kept."""
        assert self.value is not None
        narrow, stats = self.slot.value.dtype, self._pool.stats
        with (
            self._executor.own_work(),
            self._pool.calls.during(Call.ACCESS, self._pool),
            self._executor.pin(self.value, write=True) as total,
        ):
            shown = total.detach() if total.dtype == narrow else total.to(narrow)
            version = shown._version
            with self._whole(shown) if self.slot.sharded else nullcontext(shown) as whole:
                used = time.perf_counter() - stats.elsewhere_s
                yield whole
                # Not ours, but for what it has called of ours, which has been counted.
                stats.elsewhere_s = time.perf_counter() - used
            if total.dtype != narrow and shown._version != version:
                _take_over(total, shown)
            self.changed()

    @contextmanager
    def _whole(self, own: torch.Tensor) -> Iterator[torch.Tensor]:
        """All of a gradient of which this rank owns `own`; what is changed in place is changed on all ranks alike."""
        slot, gathers = self.slot, self._executor.gathers
        cut = slot.group.pieces[slot.member].cut
        assert gathers is not None
        with self._pool.admission.charged(cut.padded * own.dtype.itemsize, Tag.STAGING, slot.name) as keep:
            flat = own.new_empty(cut.padded)
            keep(flat)
            flat[cut.start : cut.stop].copy_(own)
            gathers.gather(f"looks at the gradient of {slot.name}", flat, cut)
            whole = flat[: cut.numel].view(slot.value.shape)
            version = whole._version
            yield whole
            if whole._version != version:
                own.copy_(flat[cut.start : cut.stop])

    def replace(self, gradient: torch.Tensor) -> None:
        """Takes other values (`p.grad.data = gradient`)."""
        with self.used_by() as shown:
            shown.copy_(gradient)

    def drop(self) -> None:
        """Forgets the sum."""
        self._norm, self.spent = None, False
        if self.value is not None:
            self._end_view()
            value, self.value = self.value, None
            self._let_go(value)
            self._executor.forget(value)


def write_first(executor: Executor, value: Part, source: torch.Tensor) -> None:
    """Writes the first values of a part of a block."""
    if value.block.place is Place.BLANK and len(value.used) == 1:
        # The rest of the block belongs to nobody yet. What others have of a blank block are zeros (`GradSlot.zero`).
        value.of(executor.make(value.block)).copy_(source)
    else:
        executor.fault(value, write=True).copy_(source)


def _take_over(total: torch.Tensor, shown: torch.Tensor) -> None:
    """Writes `shown` back to a wider sum, except for elements that are still the rounded ones of the sum."""
    if shown.dtype == total.dtype or shown.shape != total.shape:
        total.copy_(shown)
        return
    # Compared by bits: NaN is not equal to itself.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[shown.element_size()]
    changed = total.to(shown.dtype).view(bits) != shown.contiguous().view(bits)
    total.copy_(torch.where(changed, shown.to(total.dtype), total))
