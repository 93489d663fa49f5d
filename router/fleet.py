"""What the router knows of its workers. Pure bookkeeping: told of events, asked for snapshots.

Between a placement and the worker's report of it, the router counts the placement itself: the blocks and tokens
it will take, and the blocks its lender will have, so that a burst of siblings goes to the same lender. What a decode
worker will have counts only when it has it: a sibling that came sooner would find nothing there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.keys import BlockKey, split_keys
from protos import membership_pb2 as pb
from router.index import PrefixIndex
from router.placement import Decision, Demand, Hits, WorkerView


@dataclass(slots=True, eq=False)
class Worker:
    """One membership: from Hello to the end of its stream."""

    hello: pb.Hello
    load: pb.LoadReport | None = None
    next_cache_sequence: int | None = None
    """None until the first snapshot."""
    lost: bool = False
    """Its engine fell silent; calls to it are cancelled."""
    on_lost: set[Callable[[], object]] = field(default_factory=set)

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def decodes(self) -> bool:
        return self.hello.role == pb.ROLE_DECODE


@dataclass(slots=True, eq=False)
class Placed:
    """A placement under way."""

    sequence: int
    decode: Worker
    lender: Worker | None
    lender_tokens: int
    lender_computes: bool
    source: Worker | None
    demand: Demand
    keys: tuple[BlockKey, ...]
    started: bool = False
    """Its first token has come: the caches hold what it left in them, and have said so."""


class Fleet:
    """Workers by id, the index over their caches, and placements not yet seen in their reports."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self._workers: dict[str, Worker] = {}
        self._index = PrefixIndex()
        self._placed: set[Placed] = set()
        self._sequence = 0

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def worker(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    # ------------------------------------------------------------------ events

    def joined(self, hello: pb.Hello) -> Worker:
        """A worker of the same id is replaced: it restarted, or its stream broke unnoticed."""
        if (old := self._workers.get(hello.worker_id)) is not None:
            self.left(old)
        worker = self._workers[hello.worker_id] = Worker(hello)
        return worker

    def left(self, worker: Worker) -> None:
        """Forget it, unless another took its place already."""
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            self._index.drop_worker(worker.worker_id)

    def reported(self, worker: Worker, load: pb.LoadReport) -> None:
        worker.load = load

    def cache_changed(self, worker: Worker, changed: pb.CacheEvents) -> bool:
        """False when events were lost: ask for a snapshot."""
        if self._workers.get(worker.worker_id) is not worker:
            return True
        if changed.snapshot:
            self._index.drop_worker(worker.worker_id)
            worker.next_cache_sequence = changed.sequence
        elif worker.next_cache_sequence != changed.sequence:
            worker.next_cache_sequence = None
            return False
        else:
            worker.next_cache_sequence += len(changed.events)
        for event in changed.events:
            self._index.add(worker.worker_id, split_keys(event.stored))
            self._index.discard(worker.worker_id, split_keys(event.removed))
        return True

    def placed(self, decision: Decision, demand: Demand, keys: Sequence[BlockKey]) -> Placed:
        """Count a placement from now on; `ended` must follow."""
        self._sequence += 1
        decode = self._workers[decision.decode_id]
        lender = self._workers[decision.lender_id] if decision.lender_id else None
        source = self._workers[decision.source_id] if decision.source_id else None
        placed = Placed(
            sequence=self._sequence,
            decode=decode,
            lender=lender,
            lender_tokens=decision.lender_tokens,
            lender_computes=decision.lender_computes,
            source=source,
            demand=demand,
            keys=tuple(keys),
        )
        self._placed.add(placed)
        return placed

    def ended(self, placed: Placed) -> None:
        self._placed.discard(placed)

    # ------------------------------------------------------------------ questions

    def views(self) -> list[WorkerView]:
        """All workers that have reported."""
        return [self._view(w) for w in sorted(self._workers.values(), key=lambda w: w.worker_id) if w.load is not None]

    def hits(self, keys: Sequence[BlockKey]) -> Hits:
        """Blocks of the chain each worker holds, and will have computed before it turns to the next as a lender."""
        held = self._index.match(keys)
        due = dict(held)
        for placed in self._placed:
            if placed.lender is not None and placed.lender_computes and not placed.started:
                shared = _shared_prefix(keys, placed.keys)
                if shared:
                    lender_id = placed.lender.worker_id
                    due[lender_id] = max(due.get(lender_id, 0), shared)
        return Hits(held, due)

    def _view(self, worker: Worker) -> WorkerView:
        load = worker.load
        assert load is not None
        reserve = worker.hello.reserve_output_tokens
        seen = load.placements_seen.get(self.router_id, 0)
        unseen = [p for p in self._placed if p.sequence > seen]
        decodes = [p for p in unseen if p.decode is worker]
        lends = [p for p in unseen if p.lender is worker and not p.started]
        return WorkerView(
            worker_id=worker.worker_id,
            decodes=worker.decodes,
            fingerprint=worker.hello.model_fingerprint,
            running=load.running + sum(max(1, len(p.demand.chain_tokens)) for p in decodes),
            queued_prefill_tokens=load.queued_prefill_tokens + sum(p.lender_tokens for p in lends),
            available_blocks=load.available_blocks - sum(p.demand.num_promised_blocks(reserve) for p in decodes),
            num_blocks=load.num_blocks,
            reserve_output_tokens=reserve,
        )


def _shared_prefix(keys: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """Keys name whole chains: the last equal one decides."""
    for depth in range(min(len(keys), len(others)), 0, -1):
        if keys[depth - 1] == others[depth - 1]:
            return depth
    return 0
