"""Workers as placement sees them: their last report, plus placements that are not in it.

Pure.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from protos import membership_pb2 as pb
from router.placement.fleet.worker_records import WorkerRecord
from router.placement.in_flight import Flows, Transfer, TransfersInFlight
from router.placement.place import Decision
from router.placement.worker_table import WorkerView


def view_of(worker: WorkerRecord, in_flight: TransfersInFlight) -> WorkerView:
    """Return a reporting worker as placement sees it."""
    load = worker.load
    assert load is not None, "it has reported"
    return WorkerView(
        worker_id=worker.worker_id,
        decodes=worker.decodes,
        fingerprint=worker.hello.model_fingerprint,
        loan_version=worker.hello.loan_version,
        running=running_of(worker),
        decoding=load.decoding,
        queued_prefill_tokens=queued_of(worker),
        available_blocks=available_of(worker),
        num_blocks=load.num_blocks,
        reserve_output_tokens=worker.hello.reserve_output_tokens,
        draining=worker.draining,
        traffic_share=worker.hello.traffic_share,
        reads_media=worker.hello.reads_media,
        files=worker.hello.config_fingerprint.hex(),
        revision=worker.hello.revision.hex(),
        adapters=frozenset(adapter.fingerprint.hex() for adapter in worker.hello.adapters),
        outgoing=in_flight.outgoing(worker.worker_id),
        incoming=in_flight.incoming(worker.worker_id),
    )


def transfers_of(decision: Decision) -> Iterator[Transfer]:
    """Yield the transfers of a placement."""
    if decision.lender_id is not None:
        if decision.held_bytes:
            yield Transfer(decision.decode_id, decision.lender_id, decision.held_bytes)
        if decision.source_id is not None and decision.source_bytes:
            yield Transfer(decision.lender_id, decision.source_id, decision.source_bytes)


def store_view(store_id: str, fingerprint: bytes, outgoing: Flows) -> WorkerView:
    """Return a shared store as placement sees it: like a worker that drains, it starts nothing and can be read."""
    return WorkerView(
        worker_id=store_id,
        decodes=True,
        fingerprint=fingerprint,
        loan_version=None,
        running=0,
        decoding=0,
        queued_prefill_tokens=0,
        available_blocks=-1,
        num_blocks=0,
        draining=True,
        outgoing=outgoing,
    )


def adapters_of(hellos: Iterable[pb.Hello]) -> dict[str, bytes]:
    """Return the fingerprint of each adapter by name.

    Of several revisions, the one that most workers have, and of equally many the first in order.
    """
    counts: dict[str, Counter[bytes]] = {}
    for hello in hellos:
        for adapter in hello.adapters:
            counts.setdefault(adapter.name, Counter())[adapter.fingerprint] += 1
    return {name: min(versions, key=lambda each: (-versions[each], each)) for name, versions in sorted(counts.items())}


def running_of(worker: WorkerRecord) -> int:
    """Return a reporting worker's streams; like the next two, with placements not yet in its reports."""
    assert worker.load is not None
    return worker.load.running + worker.unreported_decodes.streams


def queued_of(worker: WorkerRecord) -> int:
    """Return a worker's queued prompt tokens."""
    assert worker.load is not None
    return worker.load.queued_prefill_tokens + worker.unreported_lends.tokens + worker.unreported_decodes.tokens


def available_of(worker: WorkerRecord) -> int:
    """Return a worker's available blocks; -1: nothing may start there."""
    assert worker.load is not None
    return -1 if worker.avoided else worker.load.available_blocks - worker.unreported_decodes.blocks
