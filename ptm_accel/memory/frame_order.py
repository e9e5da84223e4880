"""The order in which pages leave host frames: the page whose next use is farthest leaves first (Belady).

A training step uses pages in the same order as the step before it. So the next use of a page is where the step before
used it next. Until a whole step has been seen in which pages had to leave, the least recently used page leaves first:
the worst order for pages that each step uses once, such as optimizer state.

Where several models train on the same tiers, a step lasts from one optimizer step of the first of them to its next.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from ptm_accel.memory.frame_pages import FrameHandle, Page

Key = tuple[str, int]
"""A page of a handle, by the name of the handle and its place in it. Gradients get a new handle in each step."""

_MOST_USES = 256
"""Most uses that are noted in a step, for each page on average. Runs without steps, such as inference, have no end."""

_MOST_OTHERS = 8
"""After so many steps of other models in a row, another model leads: the first one no longer trains."""


class FrameOrder:
    """Pages that have a frame, in the order in which they leave.

    Attributes:
        learns: whether uses are noted; set once a page had to leave.
    """

    def __init__(self) -> None:
        self.learns = False
        # Least recently used first.
        self._pages: OrderedDict[Page, None] = OrderedDict()
        # Uses are numbered. Those of this step and of the one before, by page, each counted from its step's first use.
        self._seen: dict[Key, array[int]] = {}
        self._known: dict[Key, array[int]] = {}
        self._now = self._begin = self._length = self._number = 0
        # The model that ends steps, and how many steps of others there were since its last one.
        self._leader: weakref.ref[object] | None = None
        self._others = 0
        # Pages by next use, farthest first: (-next use, number, page). Only where the next use is `Page.due`, it is up
        # to date.
        self._farthest: list[tuple[int, int, Page]] = []

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        """Iterates over the pages, least recently used first."""
        return iter(self._pages)

    def __reversed__(self) -> Iterator[Page]:
        return reversed(self._pages)

    def add(self, page: Page) -> None:
        """The page has got a frame."""
        self._pages[page] = None
        if self._known:
            page.due = self._due(page.key, len(self._seen.get(page.key, ())))
            self._push(page)

    def remove(self, page: Page) -> None:
        """The page has a frame no longer."""
        del self._pages[page]

    def use(self, page: Page) -> None:
        """The page, which has a frame, is loaded from, stored to or changed in place."""
        self._pages.move_to_end(page)
        if not self.learns or self._is_too_long():
            return
        places = self._seen.setdefault(page.key, array("Q"))
        places.append(self._now - self._begin)
        self._now += 1
        if self._known:
            page.due = self._due(page.key, len(places))
            self._push(page)

    def end_step(self, model: object) -> None:
        """The uses since the last call are those of a step, which the next one repeats.

        Args:
            model: whose step it is; nothing happens unless it leads.
        """
        if not self.learns or not self._is_led_by(model):
            return
        # Too long for one step: there were evaluations in between, say.
        if not self._is_too_long():
            self._known, self._length = self._seen, self._now - self._begin
        self._seen, self._begin = {}, self._now
        for page in self._pages:
            page.due = self._due(page.key, 0)
        self._sort()

    def _is_led_by(self, model: object) -> bool:
        leader = self._leader() if self._leader is not None else None
        if leader is None or self._others == _MOST_OTHERS:
            self._leader, leader = weakref.ref(model), model
        self._others = 0 if leader is model else self._others + 1
        return leader is model

    def _is_too_long(self) -> bool:
        """Returns whether more has been used than is noted of a step."""
        return self._now - self._begin >= _MOST_USES * (1 + len(self._seen))

    def _due(self, key: Key, count: int) -> int:
        """Returns the number of a page's next use, after so many in this step."""
        places = self._known.get(key)
        if places is None:
            # Not of the step before: as far away as can be.
            return self._begin + 2 * self._length
        return self._begin + (places[count] if count < len(places) else self._length + places[0])

    def _push(self, page: Page) -> None:
        if len(self._farthest) > 4 * len(self._pages):
            # Most entries are out of date. This page gets a new one too.
            self._sort()
            return
        self._number += 1
        heappush(self._farthest, (-page.due, self._number, page))

    def _sort(self) -> None:
        self._farthest = [(-page.due, number, page) for number, page in enumerate(self._pages)]
        self._number = len(self._farthest)
        heapify(self._farthest)

    def leaving(self, keep: FrameHandle | None) -> Iterator[Page]:
        """Iterates over the pages that may leave, in order; none of a handle.

        Args:
            keep: the handle.
        """
        if not self._known:
            yield from (page for page in self._pages if page.handle is not keep and page.may_leave())
            return
        met: dict[Page, tuple[int, int, Page]] = {}
        try:
            while self._farthest:
                due, _, page = entry = heappop(self._farthest)
                if page not in self._pages or page.due != -due or page in met:
                    continue
                met[page] = entry
                if page.handle is not keep and page.may_leave():
                    yield page
            # Ctrl-C, where it breaks off a change here, may have left some out.
            yield from [p for p in self._pages if p not in met and p.handle is not keep and p.may_leave()]
        finally:
            # A page that leaves is no longer among `_pages` when its entry is met again.
            for entry in met.values():
                heappush(self._farthest, entry)
