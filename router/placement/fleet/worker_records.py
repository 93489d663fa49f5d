"""Records of workers and of placements, which `fleet.py` keeps.

Workers as placement sees them: their last report, plus placements that are not in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from kvcache.block_keys import BlockKey
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.in_flight import Flows, Transfer, TransfersInFlight
from router.placement.place import Decision
from router.placement.snapshots import PlacementSnapshot
from router.placement.worker_table import WorkerView


class UnreportedPlacements:
    """Placements that a worker's reports do not include yet, and their sums."""

    __slots__ = ("_taken", "blocks", "streams", "tokens")

    def __init__(self) -> None:
        self.streams = 0
        self.tokens = 0
        """Tokens still to be computed."""
        self.blocks = 0
        """Reserved blocks."""
        self._taken: dict[ActivePlacement, tuple[int, int, int]] = {}
        """Streams, tokens and blocks of each placement."""

    def __len__(self) -> int:
        return len(self._taken)

    def __contains__(self, placed: "ActivePlacement") -> bool:
        return placed in self._taken

    def add(self, placed: "ActivePlacement", streams: int = 0, tokens: int = 0, blocks: int = 0) -> None:
        self._taken[placed] = streams, tokens, blocks
        self._count(streams, tokens, blocks)

    def computed(self, placed: "ActivePlacement") -> None:
        """Count a placement's tokens as computed."""
        streams, tokens, blocks = self._taken[placed]
        self._taken[placed] = streams, 0, blocks
        self.tokens -= tokens

    def remove(self, placed: "ActivePlacement") -> None:
        """Remove a placement."""
        streams, tokens, blocks = self._taken.pop(placed)
        self._count(-streams, -tokens, -blocks)

    def see(self, sequence: int) -> None:
        """Drop all placements up to `sequence`, which a report includes."""
        for placed in [placed for placed in self._taken if placed.sequence <= sequence]:
            self.remove(placed)

    def _count(self, streams: int, tokens: int, blocks: int) -> None:
        self.streams += streams
        self.tokens += tokens
        self.blocks += blocks


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One membership, from Hello to the end of its stream."""

    hello: pb.Hello
    load: pb.LoadReport | None = None
    num_reports: int = 0
    """Number of load reports, unchanged ones included."""
    next_cache_sequence: int | None = None
    """Number of the next cache event; None until the first snapshot."""
    lost: bool = False
    """Whether its engine fell silent; calls to it are cancelled."""
    on_lost: set[Callable[[], object]] = field(default_factory=set)
    unreported_decodes: UnreportedPlacements = field(default_factory=UnreportedPlacements)
    """Placements on it that no report of its includes."""
    unreported_lends: UnreportedPlacements = field(default_factory=UnreportedPlacements)
    """Placements on it as a lender that no report includes, until their first token."""
    num_cached: int = 0
    """Blocks that it reported as held."""
    asked_blocks: int = 0
    """Prompt blocks that it should compute or lend, over successful streams."""
    hit_blocks: int = 0
    """Blocks among those that it held already."""
    draining: bool = False
    """Whether it is stopping: it accepts nothing, and its blocks can be read."""
    avoided: bool = False
    """Whether nothing starts there for a while, because placements failed."""
    failing: bool = False
    """Whether its circuit breaker is open or half-open."""
    stream_key: bytes = b""
    """Key of the connection that brings its events."""
    failing_lenders: "set[WorkerRecord]" = field(default_factory=set)
    """Lenders for which the circuit breaker of its loans is open or half-open."""
    server: str = ""
    """Abilities of a stock server, in words; empty for a worker of Tandem."""
    store_id: str = field(init=False, default="")
    """Row of the worker table for the store that it shares, by model and store; empty without one."""

    def __post_init__(self) -> None:
        if self.hello.store:
            which = blake2b(self.hello.model_fingerprint + self.hello.store.encode(), digest_size=4)
            self.store_id = f"shared-store/{which.hexdigest()}"

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def decodes(self) -> bool:
        return self.hello.role == pb.ROLE_DECODE


@dataclass(slots=True, eq=False)
class ActivePlacement:
    """A placement in progress."""

    sequence: int
    decode: WorkerRecord
    lender: WorkerRecord | None
    lender_tokens: int
    own_tokens: int
    """Prompt tokens that the decode worker computes."""
    lender_computes: bool
    source: WorkerRecord | None
    demand: Demand
    keys: tuple[BlockKey, ...]
    predicted_ttft_s: float
    placement_snapshot: PlacementSnapshot | None
    """Snapshot of the decision, where these are kept; its keeper takes it from here."""
    running_before: int
    """Streams on the decode worker without this one."""
    queued_before: tuple[int, int]
    """Prompt tokens queued at the decode worker and at the lender, without this request's."""
    transfers: tuple[Transfer, ...] = ()
    """Its transfers, in flight until its first token."""
    started: bool = False
    """Whether the first token has come, so that caches have reported what it left in them."""
    failed: bool = False
    """Whether its decode worker failed."""
    lent: bool | None = None
    """Whether its lender lent; None when unknown or not needed."""

    def transfer_from(self, lender_id: str) -> Transfer | None:
        """Return its decode worker's transfer from this lender or store."""
        to_it = (each for each in self.transfers if each.borrower_id == self.decode.worker_id)
        return next((each for each in to_it if each.lender_id == lender_id), None)

    @property
    def num_streams(self) -> int:
        return max(1, len(self.demand.chain_tokens))


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
