"""What the router knows of its workers. Pure bookkeeping: told of events, asked for snapshots.

Between a placement and the worker's report of it, the router counts the placement itself: the blocks and tokens
it will take, and the blocks its lender will have, so that a burst of siblings goes to the same lender. What a decode
worker will have counts only when it has it: a sibling that came sooner would find nothing there.

The snapshot that placement reads is kept up to date row by row as events come, so a decision copies nothing.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from engine.kv.block_keys import KEY_BYTES, BlockKey, split_keys
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from router.placement.traffic_counters import TrafficCounters
from router.placement.receipt_timings import measured
from router.placement.demand import Demand
from router.placement.index import PrefixIndex
from router.placement.place import Decision, place, place_on, startable
from router.placement.placement_snapshot import PlacementSnapshot
from router.placement.prediction_error import LogRatios
from router.placement.rate_learning import RateLearner
from router.placement.rates import Ints, Priors, Rates
from router.placement.worker_records import ActivePlacement, Worker
from router.placement.worker_table import Hits, WorkerTable, WorkerView

PART_KEYS = 16_384
"""Of a worker's cache, applied at a time: 7 ms. What a worker with tiers holds takes a second."""


class Fleet:
    """Workers by id, the index over their caches, what was learnt of their speed, and placements not yet seen in
    their reports."""

    def __init__(self, router_id: str, priors: Priors, learn_rates: bool = True, incarnation: str = "") -> None:
        self.router_id = router_id
        self.mark = f"{router_id}/{incarnation}" if incarnation else router_id
        """What workers echo placements under: a router that restarts counts anew, and so has a mark of its own."""
        self.ttft_scores = LogRatios()
        """Of predictions: predicted over actual TTFT of streams that ended well."""
        self.traffic = TrafficCounters()
        """Counted by whoever takes requests in."""
        self._workers: dict[str, Worker] = {}
        self._index = PrefixIndex()
        self._learner = RateLearner(priors)
        self._learn_rates = learn_rates
        self._snapshot = WorkerTable.of(())
        self._computing: set[ActivePlacement] = set()
        """Not started, by a lender that computes."""
        self._parted: set[tuple[Worker, Worker]] = set()
        """Borrowers and lenders whose loans fail."""
        self._sequence = 0
        self.keeps_situations = False
        """What decisions were made of is kept with placements."""
        self._decided: tuple[Demand, Hits, Ints | None] | None = None
        """Of the last decision that found a way."""

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
            if worker.load is not None:
                self._arrange()

    def reported(self, worker: Worker, load: pb.LoadReport) -> None:
        worker.num_reports += 1
        if load == worker.load and not (worker.unreported_decodes or worker.unreported_lends):
            return  # as most are, of a fleet that has room
        first, worker.load = worker.load is None, load
        worker.draining |= load.draining
        seen = load.placements_seen.get(self.mark, 0)
        for unseen in (worker.unreported_decodes, worker.unreported_lends):
            if unseen:
                unseen.see(seen)
        if self._workers.get(worker.worker_id) is not worker:
            return
        if first:
            self._arrange()
        else:
            self._refresh(worker)

    def avoid(self, worker: Worker, avoided: bool) -> None:
        """Whether nothing may start there."""
        worker.avoided = avoided
        self._refresh(worker)

    def part(self, borrower: Worker, lender: Worker, parted: bool) -> None:
        """Whether one may not borrow from the other."""
        if parted:
            self._parted.add((borrower, lender))
        else:
            self._parted.discard((borrower, lender))
        self._arrange()

    def drains(self, worker: Worker) -> None:
        """It said so itself, before any report of it did."""
        worker.draining = True
        self._refresh(worker)

    def cache_changed(self, worker: Worker, changed: pb.CacheEvents) -> bool:
        """False when events were lost: ask for a snapshot."""
        for _ in self.change_cache(worker, changed):
            pass
        return worker.next_cache_sequence is not None or self._workers.get(worker.worker_id) is not worker

    def change_cache(self, worker: Worker, changed: pb.CacheEvents) -> Iterator[None]:
        """Likewise, a part at a time: other events may come between two of them. With `next_cache_sequence` None at the
        end, events were lost."""
        if self._workers.get(worker.worker_id) is not worker:
            return
        if changed.snapshot:
            self._index.drop_worker(worker.worker_id)
            worker.next_cache_sequence = changed.sequence
            worker.num_cached = 0
        elif worker.next_cache_sequence != changed.sequence:
            worker.next_cache_sequence = None
            return
        elif not changed.continued:
            worker.next_cache_sequence += len(changed.events)
        num_keys = 0
        for event in changed.events:
            for joined, apply, sign in ((event.stored, self._index.add, 1), (event.removed, self._index.discard, -1)):
                for start in range(0, len(joined), PART_KEYS * KEY_BYTES):
                    if num_keys >= PART_KEYS:
                        num_keys = 0
                        yield
                        if self._workers.get(worker.worker_id) is not worker:
                            return
                    keys = split_keys(joined[start : start + PART_KEYS * KEY_BYTES])
                    apply(worker.worker_id, keys)
                    worker.num_cached += sign * len(keys)
                    num_keys += len(keys)

    def placed(self, decision: Decision, demand: Demand, keys: Sequence[BlockKey]) -> ActivePlacement:
        """Count a placement from now on, with nothing told since it was decided; `ended` must follow."""
        self._sequence += 1
        placement_snapshot = None
        if self.keeps_situations and self._decided is not None and self._decided[0] is demand:
            _, hits, available = self._decided
            rates = self._learner.rates_as_they_are()
            placement_snapshot = PlacementSnapshot.of(demand, self._snapshot, hits, rates, available)
        decode = self._workers[decision.decode_id]
        lender = self._workers[decision.lender_id] if decision.lender_id else None
        source = self._workers[decision.source_id] if decision.source_id else None
        placed = ActivePlacement(
            sequence=self._sequence,
            decode=decode,
            lender=lender,
            lender_tokens=decision.lender_tokens,
            own_tokens=decision.own_tokens,
            lender_computes=decision.lender_computes,
            source=source,
            demand=demand,
            keys=tuple(keys),
            predicted_ttft_s=decision.predicted_ttft_s,
            placement_snapshot=placement_snapshot,
            running_before=_running(decode),
            queued_before=(_queued(decode), _queued(lender) if lender else 0),
        )
        blocks = demand.num_promised_blocks(decode.hello.reserve_output_tokens)
        decode.unreported_decodes.add(placed, placed.num_streams, placed.own_tokens, blocks)
        self._refresh(decode)
        if lender is not None:
            lender.unreported_lends.add(placed, tokens=placed.lender_tokens)
            self._refresh(lender)
            if placed.lender_computes:
                self._computing.add(placed)
        return placed

    def started(self, placed: ActivePlacement) -> None:
        """Its first token has come."""
        if placed.started:
            return
        placed.started = True
        self._computing.discard(placed)
        if placed in placed.decode.unreported_decodes:
            placed.decode.unreported_decodes.computed(placed)
            self._refresh(placed.decode)
        if placed.lender is not None and placed in placed.lender.unreported_lends:
            placed.lender.unreported_lends.remove(placed)
            self._refresh(placed.lender)

    def finished(self, placed: ActivePlacement, finish: public_pb.Finish, ttft_s: float | None) -> None:
        """Its stream ended well with `finish`, which has the receipt; learn from it. `ended` must follow.

        `ttft_s` counts from the placement; None where nobody saw the first token come.
        """
        if ttft_s is not None:
            self.ttft_scores.add(placed.predicted_ttft_s, ttft_s)
        kv = finish.receipt.kv
        # What came wrong from the decode worker's own tiers is not the lender's failure, and says no loan_failure.
        if kv.loan_failure and (kv.mismatched_blocks or not kv.moved_blocks):
            placed.lent = False
        elif kv.moved_blocks and not kv.loan_failure:
            placed.lent = True
        placed.decode.asked_blocks += kv.reused_blocks + kv.moved_blocks + kv.computed_blocks
        placed.decode.hit_blocks += kv.reused_blocks
        if placed.lender is not None:
            placed.lender.asked_blocks += kv.moved_blocks
            placed.lender.hit_blocks += kv.lender_cached_blocks
        if not self._learn_rates:
            return
        load, running = placed.decode.load, placed.running_before + 1.0
        if load is not None:
            running = (running + max(1, load.running)) / 2
        self._learner.observe(measured(finish, *placed.queued_before, running, placed.num_streams))

    def ended(self, placed: ActivePlacement) -> None:
        self.started(placed)
        if placed in placed.decode.unreported_decodes:
            placed.decode.unreported_decodes.remove(placed)
            self._refresh(placed.decode)

    # ------------------------------------------------------------------ questions

    @property
    def snapshot(self) -> WorkerTable:
        """All workers that have reported. It changes with the next event."""
        return self._snapshot

    @property
    def rates(self) -> Rates:
        """Of the workers of `snapshot`, by row."""
        return self._learner.rates

    def failing_lenders(self, borrower: Worker) -> list[str]:
        """Those there from whom its loans fail."""
        lenders = borrower.failing_lenders
        return sorted(lender.worker_id for lender in lenders if self._workers.get(lender.worker_id) is lender)

    def views(self) -> list[WorkerView]:
        """All workers that have reported, ascending by id."""
        return [self._view(self._workers[worker_id]) for worker_id in self._snapshot.ids]

    def hits(self, keys: Sequence[BlockKey], other_keys: Sequence[Sequence[BlockKey]] = ()) -> Hits:
        """Blocks of the chain each worker holds, and will have computed before it turns to the next as a lender.
        `other_keys`: what the same blocks are called by workers of other weights."""
        held = self._index.match(keys)
        for chain in other_keys:
            held |= self._index.match(chain)  # nobody holds blocks of two
        due = dict(held)
        for placed in self._computing:
            assert placed.lender is not None
            lender_id = placed.lender.worker_id
            if self._workers.get(lender_id) is not placed.lender:
                continue  # it is gone, and with it what it computed
            shared = _shared_prefix(keys, placed.keys)
            if not shared and (other_keys or placed.demand.other_keys):
                chains = [(keys, *other_keys), (placed.keys, *placed.demand.other_keys)]
                shared = max(itertools.starmap(_shared_prefix, itertools.product(*chains)))
            if shared:
                due[lender_id] = max(due.get(lender_id, 0), shared)
        return Hits.of(self._snapshot, held, due)

    def decide(self, demand: Demand, keys: Sequence[BlockKey], available: Ints | None = None) -> Decision | None:
        """Where it would go now; None when no decode worker can start it. `available`: blocks that it may take of each
        worker of `snapshot`, where these are not all there are."""
        rows = np.flatnonzero(startable(demand, self._snapshot, available))
        if not len(rows):
            return None  # what the caches hold need not be asked
        hits = self.hits(keys, demand.other_keys)
        self._decided = demand, hits, available
        return place_on(rows, demand, self._snapshot, hits, self.rates)

    def least_ttft_s(self, demand: Demand, keys: Sequence[BlockKey]) -> float | None:
        """Predicted if there were room everywhere and no prompt were queued anywhere; None where nobody could hold
        it."""
        free = replace(self._snapshot, queued_prefill_tokens=np.zeros_like(self._snapshot.queued_prefill_tokens))
        decision = place(demand, free, self.hits(keys, demand.other_keys), self.rates, free.num_blocks)
        return None if decision is None else decision.predicted_ttft_s

    def _arrange(self) -> None:
        """Who is among the workers that have reported has changed."""
        there = [worker for worker in self._workers.values() if worker.load is not None]
        self._snapshot = WorkerTable.of([self._view(worker) for worker in there])
        self._parted = {pair for pair in self._parted if all(self._workers.get(w.worker_id) is w for w in pair)}
        for borrower, lender in self._parted:
            rows = self._snapshot.row_of.get(borrower.worker_id), self._snapshot.row_of.get(lender.worker_id)
            if None not in rows:
                self._snapshot.compatible[rows] = False
        self._learner.arrange(self._snapshot.ids)

    def _refresh(self, worker: Worker) -> None:
        """Its figures have changed."""
        row = self._snapshot.row_of.get(worker.worker_id)
        if row is not None and self._workers.get(worker.worker_id) is worker:
            load = worker.load
            assert load is not None, "it is in the snapshot"
            self._snapshot.running[row] = _running(worker)
            self._snapshot.decoding[row] = load.decoding
            self._snapshot.queued_prefill_tokens[row] = _queued(worker)
            self._snapshot.available_blocks[row] = _available(worker)
            self._snapshot.num_blocks[row] = load.num_blocks
            self._snapshot.draining[row] = worker.draining

    def _view(self, worker: Worker) -> WorkerView:
        load = worker.load
        assert load is not None, "it has reported"
        return WorkerView(
            worker_id=worker.worker_id,
            decodes=worker.decodes,
            fingerprint=worker.hello.model_fingerprint,
            running=_running(worker),
            decoding=load.decoding,
            queued_prefill_tokens=_queued(worker),
            available_blocks=_available(worker),
            num_blocks=load.num_blocks,
            reserve_output_tokens=worker.hello.reserve_output_tokens,
            draining=worker.draining,
            traffic_share=worker.hello.traffic_share,
        )


def _running(worker: Worker) -> int:
    """Streams, of one that has reported; this and the next two count what its reports do not see yet."""
    assert worker.load is not None
    return worker.load.running + worker.unreported_decodes.streams


def _queued(worker: Worker) -> int:
    """Tokens of prompts."""
    assert worker.load is not None
    return worker.load.queued_prefill_tokens + worker.unreported_lends.tokens + worker.unreported_decodes.tokens


def _available(worker: Worker) -> int:
    """Blocks; -1: nothing may start there."""
    assert worker.load is not None
    return -1 if worker.avoided else worker.load.available_blocks - worker.unreported_decodes.blocks


def _shared_prefix(keys: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """Keys name whole chains: where two are equal, all before them are."""
    shared, end = 0, min(len(keys), len(others))
    if not end or keys[0] != others[0]:
        return 0
    while shared < end:
        middle = (shared + end + 1) // 2
        if keys[middle - 1] == others[middle - 1]:
            shared = middle
        else:
            end = middle - 1
    return shared
