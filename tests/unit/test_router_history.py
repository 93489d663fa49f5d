"""Records of requests in a router's memory: exactly what decisions were made of, and no more than it may hold."""

import random

from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from router.observability.records import RECORD_BYTES, Placement, RequestRecord, RequestRecords
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.place import explain
from router.placement.rates import Priors

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.001, 0.001)
DEMAND = Demand(num_tokens=41, num_usable_blocks=10, num_total_blocks=12, block_tokens=4, block_bytes=100)
KEYS = [bytes([number]) * 16 for number in range(10)]


def fleet_of(num_decode: int, num_prefill: int) -> Fleet:
    fleet = Fleet("router", PRIORS)
    fleet.keeps_snapshots = True
    for number in range(num_decode + num_prefill):
        role = pb.ROLE_DECODE if number < num_decode else pb.ROLE_PREFILL
        hello = pb.Hello(worker_id=f"w{number}", role=role, model_fingerprint=b"model")
        worker = fleet.joined(hello)
        fleet.reported(worker, pb.LoadReport(available_blocks=100, num_blocks=100))
        held = b"".join(KEYS[: random.Random(number).randrange(10)])
        fleet.cache_changed(worker, pb.CacheEvents(snapshot=True, events=[pb.CacheEvent(stored=held)]))
    return fleet


def place(fleet: Fleet) -> tuple[ActivePlacement, Placement]:
    decision = fleet.decide(DEMAND, KEYS)
    assert decision is not None
    placed = fleet.placed(decision, DEMAND, KEYS)
    return placed, Placement(1, 0.0, decision, placed.placement_snapshot)


def test_a_decision_is_explained_as_it_stood_whatever_happens_afterwards() -> None:
    fleet = fleet_of(3, 3)
    compared = explain(DEMAND, fleet.snapshot, fleet.hits(KEYS), fleet.rates)
    placed, placement = place(fleet)
    kv = public_pb.KvReceipt(moved_blocks=9, moved_bytes=900, lender_cached_blocks=9, computed_tokens=4)
    stages = [
        public_pb.Stage(name=name, where=placed.decode.worker_id, duration_ms=1e4)
        for name in ("lender prefill", "transfer of the last blocks", "prompt tail")
    ]
    said = public_pb.Placement(decode_worker=placed.decode.worker_id, lender=placement.decision.lender_id, attempt=1)
    assert said.lender, "its links are learnt anew"
    for _ in range(3):
        place(fleet)
    fleet.finished(placed, public_pb.Finish(receipt=public_pb.Receipt(kv=kv, stages=stages, placement=said)), 0.5)
    fleet.left(fleet.workers[0])
    assert explain(DEMAND, fleet.snapshot, fleet.hits(KEYS), fleet.rates) != compared
    assert placement.placement_snapshot.candidates() == compared
    assert (compared[0].decode_id, compared[0].lender_id) == (placed.decode.worker_id, said.lender)
    assert compared[0].hit_blocks == placement.decision.hit_blocks


def test_what_may_be_taken_of_each_worker_is_kept_too() -> None:
    fleet = fleet_of(2, 0)
    room = fleet.snapshot.available_blocks.copy()
    room[0] = -1
    decision = fleet.decide(DEMAND, KEYS, room)
    assert decision is not None
    placement_snapshot = fleet.placed(decision, DEMAND, KEYS).placement_snapshot
    assert {candidate.decode_id for candidate in placement_snapshot.candidates()} == {"w1"}


def test_what_is_remembered_is_bounded_and_the_last() -> None:
    fleet = fleet_of(3, 3)
    records = RequestRecords(40 * RECORD_BYTES)
    early = RequestRecord("early", "", 0.0)
    records.add(early)
    for number in range(500):
        record = RequestRecord(f"r{number}", "", 0.0)
        records.add(record)
        for _ in range(number % 3):
            placed, placement = place(fleet)
            records.placed(record, placement)
            fleet.ended(placed)
        assert records.num_bytes <= 40 * RECORD_BYTES
        placed, placement = place(fleet)
        records.placed(early, placement)
        fleet.ended(placed)
    assert 5 < len(records) <= 40
    assert records.find("r499", None) is record
    assert records.find("r0", None) is None
    remembered = [found for number in range(500) if (found := records.find(f"r{number}", None))]
    assert records.num_bytes == sum(each.num_bytes for each in remembered), "what is forgotten holds nothing"
    assert not any(placement.placement_snapshot for placement in early.placements)


def test_an_id_is_its_tenants_own_and_the_last_of_that_name_counts() -> None:
    records = RequestRecords(1 << 20)
    same = [RequestRecord("same", tenant, 0.0) for tenant in ("a", "b", "a")]
    for record in same:
        records.add(record)
    assert records.find("same", "a") is same[2]
    assert records.find("same", "b") is same[1]
    assert records.find("same", None) is same[2]
    assert records.find("same", "c") is None
