"""Reports of an engine: changes of its cache, and its load, which also shows that its loop runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core_types import EngineSequence
from engine.messages.from_engine import CacheChanged, FromEngine, KvUse, LoadReport, TierUse
from kvcache.kv_stats import LOCAL, PINNED, POOL, REMOTE, STORE
from kvcache.kv_view import KvView
from loans.lender_manager import LenderManager
from loans.network import PlacementMark


@dataclass(frozen=True, slots=True)
class ReportSchedule:
    """Times at which load is reported."""

    interval_s: float
    """Longest time between reports while the loop runs, in seconds."""
    min_interval_s: float
    """Shortest time between reports, in seconds, however much changes."""
    max_step_s: float
    """Seconds after which a step counts as hung and reports stop."""


class RunningSequences(Protocol):
    """Running and preempted sequences, as load reports need them."""

    num_preemptions: int

    @property
    def running(self) -> Sequence[EngineSequence]: ...

    @property
    def preempted(self) -> Sequence[EngineSequence]: ...

    @property
    def short(self) -> bool:
        """Whether any sequence is waiting for blocks."""


class ReportedRequests(Protocol):
    """Requests of an engine, as load reports need them."""

    @property
    def running_set(self) -> RunningSequences: ...

    @property
    def num_sequences(self) -> int: ...


class DraftCounts(Protocol):
    """Numbers of draft tokens, as load reports need them."""

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that were verified."""

    @property
    def num_right(self) -> int:
        """Draft tokens that were accepted."""


class LoadReporter:
    """Reporter driven by the engine's loop; sends nothing by itself."""

    def __init__(
        self,
        kv_cache: KvView,
        requests: ReportedRequests,
        lender_manager: LenderManager[EngineSequence],
        times: ReportSchedule,
        emit: Callable[[FromEngine], None],
        drafts: DraftCounts | None = None,
    ) -> None:
        self._kv_cache = kv_cache
        self._cached = kv_cache.cached
        self._requests = requests
        self._lender_manager = lender_manager
        self._times = times
        self._emit = emit
        self._drafts = drafts
        self._cache_sequence = 0
        self._placements_seen: dict[str, int] = {}
        self._kv_reported: KvUse | None = None
        self._reported_at = 0.0
        self._step_began_at = 0.0
        self._step_count = 0
        self.changed = True
        """Whether load has changed since the last report."""

    def saw(self, mark: PlacementMark) -> None:
        """Record that the work of this placement is counted from now on."""
        if mark.router_id:
            seen = self._placements_seen.get(mark.router_id, 0)
            self._placements_seen[mark.router_id] = max(seen, mark.sequence)

    @property
    def is_step_stuck(self) -> bool:
        """Whether a step takes so long that the engine counts as hung."""
        return self._kv_cache.in_step and self._cached.clock() - self._step_began_at > self._times.max_step_s

    def step_began(self, now: float) -> None:
        self._step_began_at = now

    def step_ended(self) -> float:
        """Record the end of a step; return its duration in seconds."""
        self._step_count += 1
        return self._cached.clock() - self._step_began_at

    def count_steps(self, count: int) -> None:
        """Count steps that were made at once."""
        self._step_count += count

    def due(self, now: float) -> bool:
        """Return whether load should be reported at `now`."""
        interval_s = self._times.min_interval_s if self.changed else self._times.interval_s
        return now - self._reported_at >= interval_s

    def report(self) -> None:
        """Send due reports.

        A step that hangs silences them.
        """
        self._report_cache()
        self._report_load()

    def send_snapshot(self) -> None:
        """Send the whole prefix cache, for a reader that lost changes."""
        self._report_cache()
        self._emit(CacheChanged(self._cache_sequence, tuple(self._cached.snapshot()), snapshot=True))

    def _report_cache(self) -> None:
        if events := self._cached.take_events():
            self._emit(CacheChanged(self._cache_sequence, tuple(events)))
            self._cache_sequence += len(events)

    def _report_load(self) -> None:
        now = self._cached.clock()
        if self.is_step_stuck or not self.due(now):
            return
        self._reported_at = now
        self.changed = False
        running_set = self._requests.running_set
        running, preempted = running_set.running, running_set.preempted
        prefilling = [sequence for sequence in running if not sequence.decoding]
        num_decoding = len(running) - len(prefilling)
        prefilling += [s for s in (*self._lender_manager.started_jobs(), *preempted) if not s.decoding]
        self._emit(
            LoadReport(
                step=self._step_count,
                running=self._requests.num_sequences,
                loans=self._lender_manager.num_loans,
                queued_loans=self._lender_manager.num_waiting,
                queued_prefill_tokens=sum(s.num_remaining for s in prefilling) + self._lender_manager.waiting_tokens(),
                available_blocks=0 if running_set.short else self._cached.num_available,
                num_blocks=self._cached.pool.num_blocks,
                placements_seen=dict(self._placements_seen),
                decoding=num_decoding,
                preempted=len(preempted),
                preemptions=running_set.num_preemptions,
                drafted=self._drafts.num_draft_tokens if self._drafts else 0,
                accepted=self._drafts.num_right if self._drafts else 0,
                kv=self._changed_kv_use(now),
            )
        )

    def _changed_kv_use(self, now: float) -> KvUse | None:
        """Return the use of KV tiers since the last report, or None where it is unchanged."""
        cached, counts = self._cached, self._cached.counts
        pool, pins, local, shared = cached.pool, cached.pins, cached.local, cached.shared
        uses = [TierUse(POOL, pool.num_blocks, pool.num_filled, counts.queries.get(POOL, 0), counts.hits.get(POOL, 0))]
        asked = counts.queries.get(LOCAL, 0)
        for place in [] if local is None else local.store.places():
            uses.append(TierUse(place.name, place.capacity, place.used, asked, place.hits))
            asked = max(0, asked - place.hits)
        if num_pinned := len(pins):
            uses.append(TierUse(PINNED, pins.max_blocks, num_pinned, 0, 0))
        uses += [
            TierUse(name, 0, 0, counts.queries.get(name, 0), counts.hits.get(name, 0))
            for name in ([STORE] if shared is not None else []) + [REMOTE]
        ]
        store = () if shared is None else shared.store.outcomes()
        use = KvUse(tuple(uses), counts.read_bytes, counts.read_s(now), counts.num_mismatched, pins.num_gave_way, store)
        if use == self._kv_reported:
            return None
        self._kv_reported = use
        return use
