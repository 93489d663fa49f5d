"""Choice of the workers that a new worker is told of, so that it connects to them before its first request.

Choice of the decode workers on which a prompt is warmed.

Pure.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from kvcache.block_keys import BlockKey
from protos import loans_pb2
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord
from router.placement.place import place_on, startable

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


def by_cost(
    fleet: Fleet, demand: Demand, keys: Sequence[BlockKey], count: int, with_store: bool = False
) -> tuple[list[str], int]:
    """Return at most `count` decode workers, the cheapest first, and how many could hold the request.

    They may be full now. `with_store`: only those that share a store.
    """
    hits, workers, chosen = fleet.hits(keys, demand.other_keys, demand.session), fleet.snapshot, list[str]()
    rows = np.flatnonzero(startable(demand, workers, workers.num_blocks))
    if with_store:
        shares = {worker.worker_id for worker in fleet.workers if worker.store_id}
        rows = np.array([row for row in rows if workers.ids[row] in shares], np.int64)
    num_able = len(rows)
    while len(rows) and len(chosen) < count:
        best = place_on(rows, demand, workers, hits, fleet.rates).decode_id
        chosen.append(best)
        rows = rows[rows != workers.row_of[best]]
    return chosen, num_able
