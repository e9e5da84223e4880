"""Hard budgets: a charge is a value, and holding it is the only way to use a tier's bytes.

Memory that is free but still resident (buffers kept for reuse) is not charged, yet it takes real bytes: its holder
registers a reclaimer, which `Budget.reserve` calls so that charged + kept never exceeds the capacity.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from ptm_accel.errors import BudgetError, DeviceBudgetError
from ptm_accel.units import format_bytes


class Tier(enum.Enum):
    """Place where bytes can be. On a CPU-only machine the host tier is where compute happens."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Tag(enum.Enum):
    """Use of a charged byte. Every charge has one."""

    PARAM = "param"
    CAST = "cast"
    GRAD = "grad"
    MASTER = "master"
    STATE = "state"
    BUFFER = "buffer"
    STAGING = "staging"
    UPDATES = "updates"


_SETTING = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.DISK: "disk"}


class Reservation:
    """Bytes charged to a tier. Ends with `release`; a second release is an error of ours."""

    __slots__ = ("_budget", "name", "nbytes", "tag")

    def __init__(self, budget: Budget, nbytes: int, tag: Tag, name: str) -> None:
        self._budget: Budget | None = budget
        self.nbytes = nbytes
        self.tag = tag
        self.name = name

    @property
    def live(self) -> bool:
        """Whether the charge is still held."""
        return self._budget is not None

    def release(self) -> None:
        """Gives the bytes back."""
        budget, self._budget = self._budget, None
        assert budget is not None, f"reservation {self.name!r} released twice"
        budget._give_back(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.release()


class Budget:
    """The capacity of one tier, in bytes, and what of it is charged.

    Args:
        tier: the tier this budget limits.
        capacity_bytes: the limit. `used_bytes` never exceeds it.
    """

    def __init__(self, tier: Tier, capacity_bytes: int) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._by_tag: Counter[Tag] = Counter()
        self._lock = threading.RLock()
        self._kept_bytes: Callable[[], int] = lambda: 0
        self._reclaim: Callable[[int], int] = lambda nbytes: 0

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be charged."""
        return self.capacity_bytes - self.used_bytes

    def used_by_tag(self) -> dict[Tag, int]:
        """Charged bytes by tag, tags without a charge left out."""
        with self._lock:
            return {tag: n for tag, n in self._by_tag.items() if n}

    def set_reclaimer(self, kept_bytes: Callable[[], int], reclaim: Callable[[int], int]) -> None:
        """Registers the holder of free but resident memory; `reclaim` frees up to so many, and returns how many."""
        self._kept_bytes, self._reclaim = kept_bytes, reclaim

    def reserve(self, nbytes: int, tag: Tag, name: str, *, allocates: bool = False) -> Reservation:
        """Charges `nbytes`, or raises.

        Args:
            nbytes: how many.
            tag: their role.
            name: of the tensor, for messages.
            allocates: the holder of kept memory provides the bytes, and frees what it does not use for them.

        Raises:
            BudgetError: the bytes do not fit (`DeviceBudgetError` on the device tier).
        """
        with self._lock:
            if nbytes > self.free_bytes:
                raise self.refusal(nbytes, name)
            self.used_bytes += nbytes
            self._by_tag[tag] += nbytes
            if not allocates and not self.make_real_room():
                self.used_bytes -= nbytes
                self._by_tag[tag] -= nbytes
                raise self.refusal(nbytes, name)
            if self.used_bytes > self.peak_bytes:
                self.peak_bytes = self.used_bytes
            return Reservation(self, nbytes, tag, name)

    def shift(self, givers: Iterable[Reservation], nbytes: int, tag: Tag, name: str) -> Reservation:
        """Charges `nbytes`, and takes from other charges, in their order, what is not free of that.

        The caller sees to it that the memory is used only once that of the givers is free.
        """
        with self._lock:
            for giver in givers:
                part = min(max(nbytes - self.free_bytes, 0), giver.nbytes)
                giver.nbytes -= part
                self.used_bytes -= part
                self._by_tag[giver.tag] -= part
            return self.reserve(nbytes, tag, name, allocates=True)

    def check_integrity(self) -> None:
        """Checks free + used = capacity, and that the tags add up to what is used."""
        with self._lock:
            tagged = sum(self._by_tag.values())
            kept = self._kept_bytes()
            if tagged != self.used_bytes or not 0 <= self.used_bytes + kept <= self.capacity_bytes:
                raise AssertionError(
                    f"{self.tier.value} budget: used {self.used_bytes}, by tag {dict(self._by_tag)} = {tagged}, "
                    f"kept {kept}, capacity {self.capacity_bytes}"
                )

    def make_real_room(self) -> bool:
        """Has kept memory freed until charged + kept is within the capacity; False if it cannot be."""
        excess = self.used_bytes + self._kept_bytes() - self.capacity_bytes
        return excess <= 0 or self._reclaim(excess) >= excess

    def _give_back(self, reservation: Reservation) -> None:
        with self._lock:
            self.used_bytes -= reservation.nbytes
            self._by_tag[reservation.tag] -= reservation.nbytes
            assert self._by_tag[reservation.tag] >= 0, f"negative charge for {reservation.tag}"

    def refusal(self, nbytes: int, name: str) -> BudgetError:
        """Returns the error that says why `nbytes` cannot be charged."""
        used = ", ".join(f"{tag.value} {format_bytes(n)}" for tag, n in self.used_by_tag().items()) or "nothing"
        text = (
            f"{self.tier.value} budget: cannot place {format_bytes(nbytes)} for {name}: "
            f"{format_bytes(self.used_bytes)} of {format_bytes(self.capacity_bytes)} are in use ({used}) "
            f"and none of it can be moved away now; set {_SETTING[self.tier]} higher"
        )
        if self.tier is Tier.DEVICE:
            return DeviceBudgetError(f"ptm_accel: the device is out of memory. {text}, or use a smaller batch.")
        return BudgetError(f"{text}.")
