"""What the router believes of its workers between their reports."""

from kvcache.block_keys import block_keys, root_key
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord
from router.placement.place import Decision
from router.placement.rates import Floats, Priors

DEMAND = Demand(num_tokens=20, num_usable_blocks=4, num_total_blocks=6, block_tokens=4, block_bytes=100)
KEYS = block_keys(root_key(b"model", ""), list(range(16)), 4)

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.001, 0.001)


def held(fleet: Fleet) -> dict[str, int]:
    return by_id(fleet, fleet.hits(KEYS).held)


def due(fleet: Fleet) -> dict[str, int]:
    return by_id(fleet, fleet.hits(KEYS).due)


def by_id(fleet: Fleet, blocks: Floats) -> dict[str, int]:
    """Those that have any."""
    return {worker_id: int(count) for worker_id, count in zip(fleet.snapshot.ids, blocks, strict=True) if count}


def hello(worker_id: str, incarnation: bytes = b"1") -> pb.Hello:
    role = pb.ROLE_DECODE if worker_id.startswith("d") else pb.ROLE_PREFILL
    return pb.Hello(worker_id=worker_id, incarnation=incarnation, role=role, model_fingerprint=b"model", num_blocks=50)


def report(available: int = 50, running: int = 0, queued: int = 0, seen: int = 0) -> pb.LoadReport:
    return pb.LoadReport(
        running=running,
        queued_prefill_tokens=queued,
        available_blocks=available,
        num_blocks=50,
        placements_seen={"router": seen} if seen else {},
    )


def stored(sequence: int, parent: bytes, keys: list[bytes], snapshot: bool = False) -> pb.CacheEvents:
    event = pb.CacheEvent(parent=parent, stored=b"".join(keys))
    return pb.CacheEvents(sequence=sequence, events=[event], snapshot=snapshot)


def make_fleet() -> tuple[Fleet, WorkerRecord, WorkerRecord]:
    fleet = Fleet("router", PRIORS)
    decode, prefill = fleet.joined(hello("d0")), fleet.joined(hello("p0"))
    fleet.reported(decode, report())
    fleet.reported(prefill, report())
    return fleet, decode, prefill


def test_a_placement_counts_until_the_report_that_has_seen_it() -> None:
    fleet, decode, prefill = make_fleet()
    placed = fleet.placed(Decision("d0", "p0", True, None, 16, 0, 0, 0, 1, ""), DEMAND, KEYS)
    decode_view, prefill_view = fleet.views()
    assert (decode_view.running, decode_view.available_blocks) == (1, 44)
    assert prefill_view.queued_prefill_tokens == 16

    fleet.reported(decode, report(available=44, running=1, seen=placed.sequence))
    assert [view.available_blocks for view in fleet.views()] == [44, 50]
    fleet.reported(prefill, report(queued=16, seen=placed.sequence))
    assert [view.queued_prefill_tokens for view in fleet.views()] == [0, 16]

    fleet.ended(placed)
    assert [view.running for view in fleet.views()] == [1, 0]


def test_a_placement_takes_what_its_worker_promises_and_not_all_it_may_need() -> None:
    fleet = Fleet("router", PRIORS)
    made = hello("d0")
    made.reserve_output_tokens = 8
    worker = fleet.joined(made)
    fleet.reported(worker, report())
    demand = Demand(20, 4, 30, 4, 100, chain_tokens=(20,), max_chain_tokens=120)
    assert [demand.num_blocks_to_reserve(reserve) for reserve in (0, 1, 8, 1000)] == [30, 6, 7, 30]
    fleet.placed(Decision("d0", None, False, None, 0, 0, 0, 0, 1, ""), demand, [])
    assert [view.available_blocks for view in fleet.views()] == [43]


def test_choices_take_what_they_share_once() -> None:
    demand = Demand(21, 5, 95, 4, 100, chain_tokens=(21, 23, 21), max_chain_tokens=120, shared_tokens=20)
    assert demand.num_blocks_to_reserve(4) == 5 + (7 - 5) + (7 - 5) + (7 - 5)


# ------------------------------------------------------------------------------------------- the shared store


def shares(worker_id: str, store: str = "folder:1") -> pb.Hello:
    said = hello(worker_id)
    said.store = store
    return said


def in_store(sequence: int, stored: list[bytes] = (), removed: list[bytes] = ()) -> pb.CacheEvents:  # type: ignore[assignment]
    event = pb.CacheEvent(stored=b"".join(stored), removed=b"".join(removed), shared=True)
    return pb.CacheEvents(sequence=sequence, events=[event])


def sharing_fleet(*hellos: pb.Hello) -> tuple[Fleet, list[WorkerRecord]]:
    fleet = Fleet("router", PRIORS)
    workers = [fleet.joined(each) for each in hellos]
    for worker in workers:
        fleet.reported(worker, report())
        fleet.cache_changed(worker, pb.CacheEvents(snapshot=True))
    return fleet, workers


def test_the_shared_store_is_read_like_a_worker_that_starts_nothing() -> None:
    fleet, (d0, d1, p0) = sharing_fleet(shares("d0"), shares("d1"), shares("p0"))
    (store,) = [row for row in fleet.snapshot.ids if row.startswith("shared-store/")]
    assert fleet.cache_changed(p0, in_store(0, KEYS))
    assert held(fleet) == {store: 4}
    decision = fleet.decide(DEMAND, KEYS)
    assert (decision.decode_id, decision.lender_id, decision.lender_computes) == ("d0", store, False)
    assert decision.hit_blocks == 4
    placed = fleet.placed(decision, DEMAND, KEYS)
    assert placed.lender is None, "workers read the store by themselves"
    assert [view.worker_id for view in fleet.views()] == ["d0", "d1", "p0"]
    assert p0.num_cached == 0
    fleet.ended(placed)
    assert fleet.cache_changed(d1, in_store(0, removed=KEYS[2:]))
    assert held(fleet) == {store: 2}
    assert d0.num_cached == 0


def test_a_store_is_read_by_those_who_share_it_and_goes_with_the_last_of_them() -> None:
    fleet, (d0, d1, d2) = sharing_fleet(shares("d0", ""), shares("d1", "folder:1"), shares("d2", "folder:2"))
    stores = sorted(row for row in fleet.snapshot.ids if row.startswith("shared-store/"))
    assert len(stores) == 2
    rows = fleet.snapshot.row_of
    for store in stores:
        readers = [
            worker.worker_id
            for worker in (d0, d1, d2)
            if fleet.snapshot.compatible[rows[worker.worker_id], rows[store]]
        ]
        assert readers == [worker.worker_id for worker in (d1, d2) if worker.store_id == store]
    fleet.cache_changed(d1, in_store(0, KEYS))
    assert held(fleet) == {d1.store_id: 4}
    decision = fleet.decide(DEMAND, KEYS)
    assert (decision.decode_id, decision.lender_id) == ("d1", d1.store_id)
    fleet.left(d1)
    assert held(fleet) == {}
    assert d1.store_id not in fleet.snapshot.ids


def test_a_restarted_worker_does_not_clear_what_it_had_written() -> None:
    fleet, (d0, d1) = sharing_fleet(shares("d0"), shares("d1"))
    fleet.cache_changed(d0, in_store(0, KEYS))
    fleet.cache_changed(d0, pb.CacheEvents(sequence=9, snapshot=True))
    assert held(fleet) == {d0.store_id: 4}
    fleet.left(d0)
    assert held(fleet) == {d1.store_id: 4}
