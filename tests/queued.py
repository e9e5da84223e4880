"""Devices whose compute is queued, without a device: events that tests let happen."""

from __future__ import annotations

import time
from typing import Any

from tests.mock_device import MockDevice


class FakeEvent:
    """An event of a device; it has happened once it has a time."""

    def __init__(self, at_s: float | None = None) -> None:
        self.at_s = at_s

    def query(self) -> bool:
        return self.at_s is not None

    def elapsed_time(self, end_event: Any) -> float:
        assert self.at_s is not None
        assert end_event.at_s is not None
        # In single precision, as CUDA tells it, this would be rounded.
        return float((end_event.at_s - self.at_s) * 1e3)


class FakeQueue:
    """Keeps what is recorded, so that a test says when it happens."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []

    def record(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def happen(self, *times_s: float) -> None:
        """The first that have not happened yet happen at these times."""
        ahead = (event for event in self.events if event.at_s is None)
        for at_s, event in zip(times_s, ahead, strict=False):
            event.at_s = at_s


class LateEvent(FakeEvent):
    """One that has happened, of which that is known only when its device says so."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__(time.perf_counter())
        self._device = device

    def query(self) -> bool:
        return not self._device.silent


class LateDevice(MockDevice):
    """Compute is carried out as it is called, and when that was is known only while the device is not `silent`.

    Attributes:
        silent: see above.
        recorded: how many events were asked for.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.silent = False
        self.recorded = 0

    def record(self) -> FakeEvent:
        self.recorded += 1
        return LateEvent(self)
