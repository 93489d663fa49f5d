"""The fleet against a plain model of it: figures added up anew, caches as sets, after any order of events."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.block_keys import block_keys, root_key
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord
from router.placement.in_flight import Flows
from router.placement.place import Decision, place
from router.placement.rates import Priors
from router.placement.worker_table import Hits, WorkerTable, WorkerView

ROOT = root_key(b"model", "")
CHAINS = [block_keys(ROOT, tokens, 2) for tokens in ([0] * 8, [0] * 4 + [1] * 4, [1] * 8)]
"""Of four blocks each; two share the first two."""
KEYS = sorted({key for chain in CHAINS for key in chain})
IDS = ["d0", "d1", "p0", "p1"]
PRIORS = Priors(1000, 100, 1e6, 0.01, 0.001, 0.001)

ids = st.sampled_from(IDS)
keys = st.lists(st.sampled_from(KEYS), max_size=3)


def shared_blocks(keys: list[bytes], others: tuple[bytes, ...]) -> int:
    return sum(key == other for key, other in zip(keys, others, strict=False))


class FleetModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet("router", PRIORS)
        self.workers: dict[str, WorkerRecord] = {}
        self.old: list[WorkerRecord] = []
        self.held: dict[WorkerRecord, set[bytes]] = {}
        self.sequence: dict[WorkerRecord, int] = {}
        """What the worker will send next."""
        self.in_step: dict[WorkerRecord, bool] = {}
        self.draining: set[WorkerRecord] = set()
        """Once and for all."""
        self.under_way: list[ActivePlacement] = []
        self.num_placed = 0

    @rule(worker_id=ids, reserve=st.sampled_from([0, 4]))
    def join(self, worker_id: str, reserve: int) -> None:
        if worker_id in self.workers:
            self.old.append(self.workers[worker_id])
        role = pb.ROLE_DECODE if worker_id.startswith("d") else pb.ROLE_PREFILL
        hello = pb.Hello(worker_id=worker_id, role=role, model_fingerprint=b"model", reserve_output_tokens=reserve)
        worker = self.workers[worker_id] = self.fleet.joined(hello)
        self.held[worker], self.sequence[worker], self.in_step[worker] = set(), 0, False

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = self.workers.pop(data.draw(st.sampled_from(sorted(self.workers))))
        self.old.append(worker)
        self.fleet.left(worker)

    @precondition(lambda self: self.old)
    @rule(data=st.data(), removed=keys)
    def what_comes_late_changes_nothing(self, data: st.DataObject, removed: list[bytes]) -> None:
        worker = data.draw(st.sampled_from(self.old))
        assert self.fleet.cache_changed(worker, pb.CacheEvents(snapshot=True))
        self.fleet.reported(worker, pb.LoadReport(running=1000))
        self.fleet.left(worker)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), running=st.integers(0, 9), queued=st.integers(0, 99), seen=st.integers(0, 3))
    def report(self, data: st.DataObject, running: int, queued: int, seen: int) -> None:
        worker = data.draw(st.sampled_from(list(self.workers.values())))
        # A report may have seen later placements than those on this worker, but none that was not made.
        before = worker.load.placements_seen.get("router", 0) if worker.load else 0
        self.fleet.reported(
            worker,
            pb.LoadReport(
                running=running,
                queued_prefill_tokens=queued,
                available_blocks=100 - running,
                num_blocks=100,
                placements_seen={"router": min(before + seen, self.num_placed)},
                draining=running == 9,
            ),
        )
        if running == 9:
            self.draining.add(worker)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def says_that_it_drains(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(list(self.workers.values())))
        self.fleet.drains(worker)
        self.draining.add(worker)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), stored=keys, removed=keys, snapshot=st.booleans(), lost=st.integers(0, 9))
    def cache(self, data: st.DataObject, stored: list[bytes], removed: list[bytes], snapshot: bool, lost: int) -> None:
        """Now and then messages before this one were lost."""
        worker = data.draw(st.sampled_from(list(self.workers.values())))
        event = pb.CacheEvent(stored=b"".join(stored), removed=b"".join(removed))
        events = [event] if stored or removed else []
        if lost == 9:
            self.sequence[worker] += 1
        changed = pb.CacheEvents(sequence=self.sequence[worker], events=events, snapshot=snapshot)
        expected = snapshot or (self.in_step[worker] and lost != 9)
        assert self.fleet.cache_changed(worker, changed) == expected
        self.in_step[worker] = expected
        if snapshot:
            self.held[worker] = set()
        else:
            self.sequence[worker] += len(events)
        if expected:
            self.held[worker] |= set(stored)
            self.held[worker] -= set(removed)

    @rule(chain=st.sampled_from(CHAINS), depth=st.integers(0, 4), num_chains=st.integers(1, 2))
    def placed(self, chain: list[bytes], depth: int, num_chains: int) -> None:
        demand = Demand(9, depth, 14, 2, 100, (9,) * num_chains, 25, 8)
        decision = self.fleet.decide(demand, chain[:depth])
        expected = self.expected_decision(demand, chain[:depth])
        assert decision == expected
        if decision is not None:
            self.num_placed += 1
            self.under_way.append(self.fleet.placed(decision, demand, chain[:depth]))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def started(self, data: st.DataObject) -> None:
        self.fleet.started(data.draw(st.sampled_from(self.under_way)))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def ended(self, data: st.DataObject) -> None:
        self.fleet.ended(self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1))))

    # ------------------------------------------------------------------ the model

    def expected_views(self) -> list[WorkerView]:
        return [self.view(worker) for _, worker in sorted(self.workers.items()) if worker.load is not None]

    def view(self, worker: WorkerRecord) -> WorkerView:
        load, reserve = worker.load, worker.hello.reserve_output_tokens
        unseen = [p for p in self.under_way if p.sequence > load.placements_seen.get("router", 0)]
        decodes = [p for p in unseen if p.decode is worker]
        lends = [p for p in unseen if p.lender is worker and not p.started]
        return WorkerView(
            worker_id=worker.worker_id,
            decodes=worker.decodes,
            fingerprint=b"model",
            running=load.running + sum(len(p.demand.chain_tokens) for p in decodes),
            decoding=load.decoding,
            queued_prefill_tokens=load.queued_prefill_tokens
            + sum(p.lender_tokens for p in lends)
            + sum(p.own_tokens for p in decodes if not p.started),
            available_blocks=load.available_blocks - sum(p.demand.num_blocks_to_reserve(reserve) for p in decodes),
            num_blocks=load.num_blocks,
            reserve_output_tokens=reserve,
            draining=worker in self.draining,
            outgoing=self.flows(worker.worker_id, "lender_id"),
            incoming=self.flows(worker.worker_id, "borrower_id"),
        )

    def flows(self, worker_id: str, end: str) -> Flows:
        moving = [t for p in self.under_way if not p.started for t in p.transfers if getattr(t, end) == worker_id]
        return Flows(sum(transfer.num_bytes for transfer in moving), len(moving))

    def expected_hits(self, keys: list[bytes]) -> tuple[dict[str, int], dict[str, int]]:
        held = {
            worker_id: next((depth for depth, key in enumerate(keys) if key not in self.held[worker]), len(keys))
            for worker_id, worker in self.workers.items()
        }
        due = dict(held)
        for placed in self.under_way:
            lender = placed.lender
            if lender is None or self.workers.get(lender.worker_id) is not lender:
                continue
            if placed.lender_computes and not placed.started:
                due[lender.worker_id] = max(due[lender.worker_id], shared_blocks(keys, placed.keys))
        return held, due

    def expected_decision(self, demand: Demand, keys: list[bytes]) -> Decision | None:
        workers = WorkerTable.of(self.expected_views())
        return place(demand, workers, Hits.of(workers, *self.expected_hits(keys)), self.fleet.rates)

    @invariant()
    def figures_are_those_of_the_model(self) -> None:
        expected = WorkerTable.of(self.expected_views())
        snapshot = self.fleet.snapshot
        assert self.fleet.views() == self.expected_views()
        assert (snapshot.ids, snapshot.reserves) == (expected.ids, expected.reserves)
        for name in ("decodes", "draining", "compatible", "running", "queued_prefill_tokens", "available_blocks"):
            assert (getattr(snapshot, name) == getattr(expected, name)).all()
        for name in ("outgoing_bytes", "outgoing_flows", "incoming_bytes", "incoming_flows"):
            assert (getattr(snapshot, name) == getattr(expected, name)).all()
        assert (snapshot.num_blocks == expected.num_blocks).all()
        assert (snapshot.reserve_of == expected.reserve_of).all()

    @invariant()
    def caches_are_those_of_the_model(self) -> None:
        for chain in CHAINS:
            held, due = self.expected_hits(chain)
            hits = self.fleet.hits(chain)
            assert list(hits.held) == [held[worker_id] for worker_id in self.fleet.snapshot.ids]
            assert list(hits.due) == [due[worker_id] for worker_id in self.fleet.snapshot.ids]

    def teardown(self) -> None:
        for placed in self.under_way:
            self.fleet.ended(placed)
        self.under_way.clear()
        self.figures_are_those_of_the_model()


TestFleetModel = FleetModel.TestCase
