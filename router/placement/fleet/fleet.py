"""The fleet of one model as its router knows it.

Pure: events go in, snapshots and decisions come out.

Between a placement and the worker's report of it, the router counts the placement itself: the blocks and tokens it will
take, and the blocks its lender will have, so a burst of siblings goes to the same lender. Blocks count for a decode
worker only when it has them: a sibling that arrived sooner would find nothing there.

The worker table that placement reads is updated row by row with each event, so a decision copies nothing.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvcache.block_keys import KEY_BYTES, BlockKey, split_keys
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet.finished_streams import FinishedStreams, TrafficCounters
from router.placement.fleet.index import PrefixIndex, shared_prefix
from router.placement.fleet.worker_records import (
    ActivePlacement,
    WorkerRecord,
    adapters_of,
    available_of,
    queued_of,
    running_of,
    store_view,
    transfers_of,
    view_of,
)
from router.placement.in_flight import Transfer, TransfersInFlight
from router.placement.learning.output_lengths import OutputKey
from router.placement.learning.rate_learning import LogRatios
from router.placement.place import Decision, place, place_on, startable
from router.placement.rates import NO_SESSION, Affinities, Ints, Priors, Rates, Served, SessionKey
from router.placement.snapshots import PlacementSnapshot
from router.placement.worker_table import Hits, WorkerTable, WorkerView

PART_KEYS = 16_384
"""Keys of a worker's cache applied at a time, which takes 7 ms; all those of a worker with tiers may take a second."""


