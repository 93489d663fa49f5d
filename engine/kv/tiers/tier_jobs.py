"""Jobs of the tiers, and the thread that performs them beside the engine's loop.

Reads come before writes: requests wait for reads only. Within each kind jobs run in order, so a slot that is erased and
taken again is erased before it is written.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.kv.tiers.disk import DiskTier
from engine.kv.tiers.disk_format import SlotHeader
from engine.kv.tiers.slots import NamedBlock
from kvtransfer.errors import TransferError

TierName = Literal["host", "disk"]
CLOSED = "the tiers were closed"
JOIN_GRACE_S = 2.0
"""Seconds for the running job when the time to flush is over."""


@dataclass(frozen=True, slots=True)
class Held:
    """A block pinned in a slot: neither moves until it is unpinned."""

    block: NamedBlock
    tier: TierName
    slot: int


@dataclass(slots=True)
class ReadJob:
    """Pass the bytes of `held` to `write`, one block after the other."""

    held: tuple[Held, ...]
    write: Callable[[int, NDArray[np.uint8]], None]
    future: "Future[None]" = field(default_factory=Future)
    num_done: dict[TierName, int] = field(default_factory=lambda: {"host": 0, "disk": 0})
    seconds: dict[TierName, float] = field(default_factory=lambda: {"host": 0.0, "disk": 0.0})
    unreadable: Held | None = None


@dataclass(slots=True)
class WriteJob:
    """Copy a host slot into a disk slot. The job has one reference on each."""

    header: SlotHeader
    host_slot: int
    disk_slot: int
    error: OSError | None = None


@dataclass(slots=True)
class EraseJob:
    """Erase a disk slot, so that no restart finds its block."""

    disk_slot: int
    error: OSError | None = None


Job = ReadJob | WriteJob | EraseJob


class TierThread:
    """Thread that performs jobs, one at a time.

    All methods but `step` belong to the loop's thread.
    """

    def __init__(self, arena: NDArray[np.uint8], disk: DiskTier | None, threaded: bool = True) -> None:
        """Start the thread.

        Without `threaded`, jobs wait for `step`, so a test decides when they run.
        """
        self._arena = arena
        self._disk = disk
        self._scratch = np.empty(arena.shape[1], np.uint8)  # buffer for reads from disk
        self._reads: deque[ReadJob] = deque()
        self._writes: deque[WriteJob | EraseJob] = deque()
        self._done: deque[Job] = deque()
        self._wake = threading.Condition()
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job.

        After `close` a read fails, and other jobs are dropped.
        """
        with self._wake:
            closed = self._stop_at is not None
            if not closed:
                if isinstance(job, ReadJob):
                    self._reads.append(job)
                else:
                    self._writes.append(job)
                self._wake.notify()
        if closed and isinstance(job, ReadJob):
            job.future.set_exception(TransferError(CLOSED))

    def take_done(self) -> list[Job]:
        """Return the jobs finished since the last call, in order; nothing touches their slots any more."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def step(self) -> bool:
        """Perform the next job; return False when there is none."""
        with self._wake:
            job = self._next()
        if job is not None:
            self._perform(job)
        return job is not None

    def close(self, flush_s: float) -> bool:
        """Cancel reads, write queued blocks for at most `flush_s`, and stop.

        Returns False when a job hangs in the system.
        """
        with self._wake:
            self._stop_at = time.monotonic() + flush_s
            while self._reads:
                job = self._reads.popleft()
                job.future.cancel()
                self._done.append(job)
            self._wake.notify()
        if self._thread is None:
            self._run()
            return True
        self._thread.join(flush_s + JOIN_GRACE_S)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while (job := self._next()) is None and self._stop_at is None:
                    self._wake.wait()
            if job is None:
                return
            self._perform(job)

    def _next(self) -> Job | None:
        if self._reads:
            return self._reads.popleft()
        out_of_time = self._stop_at is not None and time.monotonic() >= self._stop_at
        return self._writes.popleft() if self._writes and not out_of_time else None

    def _perform(self, job: Job) -> None:
        if isinstance(job, ReadJob):
            self._read(job)
            return
        assert self._disk is not None
        try:
            if isinstance(job, WriteJob):
                self._disk.write(job.disk_slot, job.header, self._arena[job.host_slot])
            else:
                self._disk.erase(job.disk_slot)
        except OSError as error:
            job.error = error
        self._done.append(job)

    def _read(self, job: ReadJob) -> None:
        failure: Exception | None = None
        cancelled = not job.future.set_running_or_notify_cancel()
        if not cancelled:
            try:
                for index, held in enumerate(job.held):
                    self._read_one(job, index, held)
            except Exception as error:  # `write` belongs to the caller, and so do its exceptions
                failure = error
        # First, so that any thread that learns of the end finds the slots given back.
        self._done.append(job)
        if failure is not None:
            job.future.set_exception(failure)
        elif not cancelled:
            job.future.set_result(None)

    def _read_one(self, job: ReadJob, index: int, held: Held) -> None:
        started = time.perf_counter()
        if held.tier == "host":
            job.write(index, self._arena[held.slot])
        else:
            assert self._disk is not None
            try:
                self._disk.read(held.slot, self._scratch)
            except TransferError:
                job.unreadable = held
                raise
            job.write(index, self._scratch)
        job.num_done[held.tier] += 1
        job.seconds[held.tier] += time.perf_counter() - started
