"""Thread of loans: sockets to other engines, fingerprints, and whatever must go on while vLLM is idle or computes."""

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from tandem_connector.lender import fingerprint
from tandem_connector.scheduler_half import SchedulerHalf

log = logging.getLogger(__name__)

IDLE_TURN_S = 0.05
"""Longest pause between two turns, in seconds."""


class SocketWatcher:
    """Watcher of sockets; its wait and `wake` may be called on any thread, all else with the lock held."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakes, select.EPOLLIN)
        self._calls: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, on_readable: Callable[[], object]) -> None:
        self._calls[descriptor] = on_readable
        self._epoll.register(descriptor, select.EPOLLIN)

    def watch_writing(self, descriptor: int, is_wanted: bool) -> None:
        self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0))

    def unwatch(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def wake(self) -> None:
        os.eventfd_write(self._wakes, 1)

    def wait(self, seconds: float) -> list[int]:
        """Return the descriptors that are ready within so many seconds."""
        ready = [descriptor for descriptor, _ in self._epoll.poll(seconds)]
        if self._wakes in ready:
            ready.remove(self._wakes)
            os.eventfd_read(self._wakes)
        return ready

    def call(self, ready: list[int]) -> None:
        """Call who watches these descriptors."""
        for descriptor in ready:
            if (call := self._calls.get(descriptor)) is not None:
                call()

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wakes)


class LoanThread:
    """The thread, from `start` to `close`."""

    def __init__(self, watcher: SocketWatcher, lock: "threading.RLock") -> None:
        self._watcher = watcher
        self._lock = lock
        self._is_over = False
        self.half: SchedulerHalf | None = None

    def start(self, half: SchedulerHalf) -> None:
        self.half = half
        self._thread = threading.Thread(target=self._run, name="tandem-loans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all loans and the thread."""
        self._is_over = True
        self._watcher.wake()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        assert self.half is not None
        reported_at = 0.0
        try:
            while not self._is_over:
                ready = self._watcher.wait(IDLE_TURN_S)
                with self._lock:
                    self._watcher.call(ready)
                    self.half.turn()
                self._announce(self.half)
                with self._lock:
                    if (now := time.monotonic()) - reported_at >= IDLE_TURN_S / 2:
                        reported_at = now
                        self.half.loans.report(is_alive=True)
                    self.half.loans.flush()
        except BaseException:
            log.exception("the thread of loans has failed: nothing is borrowed or lent any more")
            raise
        finally:
            with self._lock:
                self.half.stop()

    def _announce(self, half: SchedulerHalf) -> None:
        """Announce what vLLM's requests have filled; fingerprints are computed while vLLM goes on."""
        with self._lock:
            seen = half.loans.lender.take_seen()
        if not seen:
            return
        blocks, fingerprints = fingerprint(half.kv, seen, half.kv.cached.compute_fingerprints)
        with self._lock:
            half.loans.lender.announce(seen, blocks, fingerprints)
            half.loans.flush()
