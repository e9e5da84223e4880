"""Which parts of pages are moved by one copy."""

from __future__ import annotations

from collections.abc import Iterator

from ptm_accel.memory.frame_pages import FrameHandle, FrameRun, Page, PageState


class Runs:
    """Parts of pages that follow one another, to be moved by one copy where their frames do so as well.

    A copy of a page costs the host nearly as long as a fast link takes for it.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Page, int, int, int]] = []

    def add(self, page: Page, start: int, stop: int, at: int) -> None:
        """Bytes [start, stop) of a page in a frame, which are those from `at` on of what is moved."""
        self._parts.append((page, start, stop, at))

    def taken(self) -> list[FrameRun]:
        """Each run, which is a part no more."""
        parts, self._parts = self._parts, []
        runs: list[FrameRun] = []
        while parts:
            count = 1
            while count < len(parts) and _goes_on(parts[count - 1][0], parts[count][0]):
                count += 1
            run, parts = parts[:count], parts[count:]
            (first, start, _, at), (_, begin, stop, after) = run[0], run[-1]
            nbytes = after + stop - begin - at
            assert first.frame is not None
            runs.append(FrameRun([page for page, *_ in run], first.frame.view(start, start + nbytes), at))
        return runs


def _goes_on(page: Page, following: Page) -> bool:
    """Whether the next page lies behind one in memory, and there is nothing that only one of them has to wait for."""
    if _is_being_read(page) or _is_being_read(following):
        return False
    return page.frame is not None and following.frame is not None and page.frame.is_followed_by(following.frame)


def _is_being_read(page: Page) -> bool:
    """Whether a page is being read from the disk, by itself, and is copied on as soon as it is there."""
    return page.state is PageState.CLEAN and bool(page.writes)


def whole_runs(handle: FrameHandle) -> list[FrameRun] | None:
    """How all pages of a handle lie in memory; None where one of them is on disk, or on its way from there.

    It is the same from one step to the next as long as no page has moved, so it is kept.
    """
    for page in handle.pages:
        if page.state is PageState.DISK or _is_being_read(page):
            return None
    if handle.runs is None:
        runs = Runs()
        for part in handle.spans(0, handle.nbytes):
            runs.add(*part)
        handle.runs = runs.taken()
    return handle.runs


def kept_runs(handle: FrameHandle) -> Iterator[FrameRun]:
    """The runs that `whole_runs` has kept, one after the other, as long as no page moves."""
    runs = handle.runs
    assert runs is not None, handle.name
    for run in runs:
        # A handler of signals may use pages in between. What would be copied then is somebody else's.
        assert handle.runs is runs, f"{handle.name}: a page has moved while all of them were copied"
        yield run


def check_runs(handle: FrameHandle) -> None:
    """Raises `AssertionError` unless what is kept of where pages lie is where they lie."""
    for run in handle.runs or ():
        address = run.octets.data_ptr()
        for page in run.pages:
            if page.frame is None or page.frame.view(0, page.nbytes).data_ptr() != address:
                raise AssertionError(f"{handle.name}: a page of {page.nbytes} B does not lie where it is copied from")
            address += page.nbytes
