"""What is moved between memory and scratch files: in the background where that can be, else by threads of our own.

A transfer is cut into pieces. What is aligned is moved in the background (`ptm_accel.memory.background`), which
tells nobody of its end: that is noted when somebody looks or waits. All else, and what was not moved whole there, is
left to threads, which try again and say what is wrong. Each file has a *lane* of them: a queue of pieces and a few
threads that take from it. A transfer has ended when none of its pieces is queued or moving any more, well or not; until
then it holds its tensor, afterwards it does not. Transfers that touch the same bytes of a slot, one of them writing,
run one after the other, in the order in which they were started.

Everything holds still during a fork (`ptm_accel.memory.fork_gate`). In the child there are no threads; whatever is
asked there raises.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ptm_accel.errors import DiskError
from ptm_accel.memory.channels import Channels
from ptm_accel.memory.disk_transfer import DiskTransfer, Failure, Piece
from ptm_accel.memory.fork_gate import FORK_GATE
from ptm_accel.memory.mapping import MappedRun, anonymous_run
from ptm_accel.memory.own_threads import OwnThread
from ptm_accel.memory.scratch import Direction, ScratchFile
from ptm_accel.units import format_bytes

_LOOK_AGAIN_S = 0.2
"""How often a waiting thread makes sure that somebody still works on what it waits for."""
_LOOK_EVERY_S = 20e-6
"""How often it is looked for what has ended in the background, however often that is asked for."""
_LOOK_ASIDE_S = 0.001
"""The same where a thread of ours moves something, and something is moved in the background as well."""


class _Lane:
    """A scratch file, the pieces queued for it, and the wake-up of the threads that take them."""

    def __init__(self, file: ScratchFile, lock: threading.RLock) -> None:
        self.file = file
        self.queue: deque[Piece] = deque()
        self.ready = threading.Condition(lock)


class Lanes:
    """All files of a tier with their threads.

    Args:
        files: the scratch files; closed by the last thread to leave.
        threads_per_file: how many pieces are moved at the same time for each file.
        block_bytes: the greatest piece.
        channels: what is moved in the background; None if nothing is. Closed with the files.

    Attributes:
        lock: guards all state of the lanes, and that of the tier that owns them.
        bytes_read: moved from the files, since the start.
        bytes_written: moved to the files, since the start.
        failed_stores: those that nobody may have been told of.
    """

    def __init__(
        self,
        files: Sequence[ScratchFile],
        threads_per_file: int,
        block_bytes: int,
        channels: Channels | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self.bytes_read = 0
        self.bytes_written = 0
        self.failed_stores: deque[DiskTransfer] = deque()
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._lanes = [_Lane(file, self.lock) for file in files]
        self._channels = channels
        self._running = 0
        self._moving = 0
        self._busy_s = 0.0
        self._busy_from: float | None = None
        self._holds = 0
        self._closing = False
        self._process = os.getpid()
        # All mapped before the first thread starts, since this can fail.
        work = [
            (lane, anonymous_run(block_bytes, "a bounce buffer of the disk tier") if lane.file.direct else None)
            for lane in self._lanes
            for _ in range(threads_per_file)
        ]
        self._threads: list[threading.Thread] = []
        self._present = len(work)
        FORK_GATE.holders.add(self)
        for index, args in enumerate(work):
            thread = OwnThread(self._work, args, f"ptm-disk-{index}", len(work))
            try:
                thread.start()
            except RuntimeError as error:
                self._present -= len(work) - index
                self.close()
                raise _unstarted(len(work), index, self._lanes[0].file.folder, error) from error
            self._threads.append(thread)

    @property
    def busy_s(self) -> float:
        """Seconds in which something was being moved, since the start."""
        with self.lock:
            self._look()
            return self._busy_s + (0.0 if self._busy_from is None else time.perf_counter() - self._busy_from)

    def submit(self, transfer: DiskTransfer) -> None:
        """Starts a transfer, behind those that it conflicts with.

        Raises:
            DiskError: the tier is closed, or belongs to another process; or a store of what is to be read has failed.
        """
        with self.lock:
            self.require_open(transfer.direction, transfer.slot.name)
            # Looked at here, where no store can end meanwhile: a load would be behind nothing, and read anything.
            reads = transfer.direction is Direction.READ
            if reads and (failure := transfer.slot.failure_in(transfer.begin, transfer.end)) is not None:
                raise failure.error()
            if transfer.slot.running:
                self._look()
            for other in transfer.slot.running:
                if transfer.conflicts(other):
                    other.followers.append(transfer)
                    transfer.blockers += 1
            transfer.slot.running.append(transfer)
            self._running += 1
            if not transfer.blockers:
                self._enqueue(transfer)

    def wait_until(self, ended: Callable[[], bool], what: str) -> None:
        """Blocks until `ended`, which changes only as transfers end.

        Raises:
            DiskError: nobody is left who could make it so.
        """
        time.perf_counter()
        with self.lock:
            self._look()
            while not ended():
                if not (self._is_staffed() and self._is_busy()):
                    raise self._unavailable(what)
                self._wait_a_moment()
                # Whoever was to wake a thread may have been interrupted.
                self._wake()

    def look(self) -> None:
        """Notes what has ended in the background; never blocks for long."""
        channels = self._channels
        if channels is None or time.perf_counter() < channels.looked_s + _LOOK_EVERY_S:
            return
        # What has ended is noted whole, or not at all.
        with self.lock:
            self._look()

    def require_open(self, what: Direction | str, name: str = "") -> None:
        """Raises if nothing can be started any more.

        Args:
            what: is to be started.
            name: of whose bytes.

        Raises:
            DiskError: the tier is closed, or belongs to another process.
        """
        if self._closing or os.getpid() != self._process:
            what = what.value if isinstance(what, Direction) else what
            raise self._unavailable(f"{what} of {name}" if name else what)

    def close(self) -> None:
        """Ends the threads after all that has been started, and closes the files. Idempotent."""
        if os.getpid() != self._process:
            self._close_files()
            return
        time.perf_counter()
        with self.lock:
            self._closing = True
            self._wake()
            # What ends in a thread may have something behind it that is moved in the background, and is looked at here.
            mine = threading.current_thread() in self._threads
            while self._is_under_way() or (not mine and self._is_staffed() and self._is_busy()):
                self._wait_a_moment()
        # The collector may close a forgotten tier from one of its own threads; the last to leave closes the files then.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()
            self._close_files()

    def hold_still(self) -> None:
        """Takes the lock once no thread is in a transfer; until `go_on` none begins one."""
        self.lock.acquire()
        self._holds += 1
        try:
            if self._channels is not None:
                # What has not begun is left to threads, which hold still.
                self._channels.cancel()
            while self._is_moving() and self._is_staffed():
                self._wait_a_moment()
        except BaseException:
            self.go_on()
            raise

    def go_on(self) -> None:
        """Ends `hold_still`, in the parent as in the child of a fork."""
        self._holds -= 1
        self._wake()
        self.lock.release()

    def _is_busy(self) -> bool:
        """Whether a thread has something to do, or will have as soon as it looks."""
        return self._is_moving() or any(lane.queue for lane in self._lanes)

    def _is_moving(self) -> bool:
        return self._moving > 0 or self._is_under_way()

    def _is_under_way(self) -> bool:
        """Whether something is moved in the background."""
        return self._channels is not None and self._channels.under_way

    def _is_staffed(self) -> bool:
        return os.getpid() == self._process and any(thread.is_alive() for thread in self._threads)

    def _enqueue(self, transfer: DiskTransfer) -> None:
        for piece in transfer.pieces:
            # A transfer whose store has failed is only counted down, by whoever takes it.
            channels = None if self._holds or transfer.failure is not None else self._channels
            if channels is None or not channels.start(piece):
                self._leave_to_thread(piece)
            elif self._busy_from is None:
                self._busy_from = time.perf_counter()

    def _leave_to_thread(self, piece: Piece) -> None:
        lane = self._lanes[piece.path]
        lane.queue.append(piece)
        lane.ready.notify()

    def _look(self) -> None:
        """Notes what has ended in the background."""
        channels = self._channels
        if channels is None or channels.idle:
            return
        ended = channels.ended()
        now_s = time.perf_counter()
        before_s, channels.looked_s = channels.looked_s, now_s
        # When they ended nobody has seen: not before the last look, and in about the time that so many bytes take.
        nbytes, moved = sum(piece.nbytes for piece, _ in ended), self.bytes_read + self.bytes_written
        ended_s = min(now_s, before_s + (nbytes * self._busy_s / moved if moved else 0.0))
        if ended:
            self._note_idle(ended_s)
        for piece, whole in ended:
            if whole:
                self._finish(piece, None)
            else:
                self._leave_to_thread(piece)

    def _wait_a_moment(self) -> None:
        """Waits until something has ended, and notes it; not for long. The lock is free meanwhile."""
        channels = self._channels
        first = [] if channels is None else channels.first()
        if channels is None or not first:
            self._changed.wait(_LOOK_AGAIN_S)
            return
        if self._moving or any(lane.queue for lane in self._lanes):
            # Nobody can wait for both.
            self._changed.wait(_LOOK_ASIDE_S)
        else:
            self.lock.release()
            try:
                channels.wait(first)
            finally:
                self.lock.acquire()
        self._look()

    def _wake(self) -> None:
        for lane in self._lanes:
            lane.ready.notify_all()

    def _work(self, lane: _Lane, bounce: MappedRun | None) -> None:
        while (piece := self._take(lane)) is not None:
            failure = None
            try:
                # A transfer that has failed already, or whose store has, is only counted down.
                if piece.transfer.failure is None:
                    lane.file.move(piece.transfer.direction, piece.address, piece.offset, piece.nbytes, bounce)
            except BaseException as error:  # a thread that died here would leave others waiting
                failure = _failure_of(lane.file, piece, error)
            with self.lock:
                self._moving -= 1
                self._note_idle(time.perf_counter())
                self._finish(piece, failure)
            del piece
        with self.lock:
            self._present -= 1
            last = self._present == 0
        if last:
            self._close_files()

    def _take(self, lane: _Lane) -> Piece | None:
        with self.lock:
            while self._holds or not lane.queue:
                if self._closing and not self._is_busy():
                    return None
                lane.ready.wait()
            if self._busy_from is None:
                self._busy_from = time.perf_counter()
            self._moving += 1
            return lane.queue.popleft()

    def _note_idle(self, since_s: float) -> None:
        """Takes note that nothing is moved any more, if that is so."""
        if self._busy_from is not None and not self._is_moving():
            self._busy_s += max(since_s - self._busy_from, 0.0)
            self._busy_from = None

    def _finish(self, piece: Piece, failure: Failure | None) -> None:
        transfer = piece.transfer
        with self.lock:
            if transfer.failure is None:
                transfer.failure = failure
            if transfer.unfinished > 1:
                transfer.unfinished -= 1
            else:
                self._end(transfer)
            if self._holds:
                self._changed.notify_all()
            if self._closing and not self._is_busy():
                self._wake()

    def _end(self, transfer: DiskTransfer) -> None:
        slot, failure = transfer.slot, transfer.failure
        writes = transfer.direction is Direction.WRITE
        if writes:
            transfer.note_end()
        transfer.let_go()
        slot.running.remove(transfer)
        self._running -= 1
        if failure is None:
            self.bytes_written += transfer.nbytes if writes else 0
            self.bytes_read += 0 if writes else transfer.nbytes
        elif writes:
            self.failed_stores.append(transfer)
        for follower in transfer.followers:
            follower.blockers -= 1
            if writes and follower.direction is Direction.READ and follower.failure is None:
                follower.failure = failure
            if not follower.blockers:
                self._enqueue(follower)
        transfer.followers.clear()
        # Last, since `done` looks without the lock.
        transfer.unfinished = 0
        self._changed.notify_all()

    def _close_files(self) -> None:
        if self._channels is not None:
            self._channels.close()
        for lane in self._lanes:
            lane.file.close()

    def _unavailable(self, what: str) -> DiskError:
        folder = str(self._lanes[0].file.folder)
        if os.getpid() != self._process:
            reason = f"the disk tier in {folder} belongs to process {self._process} and this is its fork {os.getpid()}"
            remedy = "use the model only in the process that trains it, or start workers with the spawn method"
        elif self._closing:
            reason = f"the disk tier in {folder} has been closed, with {self._running} transfers running"
            remedy = "keep the engine open for as long as its model is used"
        elif self._is_staffed():
            reason = f"nothing moves or is queued in the disk tier in {folder}, and {self._running} transfers are lost"
            remedy = "save the model if it is needed, and start the run again from the last checkpoint"
        else:
            reason = f"all {len(self._threads)} threads of the disk tier in {folder} have ended"
            remedy = "start the run again"
        return DiskError(errno.EIO, f"cannot finish {what}: {reason}; {remedy}.", folder)


def _unstarted(wanted: int, started: int, folder: Path, error: RuntimeError) -> DiskError:
    text = (
        f"the disk tier in {folder} needs {wanted} threads, and the system let it start {started}: {error}; "
        "raise the limit of processes and threads (ulimit -u, or pids.max of the container), or leave disk out."
    )
    return DiskError(errno.EAGAIN, text, str(folder))


def _failure_of(file: ScratchFile, piece: Piece, error: BaseException) -> Failure:
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
    text = (
        f"{piece.transfer.direction.value} of {piece.transfer.slot.name} failed: {format_bytes(piece.nbytes)} at "
        f"offset {piece.offset} of the scratch file in {file.folder}: {reason} (errno {number}), {file.free_text()}; "
        f"set disk.paths to a folder on a sound disk with enough room."
    )
    return Failure(number, text, str(file.folder), error)
