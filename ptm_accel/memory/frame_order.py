"""The order in which pages leave host frames: the page whose next use is farthest leaves first (Belady).

A training step uses pages in the same order as the step before it. So the next use of a page is where the step before
used it next. Until a whole step has been seen under pressure, the least recently used page leaves first; that is the
worst order for what each step comes by once, such as optimizer state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from ptm_accel.memory.frame_pages import FrameHandle, Page

_MOST_USES = 1_000_000
"""Uses after which what was seen so far counts as a step: a step of 1 TB has 100,000 of pages of 32 MiB."""

Key = tuple[str, int]
"""A page of a handle, by the name of the handle and its place in it. Gradients get a new handle in each step."""


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
        self._seen: dict[Key, list[int]] = {}
        self._known: dict[Key, list[int]] = {}
        self._now = self._begin = self._length = self._number = 0
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
            self._push(page)

    def remove(self, page: Page) -> None:
        """The page has a frame no longer."""
        del self._pages[page]

    def use(self, page: Page) -> None:
        """The page, which has a frame, is loaded from, stored to or changed in place."""
        self._pages.move_to_end(page)
        if not self.learns:
            return
        if self._now - self._begin >= _MOST_USES:
            # No step has an end, as in evaluation: what is noted must not grow with time.
            self.end_step()
        places = self._seen.setdefault(page.key, [])
        places.append(self._now - self._begin)
        self._now += 1
        if self._known:
            page.due = self._due(page.key, len(places))
            self._push(page)

    def end_step(self) -> None:
        """The uses since the last call are those of a step, which the next one repeats."""
        if not self.learns:
            return
        self._known, self._seen = self._seen, {}
        self._begin, self._length = self._now, self._now - self._begin
        for page in self._pages:
            page.due = self._due(page.key, 0)
        self._farthest = [(-page.due, number, page) for number, page in enumerate(self._pages)]
        self._number = len(self._farthest)
        heapify(self._farthest)

    def _due(self, key: Key, count: int) -> int:
        """Returns the number of a page's next use, after so many in this step."""
        places = self._known.get(key)
        if places is None:
            # Not of the step before: as far away as can be.
            return self._begin + 2 * self._length
        return self._begin + (places[count] if count < len(places) else self._length + places[0])

    def _push(self, page: Page) -> None:
        self._number += 1
        heappush(self._farthest, (-page.due, self._number, page))

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
        finally:
            # A page that leaves is no longer among `_pages` when its entry is met again.
            for entry in met.values():
                heappush(self._farthest, entry)