class Fleet:
    """Workers by id, the index of their caches, their learned speeds, and placements not yet in their reports."""

    def __init__(self, router_id: str, priors: Priors, learn_rates: bool = True, incarnation: str = "") -> None:
        self.router_id = router_id
        self.mark = f"{router_id}/{incarnation}" if incarnation else router_id
        """Mark that workers echo with this router's placements; a restarted router has another one."""
        self.num_roster_changes = 0
        """Number of changes of who is there, has reported, or drains."""
        self.traffic = TrafficCounters()
        """Traffic counters, updated by the request handler."""
        self._workers: dict[str, WorkerRecord] = {}
        self.index = PrefixIndex()
        self._learned = FinishedStreams(priors, learn_rates)
        self._snapshot = WorkerTable.of(())
        self._affinities = Affinities()
        self._in_flight = TransfersInFlight()
        self._computing: set[ActivePlacement] = set()
        """Placements without a first token whose lender computes."""
        self._parted: set[tuple[WorkerRecord, WorkerRecord]] = set()
        """Borrower and lender pairs that the circuit breaker separates."""
        self._sequence = 0
        self._bounded: set[str] = set()
        """Workers, and their stores, that hold blocks after which no request can go on; stores are never forgotten."""
        self.keeps_snapshots = False
        """Whether placements keep the snapshot of their decision."""
        self.adapters: dict[str, bytes] = {}
        """Fingerprints of the LoRA adapters of its decode workers, by name."""
        self._decided: tuple[Demand, Hits, Ints | None] | None = None
        """Inputs of the last decision that found a route."""

    @property
    def workers(self) -> list[WorkerRecord]:
        return list(self._workers.values())

    def worker(self, worker_id: str) -> WorkerRecord | None:
        return self._workers.get(worker_id)

    # ------------------------------------------------------------------ events

    def joined(self, hello: pb.Hello) -> WorkerRecord:
        """Add a worker.

        One of the same id is replaced: it restarted, or its stream broke unnoticed.
        """
        if (old := self._workers.get(hello.worker_id)) is not None:
            self.left(old)
        worker = self._workers[hello.worker_id] = WorkerRecord(hello)
        self.num_roster_changes += 1
        if hello.resumes_at_boundaries:
            self._bounded |= {worker.worker_id, worker.store_id} - {""}
        return worker

    def left(self, worker: WorkerRecord) -> None:
        """Remove a worker, unless another one has taken its place already."""
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            self.num_roster_changes += 1
            self._bounded.discard(worker.worker_id)
            self.index.drop_worker(worker.worker_id)
            if worker.store_id and worker.store_id not in self._stores():
                self.index.drop_worker(worker.store_id)
            if worker.load is not None:
                self._arrange()

    def reported(self, worker: WorkerRecord, load: pb.LoadReport) -> None:
        worker.num_reports += 1
        if load == worker.load and not (worker.unreported_decodes or worker.unreported_lends):
            return  # the common case, with capacity in the fleet
        first, worker.load = worker.load is None, load
        if first or load.draining > worker.draining:
            worker.draining |= load.draining
            self.num_roster_changes += 1
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

    def avoid(self, worker: WorkerRecord, avoided: bool) -> None:
        """Set whether nothing may start on a worker."""
        worker.avoided = avoided
        self._refresh(worker)

    def part(self, borrower: WorkerRecord, lender: WorkerRecord, parted: bool) -> None:
        """Set whether a worker may not borrow from another."""
        if parted:
            self._parted.add((borrower, lender))
        else:
            self._parted.discard((borrower, lender))
        self._arrange()

    def drains(self, worker: WorkerRecord) -> None:
        """Mark a worker as draining, before its next report does."""
        worker.draining = True
        self.num_roster_changes += 1
        self._refresh(worker)

    def cache_changed(self, worker: WorkerRecord, changed: pb.CacheEvents) -> bool:
        """Apply cache events.

        Returns False when events were lost: ask for a snapshot.
        """
        for _ in self.change_cache(worker, changed):
            pass
        return worker.next_cache_sequence is not None or self._workers.get(worker.worker_id) is not worker

    def change_cache(self, worker: WorkerRecord, changed: pb.CacheEvents) -> Iterator[None]:
        """Apply cache events a part at a time, so that other events may come in between.

        Events were lost if `next_cache_sequence` is None at the end.
        """
        if self._workers.get(worker.worker_id) is not worker:
            return
        if changed.snapshot:
            self.index.drop_worker(worker.worker_id)
            worker.next_cache_sequence = changed.sequence
            worker.num_cached = 0
        elif worker.next_cache_sequence != changed.sequence:
            worker.next_cache_sequence = None
            return
        elif not changed.continued:
            worker.next_cache_sequence += len(changed.events)
        num_keys = 0
        for event in changed.events:
            holder = worker.store_id if event.shared else worker.worker_id
            for joined, apply, sign in ((event.stored, self.index.add, 1), (event.removed, self.index.discard, -1)):
                for start in range(0, len(joined), PART_KEYS * KEY_BYTES):
                    if num_keys >= PART_KEYS:
                        num_keys = 0
                        yield
                        if self._workers.get(worker.worker_id) is not worker:
                            return
                    keys = split_keys(joined[start : start + PART_KEYS * KEY_BYTES])
                    apply(holder, keys)
                    worker.num_cached += sign * len(keys) * (not event.shared)
                    num_keys += len(keys)

    def placed(self, decision: Decision, demand: Demand, keys: Sequence[BlockKey]) -> ActivePlacement:
        """Count a placement from now on, with no event since its decision; `ended` must follow."""
        self._sequence += 1
        placement_snapshot = None
        if self.keeps_snapshots and self._decided is not None and self._decided[0] is demand:
            _, hits, available = self._decided
            rates = self._learned.rate_learner.rates_as_they_are()
            placement_snapshot = PlacementSnapshot.of(demand, self._snapshot, hits, rates, available)
        decode = self._workers[decision.decode_id]
        # None for the shared store too, which workers read by themselves
        lender = self._workers.get(decision.lender_id) if decision.lender_id else None
        source = self._workers.get(decision.source_id) if decision.source_id else None
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
            running_before=running_of(decode),
            queued_before=(queued_of(decode), queued_of(lender) if lender else 0),
            transfers=tuple(transfers_of(decision)),
        )
        for transfer in placed.transfers:
            self._in_flight.begin(transfer)
            self._refresh_ends(transfer)
        blocks = demand.num_blocks_to_reserve(decode.hello.reserve_output_tokens)
        decode.unreported_decodes.add(placed, placed.num_streams, placed.own_tokens, blocks)
        self._refresh(decode)
        if lender is not None:
            lender.unreported_lends.add(placed, tokens=placed.lender_tokens)
            self._refresh(lender)
            if placed.lender_computes:
                self._computing.add(placed)
        return placed

    def started(self, placed: ActivePlacement) -> None:
        """Process the first token of a placement."""
        if placed.started:
            return
        lender = placed.lender.hello if placed.lender is not None and placed.lender_computes else pb.Hello()
        decode = placed.decode.hello
        by = Served(decode.worker_id, decode.incarnation, lender.worker_id, lender.incarnation)
        self._affinities.served(placed.demand.session, by)
        self._begun(placed)

    def _begun(self, placed: ActivePlacement) -> None:
        """Stop counting what a placement moves and computes."""
        placed.started = True
        for transfer in placed.transfers:
            self._in_flight.end(transfer)
            self._refresh_ends(transfer)
        self._computing.discard(placed)
        if placed in placed.decode.unreported_decodes:
            placed.decode.unreported_decodes.computed(placed)
            self._refresh(placed.decode)
        if placed.lender is not None and placed in placed.lender.unreported_lends:
            placed.lender.unreported_lends.remove(placed)
            self._refresh(placed.lender)

    def finished(self, placed: ActivePlacement, finish: public_pb.Finish, ttft_s: float | None) -> None:
        """Learn from a stream that ended well with `finish`, which has the receipt.

        `ended` must follow.

        `ttft_s` counts from the placement; None where the first token was not observed.
        """
        self.started(placed)
        self._learned.learn(placed, finish, ttft_s)

    def ended(self, placed: ActivePlacement) -> None:
        if not placed.started:
            self._begun(placed)
        if placed in placed.decode.unreported_decodes:
            placed.decode.unreported_decodes.remove(placed)
            self._refresh(placed.decode)

    # ------------------------------------------------------------------ questions

    @property
    def snapshot(self) -> WorkerTable:
        """Return all workers that have reported.

        The table changes with the next event.
        """
        return self._snapshot

    @property
    def rates(self) -> Rates:
        """Speeds of the workers of `snapshot`, by row."""
        return self._learned.rate_learner.rates

    @property
    def ttft_scores(self) -> LogRatios:
        """Predicted over actual TTFT of successful streams."""
        return self._learned.ttft_scores

    def failing_lenders(self, borrower: WorkerRecord) -> list[str]:
        """Return the present lenders from which the borrower's loans fail."""
        lenders = borrower.failing_lenders
        return sorted(lender.worker_id for lender in lenders if self._workers.get(lender.worker_id) is lender)

    def views(self) -> list[WorkerView]:
        """Return all workers that have reported, ascending by id."""
        return [
            view_of(self._workers[worker_id], self._in_flight)
            for worker_id in self._snapshot.ids
            if worker_id in self._workers
        ]

    def with_expected_output(
        self, demand: Demand, key: OutputKey, num_prompt: int, session: SessionKey = NO_SESSION
    ) -> Demand:
        """Return the demand of a request of this tenant, task and session, with the output that is expected yet."""
        return self._learned.with_expected_output(demand, key, num_prompt, session)

    def hits(
        self,
        keys: Sequence[BlockKey],
        other_keys: Sequence[Sequence[BlockKey]] = (),
        session: SessionKey = NO_SESSION,
    ) -> Hits:
        """Return the blocks of the chain that each worker holds, and will hold as a lender before its next prompt.

        `other_keys`: keys of the same blocks for workers with other weights.
        """
        held = self._match(keys)
        for chain in other_keys:
            held |= self._match(chain)  # no worker holds blocks of two versions
        due = dict(held)
        for placed in self._computing:
            assert placed.lender is not None
            lender_id = placed.lender.worker_id
            if self._workers.get(lender_id) is not placed.lender:
                continue  # the worker is gone, with all it computed
            shared = shared_prefix(keys, placed.keys)
            if not shared and (other_keys or placed.demand.other_keys):
                chains = [(keys, *other_keys), (placed.keys, *placed.demand.other_keys)]
                shared = max(itertools.starmap(shared_prefix, itertools.product(*chains)))
            if placed.lender.hello.resumes_at_boundaries and shared < len(placed.keys):
                continue  # it will hold what a boundary at the end of that prompt needs
            if shared:
                due[lender_id] = max(due.get(lender_id, 0), shared)
        hits = Hits.of(self._snapshot, held, due)
        if (last := self._affinities.last(session)) is None:
            return hits
        decode = self._row_of(last.decode_id, last.decode_incarnation)
        return replace(hits, last_decode=decode, last_lender=self._row_of(last.lender_id, last.lender_incarnation))

    def _match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return the leading blocks of a chain after which a request can go on, by worker and store."""
        held = self.index.match(keys)
        if self._bounded and not self._bounded.isdisjoint(held):
            self.index.cut_to_boundaries(keys, held, self._bounded)
        return held

    def _row_of(self, worker_id: str, incarnation: bytes) -> int:
        """Return the row of a worker; -1 where it is gone, or another process has its id."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.hello.incarnation != incarnation:
            return -1
        return self._snapshot.row_of.get(worker_id, -1)

    def decide(self, demand: Demand, keys: Sequence[BlockKey], available: Ints | None = None) -> Decision | None:
        """Return the decision for a request now; None when no decode worker can start it.

        `available`: blocks that it may use of each worker of `snapshot`, if not all.
        """
        rows = np.flatnonzero(startable(demand, self._snapshot, available))
        if not len(rows):
            return None  # the index need not be asked
        hits = self.hits(keys, demand.other_keys, demand.session)
        self._decided = demand, hits, available
        return place_on(rows, demand, self._snapshot, hits, self.rates)

    def least_ttft_s(self, demand: Demand, keys: Sequence[BlockKey]) -> float | None:
        """Return the predicted TTFT with free capacity and empty queues; None where no worker could hold it."""
        free = replace(self._snapshot, queued_prefill_tokens=np.zeros_like(self._snapshot.queued_prefill_tokens))
        decision = place(demand, free, self.hits(keys, demand.other_keys), self.rates, free.num_blocks)
        return None if decision is None else decision.predicted_ttft_s

    def _arrange(self) -> None:
        """Rebuild the table after a change of the set of reporting workers."""
        workers = [worker for worker in self._workers.values() if worker.load is not None]
        stores = self._stores()
        self._snapshot = WorkerTable.of(
            [
                *(view_of(worker, self._in_flight) for worker in workers),
                *(
                    store_view(store_id, fingerprint, self._in_flight.outgoing(store_id))
                    for store_id, fingerprint in stores.items()
                ),
            ]
        )
        for store_id in stores:
            users = [self._snapshot.row_of[worker.worker_id] for worker in workers if worker.store_id == store_id]
            column = self._snapshot.row_of[store_id]
            self._snapshot.compatible[:, column] = False
            self._snapshot.compatible[users, column] = True
        self._parted = {pair for pair in self._parted if all(self._workers.get(w.worker_id) is w for w in pair)}
        for borrower, lender in self._parted:
            rows = self._snapshot.row_of.get(borrower.worker_id), self._snapshot.row_of.get(lender.worker_id)
            if None not in rows:
                self._snapshot.compatible[rows] = False
        self._learned.rate_learner.arrange(self._snapshot.ids)
        self.adapters = adapters_of(worker.hello for worker in workers if worker.decodes)

    def _stores(self) -> dict[str, bytes]:
        """Return the shared stores of present workers, with their model's fingerprint."""
        return {worker.store_id: worker.hello.model_fingerprint for worker in self._workers.values() if worker.store_id}

    def _refresh(self, worker: WorkerRecord) -> None:
        """Update a worker's row."""
        row = self._snapshot.row_of.get(worker.worker_id)
        if row is not None and self._workers.get(worker.worker_id) is worker:
            load = worker.load
            assert load is not None, "it is in the snapshot"
            self._snapshot.running[row] = running_of(worker)
            self._snapshot.decoding[row] = load.decoding
            self._snapshot.queued_prefill_tokens[row] = queued_of(worker)
            self._snapshot.available_blocks[row] = available_of(worker)
            self._snapshot.num_blocks[row] = load.num_blocks
            self._snapshot.draining[row] = worker.draining

    def _refresh_ends(self, transfer: Transfer) -> None:
        """Update the transfers in flight of a transfer's two ends."""
        for end_id in (transfer.borrower_id, transfer.lender_id):
            if (row := self._snapshot.row_of.get(end_id)) is not None:
                self._snapshot.set_in_flight(row, self._in_flight.outgoing(end_id), self._in_flight.incoming(end_id))
