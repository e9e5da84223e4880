"""Timeline of a device, whose kernels run later than they are called.

The clock of the thread tells when a kernel was launched, not how long it took. So events are queued between kernels,
for which the device notes the time. A `Timeline` is a row of such events, with what the device was doing between two of
them. They are read later, as far as the device has come by then; no call waits for it.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

_LOOK_AFTER = 256
"""Most marks that wait to be looked at."""

_REBASE_AFTER_S = 1.0
"""Events tell differences in single precision: of a second they are good to a tenth of a microsecond."""


class TimedEvent(Protocol):
    """An event that was queued, as `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool:
        """Returns whether the device has got there; never blocks."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another; the device has got to both."""
        ...


@runtime_checkable
class QueuedCompute(Protocol):
    """A compute tier whose kernels run later than they are called."""

    def record(self) -> TimedEvent:
        """Queues an event after the compute that the calling thread has queued so far."""
        ...


class EventScale:
    """Gives the seconds of events on one scale, whose beginning is the first that it is asked for."""

    def __init__(self) -> None:
        self._base: TimedEvent | None = None
        self._base_s = 0.0

    def seconds(self, event: TimedEvent) -> float:
        """Returns when the device got to an event, which it has got to."""
        if self._base is None:
            self._base = event
        passed = self._base.elapsed_time(event) / 1e3
        at = self._base_s + passed
        if passed > _REBASE_AFTER_S:
            self._base, self._base_s = event, at
        return at


class Span(enum.Enum):
    """Purpose of the compute of a device."""

    PASS = "pass"
    """A forward, or the backward that follows it."""
    BESIDE = "beside"
    """An update between two operations of a pass."""
    UPDATE = "update"
    """An update after a pass."""
    WAIT = "wait"
    """A wait for bytes, or for room for them."""
    OTHER = "other"
    """Anything else."""


class Moment(NamedTuple):
    """A point in time; differences of two mean something.

    Attributes:
        total_s: on a clock that always runs.
        compute_s: on one that runs in passes only.
        own_s: of that, what was the work of `ptm_accel` on the thread; 0 where the clock is a device's.
    """

    total_s: float
    compute_s: float
    own_s: float = 0.0


@dataclass(slots=True, eq=False)
class Mark:
    """A place in what is computed; `moment` is None until it is known."""

    moment: Moment | None = None


class Timeline:
    """A row of marks in the compute of one device, which `record` queues events in. Thread-safe."""

    def __init__(self, record: Callable[[], TimedEvent]) -> None:
        self._record = record
        self._scale = EventScale()
        self._span = Span.OTHER
        # Marks that the device may not have got to, each with its event and what comes before it.
        self._ahead: deque[tuple[Mark, TimedEvent, Span]] = deque()
        self._known_s: float | None = None
        self._spent_s = dict.fromkeys(Span, 0.0)
        self._lock = threading.RLock()

    @property
    def span(self) -> Span:
        """Purpose of what is queued now."""
        return self._span

    def mark(self) -> Mark:
        """Sets a mark behind what is queued so far; the purpose stays."""
        return self.switch(self._span)

    def switch(self, span: Span) -> Mark:
        """Sets a mark behind what is queued so far; what is queued from here on is for `span`."""
        with self._lock:
            mark = Mark()
            self._ahead.append((mark, self._record(), self._span))
            self._span = span
            if len(self._ahead) >= _LOOK_AFTER:
                self._look()
        return mark

    def leave(self) -> None:
        """Turns to `Span.OTHER` from here on, without a mark."""
        self._span = Span.OTHER

    @contextmanager
    def during(self, span: Span) -> Iterator[None]:
        """Marks what is queued as for `span` while it lasts."""
        before = self._span
        if before is Span.OTHER and span is Span.WAIT:
            yield
            return
        self.switch(span)
        try:
            yield
        finally:
            self.switch(before)

    def look(self) -> None:
        """Makes known when the device got to the marks that it has got to; never waits."""
        with self._lock:
            self._look()

    def spent_s(self, span: Span) -> float:
        """Seconds that are known to have been spent on something so far."""
        return self._spent_s[span]

    def _look(self) -> None:
        while self._ahead and self._ahead[0][1].query():
            mark, event, before = self._ahead.popleft()
            at = self._scale.seconds(event)
            # Marks on streams of the user's own need not be in order.
            self._spent_s[before] += max(0.0, at - (at if self._known_s is None else self._known_s))
            self._known_s = at if self._known_s is None else max(at, self._known_s)
            mark.moment = Moment(at, self._spent_s[Span.PASS])


def during(timeline: Timeline | None, span: Span) -> AbstractContextManager[None]:
    """`Timeline.during` where there is one: compute that is carried out as it is called needs none."""
    return nullcontext() if timeline is None else timeline.during(span)
