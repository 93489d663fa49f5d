"""Worker events: cache changes and load reports for routers, made from engine messages.

Pure.
"""

from collections.abc import Iterable, Iterator, Sequence

from engine.messages.from_engine import CacheChanged, LoadReport
from kvcache.pool import CacheEvent, Stored
from protos import membership_pb2 as pb

PART_BYTES = 4 << 20
"""Largest size of a message; a router processes one at a time."""


def summary(news: Sequence[CacheChanged | LoadReport]) -> list[CacheChanged | LoadReport]:
    """Merge messages: consecutive cache changes into one, without those a snapshot replaces; then the last load."""
    snapshot: list[CacheChanged] = []
    sequence, events = 0, list[CacheEvent]()
    load: list[LoadReport] = []
    for message in news:
        if isinstance(message, LoadReport):
            load = [message]
        elif message.snapshot:
            snapshot, events = [message], []
        else:
            sequence = sequence if events else message.sequence
            events += message.events
    changed = [CacheChanged(sequence, tuple(events))] if events else []
    return [*snapshot, *changed, *load]


def messages_of(caches: Iterable[pb.CacheEvents], load: pb.LoadReport | None) -> Iterator[pb.WorkerMessage]:
    """Return as few messages as possible; the load goes with the last cache change."""
    message: pb.WorkerMessage | None = None
    for cache in caches:
        if message is not None:
            yield message
        message = pb.WorkerMessage(cache=cache)
    if load is not None:
        message = pb.WorkerMessage() if message is None else message
        message.load.CopyFrom(load)
    if message is not None:
        yield message


def load_report(load: LoadReport, draining: bool) -> pb.LoadReport:
    return pb.LoadReport(
        step=load.step,
        running=load.running,
        loans=load.loans,
        queued_loans=load.queued_loans,
        queued_prefill_tokens=load.queued_prefill_tokens,
        available_blocks=load.available_blocks,
        num_blocks=load.num_blocks,
        placements_seen=load.placements_seen,
        preempted=load.preempted,
        preemptions=load.preemptions,
        draining=draining,
        decoding=load.decoding,
    )


def cache_events(changed: CacheChanged) -> pb.CacheEvents:
    events = [
        pb.CacheEvent(parent=event.parent, stored=b"".join(event.keys), shared=event.shared)
        if isinstance(event, Stored)
        else pb.CacheEvent(removed=b"".join(event.keys), shared=event.shared)
        for event in changed.events
    ]
    return pb.CacheEvents(sequence=changed.sequence, events=events, snapshot=changed.snapshot)


def parts_of(changed: pb.CacheEvents) -> Iterator[pb.CacheEvents]:
    """Split changes into messages that gRPC accepts, however many blocks the stores hold.

    Parts of a snapshot after its first are `continued`.
    """
    if changed.ByteSize() <= PART_BYTES:  # the common case
        yield changed
        return
    part = pb.CacheEvents(sequence=changed.sequence, snapshot=changed.snapshot)
    num_bytes = 0
    for event in changed.events:
        if num_bytes and num_bytes + event.ByteSize() > PART_BYTES:
            yield part
            sequence = part.sequence if changed.snapshot else part.sequence + len(part.events)
            part, num_bytes = pb.CacheEvents(sequence=sequence, continued=changed.snapshot), 0
        part.events.append(event)
        num_bytes += event.ByteSize()
    yield part
