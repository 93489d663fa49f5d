"""Choice of the workers that a new worker is told of, so that it connects to them before its first request.

Pure.
"""

from collections.abc import Iterable
from hashlib import blake2b

from protos import loans_pb2
from protos import membership_pb2 as pb
from router.placement.fleet.worker_records import WorkerRecord

MAX_PEERS = 16
"""Workers that one is told of. A full mesh of N workers would be N x N connections. With this many, a new worker is
connected before its first report, and each pair beyond them connects with its first loan."""


def peers_of(hello: pb.Hello, workers: Iterable[WorkerRecord]) -> list[loans_pb2.Holder]:
    """Return the workers with which a new one will likely exchange blocks, the likeliest first.

    Those of the other role come first, then those of its host. Among equals the order is another one for each worker,
    so that no worker is told to all.
    """
    met = [
        worker.hello
        for worker in workers
        if worker.worker_id != hello.worker_id
        and not (worker.draining or worker.lost)
        and worker.hello.model_fingerprint == hello.model_fingerprint
        and worker.hello.transport == hello.transport
        and worker.hello.loan_version == hello.loan_version
    ]

    def distance(peer: pb.Hello) -> tuple[bool, bool, bytes]:
        pair = blake2b(f"{hello.worker_id}\n{peer.worker_id}".encode(), digest_size=8).digest()
        return peer.role == hello.role, _host(peer) != _host(hello), pair

    return [holder_of(peer) for peer in sorted(met, key=distance)[:MAX_PEERS]]


def holder_of(hello: pb.Hello) -> loans_pb2.Holder:
    """Return a worker as its peers reach it."""
    return loans_pb2.Holder(
        worker_id=hello.worker_id,
        address=hello.address,
        incarnation=hello.incarnation,
        loan_address=hello.loan_address,
    )


def _host(hello: pb.Hello) -> str:
    return hello.address.rpartition(":")[0]
