"""Which workers a router names to a new one."""

from protos import membership_pb2 as pb
from router.placement.fleet.introductions import MAX_PEERS, peers_of
from router.placement.fleet.worker_records import WorkerRecord


def hello(worker_id: str, role: "pb.Role.ValueType", host: str = "10.0.0.1", **fields: object) -> pb.Hello:
    said = {"model_fingerprint": b"model", "transport": "nixl", "incarnation": worker_id.encode()} | fields
    return pb.Hello(worker_id=worker_id, role=role, address=f"{host}:1", **said)  # type: ignore[arg-type]


def named(new: pb.Hello, *others: WorkerRecord) -> list[str]:
    return [peer.worker_id for peer in peers_of(new, others)]


NEW = hello("new", pb.ROLE_DECODE)


def test_those_of_the_other_role_come_first_and_then_those_of_its_host() -> None:
    others = [
        WorkerRecord(hello("decode far", pb.ROLE_DECODE, "10.0.0.2")),
        WorkerRecord(hello("decode here", pb.ROLE_DECODE)),
        WorkerRecord(hello("prefill far", pb.ROLE_PREFILL, "10.0.0.2")),
        WorkerRecord(hello("prefill here", pb.ROLE_PREFILL)),
        WorkerRecord(NEW),
    ]
    assert named(NEW, *others) == ["prefill here", "prefill far", "decode here", "decode far"]
    (first, *_) = peers_of(NEW, others)
    assert (first.address, first.incarnation) == ("10.0.0.1:1", b"prefill here")


def test_none_is_named_with_which_no_block_is_exchanged() -> None:
    leaving, lost = WorkerRecord(hello("leaving", pb.ROLE_PREFILL)), WorkerRecord(hello("lost", pb.ROLE_PREFILL))
    leaving.draining = lost.lost = True
    other_weights = WorkerRecord(hello("weights", pb.ROLE_PREFILL, model_fingerprint=b"other"))
    other_transport = WorkerRecord(hello("transport", pb.ROLE_PREFILL, transport="ucxx"))
    other_version = WorkerRecord(hello("version", pb.ROLE_PREFILL, loan_version=1))
    assert named(NEW, leaving, lost, other_weights, other_transport, other_version) == []


def test_a_large_fleet_shares_its_new_workers() -> None:
    fleet = [WorkerRecord(hello(f"prefill-{number}", pb.ROLE_PREFILL, f"10.0.1.{number}")) for number in range(100)]
    counts = dict.fromkeys((worker.worker_id for worker in fleet), 0)
    for number in range(100):
        told = named(hello(f"decode-{number}", pb.ROLE_DECODE), *fleet)
        assert len(told) == len(set(told)) == MAX_PEERS
        for worker_id in told:
            counts[worker_id] += 1
    assert max(counts.values()) < 3 * MAX_PEERS
    assert min(counts.values()) > 0
