"""Circuit breaker for decode workers that fail their placements and for pairs whose loans fail.

Pure.

A failing worker looks idle, since nothing runs there, and would be chosen again and again. The fleet forgets a worker
that leaves; the breaker handles one that stays: it sends reports, but cannot be reached, or answers with errors only.

    closed ──failed──▶ open ──pause over──▶ half-open ──one placement──▶ open ──went well──▶ closed
                        ▲                                                  │
                        └──────────── failed: a pause twice as long ───────┘
"""

import logging
from dataclasses import dataclass

from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord

log = logging.getLogger(__name__)

FIRST_S, MOST_S = 0.25, 30.0
"""Shortest and longest pause, in seconds."""
SAID_AT = 2
"""Consecutive pauses after which the failure is logged: a worker that dies fails once before its leaving is known."""
TOLERATED_LOANS = 1
"""Failed loans in a row that are tolerated: one costs only a recompute."""

Subject = WorkerRecord | tuple[WorkerRecord, WorkerRecord]
"""Subject of a breaker: a decode worker, or a borrower and its lender."""


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    failed_at: float = 0.0
    open_until: float | None = None
    """End of the pause; None when placements are allowed."""
    trial: ActivePlacement | None = None
    """Trial placement whose outcome decides."""


class CircuitBreaker:
    """Circuit breakers of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._of: dict[Subject, _Breaker] = {}

    def placed(self, placed: ActivePlacement) -> None:
        """Process a placement: subjects that were half-open take no other one meanwhile."""
        for subject in _subjects(placed) if self._of else ():
            if (failing := self._of.get(subject)) is not None and failing.num_failures > _tolerated(subject):
                failing.trial = placed
                self._trip(subject)

    def ended(self, placed: ActivePlacement, placed_at: float, now: float) -> float | None:
        """Process the end of a placement, before the fleet does.

        Returns when to call `resume`, if that is new.
        """
        went = placed.started and not placed.failed
        again_at = self._judge(placed.decode, placed, placed_at, False if placed.failed else (went or None), now)
        if placed.lender is not None:
            lent_at = self._judge((placed.decode, placed.lender), placed, placed_at, placed.lent, now)
            again_at = lent_at if again_at is None else again_at
        return again_at

    def resume(self, now: float) -> None:
        """Allow one placement after a pause, and all after a trial that went well."""
        for subject, failing in list(self._of.items()) if self._of else ():
            if not self._there(subject):
                del self._of[subject]
                _mark(subject, False)
            elif failing.trial is not None and failing.trial.started and isinstance(subject, WorkerRecord):
                self._forget(subject)
            elif failing.open_until is not None and now >= failing.open_until:
                failing.open_until = None
                self._reset(subject)

    def _judge(
        self, subject: Subject, placed: ActivePlacement, placed_at: float, well: bool | None, now: float
    ) -> float | None:
        """Judge a subject by an outcome; `well` is None when nothing was observed."""
        failing = self._of.get(subject)
        if failing is None and well is not False:
            return None
        failing = failing or _Breaker(failed_at=placed_at)
        tried = failing.trial is placed
        if tried:
            failing.trial = None
        elif placed_at < failing.failed_at:
            return None  # the placement began before the last failure was observed
        if well:
            self._forget(subject)
        elif well is None:
            if tried:
                self._reset(subject)
        elif self._there(subject):
            self._of[subject] = failing
            failing.num_failures, failing.failed_at = failing.num_failures + 1, now
            times = failing.num_failures - _tolerated(subject)
            if times > 0:
                failing.open_until = now + min(MOST_S, FIRST_S * 2 ** min(times - 1, 10))
                self._trip(subject)
                _mark(subject, True)
                if times == SAID_AT:
                    log.warning("%s: requests placed there fail, so it gets none for a while", _named(subject))
                return failing.open_until
        return None

    def _forget(self, subject: Subject) -> None:
        failing = self._of.pop(subject)
        self._reset(subject)
        _mark(subject, False)
        if failing.num_failures >= _tolerated(subject) + SAID_AT:
            log.warning("%s: works again", _named(subject))

    def _there(self, subject: Subject) -> bool:
        workers = (subject,) if isinstance(subject, WorkerRecord) else subject
        return all(self._fleet.worker(worker.worker_id) is worker for worker in workers)

    def _reset(self, subject: Subject) -> None:
        if isinstance(subject, WorkerRecord):
            self._fleet.avoid(subject, False)
        else:
            self._fleet.part(*subject, False)

    def _trip(self, subject: Subject) -> None:
        if isinstance(subject, WorkerRecord):
            self._fleet.avoid(subject, True)
        else:
            self._fleet.part(*subject, True)


def _mark(subject: Subject, failing: bool) -> None:
    """Mark a subject for display, also while it is half-open."""
    if isinstance(subject, WorkerRecord):
        subject.failing = failing
    elif failing:
        subject[0].failing_lenders.add(subject[1])
    else:
        subject[0].failing_lenders.discard(subject[1])


def _subjects(placed: ActivePlacement) -> tuple[Subject, ...]:
    return (placed.decode,) if placed.lender is None else (placed.decode, (placed.decode, placed.lender))


def _tolerated(subject: Subject) -> int:
    return 0 if isinstance(subject, WorkerRecord) else TOLERATED_LOANS


def _named(subject: Subject) -> str:
    if isinstance(subject, WorkerRecord):
        return f"decode worker {subject.worker_id}"
    return f"loans of {subject[0].worker_id} from {subject[1].worker_id}"
