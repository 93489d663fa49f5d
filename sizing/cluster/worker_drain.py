"""Drain of a worker in virtual time, as `Worker.drain` in `worker/runtime.py`."""

from collections.abc import Callable

from engine.messages.to_engine import EndLoans
from sizing.cluster.clock import ScheduledEvent, VirtualClock
from sizing.cluster.front_processes import FrontProcesses
from sizing.cluster.worker import SimWorker

DRAIN_S = 30.0
"""Default drain time of a worker, in seconds."""
READABLE_S, RETURN_S = 10.0, 1.0
"""Constants of `worker/runtime.py`."""
LOOK_S = 0.1
LAST = 1 << 40
"""Rank behind all events of a moment, when no other event can follow."""


class WorkerDrain:
    """Drain: waits for work in flight, hands over the rest, stays readable for a while, and leaves."""

    def __init__(
        self,
        worker: SimWorker,
        fronts: FrontProcesses,
        clock: VirtualClock,
        drain_s: float,
        on_left: Callable[[SimWorker], object],
    ) -> None:
        self._worker, self._fronts, self._clock, self._on_left = worker, fronts, clock, on_left
        self._give_up_at = clock.now + drain_s
        self._readable_s = min(drain_s, READABLE_S)
        self._quiet_at = 0.0
        self._next: ScheduledEvent = clock.late(clock.now, LAST, self._finish)

    def cancel(self) -> None:
        """Cancel it, because the worker died."""
        self._next.cancel()

    def _finish(self) -> None:
        """Wait for work in flight."""
        if not self._busy:
            self._on_left(self._worker)
        elif self._clock.now >= self._give_up_at:
            self._fronts.hand_over(self._worker)
            self._give_up_at = self._clock.now + self._readable_s
            self._quiet_at = self._clock.now + RETURN_S
            self._stay_readable()
        else:
            self._again(self._finish)

    def _stay_readable(self) -> None:
        if self._busy:
            self._quiet_at = self._clock.now + RETURN_S
        if self._clock.now >= min(self._give_up_at, self._quiet_at):
            self._worker.send(EndLoans())
            self._on_left(self._worker)
        else:
            self._again(self._stay_readable)

    def _again(self, action: Callable[[], object]) -> None:
        self._next = self._clock.late(self._clock.now + LOOK_S, LAST, action)

    @property
    def _busy(self) -> bool:
        return self._fronts.num_requests(self._worker) + self._worker.num_lent > 0
