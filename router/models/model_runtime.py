"""Model runtime: all that belongs to one served model.

Its workers may have several revisions of the model while it is being replaced: other weights, config or tokenizer under
the same name. A new request is *bound* to the files of one of them, by which its prompt is read; once its output has
begun, also to the weights.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from cluster.errors import InvalidRequest, Unavailable
from cluster.network.tls import MemberIdentity
from engine.core_types import Pooler
from kvcache.block_keys import BlockKey, block_keys, root_key
from kvcache.items import Item
from protos import inference_pb2 as pb
from protos import membership_pb2
from router.admission.dispatcher import Dispatcher
from router.admission.limits.tenant_limits import Shares
from router.admission.refusals import Refusal
from router.decode_client.decode_streams import DecodeStreams
from router.models.config import Costs
from router.models.grammars.grammar_checker import GrammarChecker
from router.models.media import MediaClient, MediaSource, ReadyMedia, sources_of
from router.models.model_files import ModelFiles
from router.placement.demand import Demand, traffic_hash_of
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord
from router.placement.request_demand import demand_of

MAX_VERSIONS = 4
"""Versions of a model's weights whose caches a request considers; a prompt's keys are hashed for each."""
REVISION_BYTES = 16
"""Length of a model's revision; that of an adapter follows it in an Origin."""
MAX_REVISIONS = 4
"""Sets of files of one model that a router keeps, its own included; those that no worker has leave first."""


class ModelRuntime:
    """Files, workers and queue of one model.

    Failover stays within it. Those that `bound` and `with_adapter` return share everything but their files, their
    workers and their block keys.
    """

    def __init__(
        self,
        files: ModelFiles,
        fleet: Fleet,
        dispatcher: Dispatcher,
        worker_waits: Shares,
        trust: MemberIdentity | None = None,
    ) -> None:
        """Create it with the router's own files; `worker_waits` counts requests that wait for a first worker."""
        self.name = files.name
        self.entry = files.entry
        self.fleet = fleet
        self.dispatcher = dispatcher
        self.links = DecodeStreams(fleet, trust)
        addresses = files.entry.preprocessors
        self._media = MediaClient(files.name, addresses, trust) if addresses else None
        self._last_roster: _Roster | None = None
        self.costs = Costs(files.entry)
        self.base_model = ""
        """Name of the model that the adapter changes; empty without an adapter."""
        self.adapter = b""
        """Fingerprint of the LoRA adapter; empty for none."""
        self._worker_waits = worker_waits
        self._reported = asyncio.Event()
        """Event set when a worker reports, for requests that wait for the first one."""
        self._revisions: dict[bytes, _Revision] = {}
        """Files that the router has of the model, its own first, by their fingerprint."""
        self._bound: dict[tuple[str, bytes, bytes], ModelRuntime] = {}
        """Bound runtimes, by name and fingerprints of files and adapter."""
        self.receiving = asyncio.Lock()
        """Lock held while a worker sends files: of many that join at once, one sends them."""
        self.unbound = self
        """Runtime with the workers of all revisions."""
        self.is_bound = False
        """Whether it has only workers with its own files and its own adapter."""
        self.revision = b""
        """Revision of its workers, of those that have its files; empty: any."""
        self._add(files)
        self._use(files.config_fingerprint)

    def _add(self, files: ModelFiles) -> None:
        self._revisions[files.config_fingerprint] = _Revision(files)

    def _use(self, config_fingerprint: bytes) -> None:
        revision = self._revisions[config_fingerprint]
        files, self.grammars = revision.files, revision.grammars
        self.files = files
        self.config_fingerprint = files.config_fingerprint
        self.model_dir = files.model_dir
        self.encoder = files.encoder
        self.clamps = files.clamps

    async def close(self) -> None:
        for number, revision in enumerate(self._revisions.values()):
            await revision.grammars.close()
            if number:
                revision.files.remove()

    # ------------------------------------------------------------------ revisions

    def knows(self, config_fingerprint: bytes) -> bool:
        """Return whether the router has the files with this fingerprint."""
        return config_fingerprint in self._revisions

    async def receive(self, hello: membership_pb2.Hello, messages: AsyncIterator[membership_pb2.WorkerMessage]) -> None:
        """Read the files that a worker sends.

        Raises ServiceError.
        """
        self._add(await self.files.of_worker(hello, messages))
        in_use = {worker.hello.config_fingerprint for worker in self.fleet.workers} | {hello.config_fingerprint}
        for number, fingerprint in enumerate(tuple(self._revisions)):
            if len(self._revisions) > MAX_REVISIONS and number and fingerprint not in in_use:
                await self._forget(fingerprint)

    async def _forget(self, config_fingerprint: bytes) -> None:
        revision = self._revisions.pop(config_fingerprint)
        for key in [key for key in self._bound if key[1] == config_fingerprint]:
            del self._bound[key]
        await revision.grammars.close()
        revision.files.remove()

    def for_request(self, request_id: str, session: str = "", embeds: bool = False) -> "ModelRuntime":
        """Return the runtime bound to the files by which a new request is read; itself while no worker is there.

        Revisions get new requests by their numbers of workers, and canaries by their share. Requests of one `session`
        stay together.
        """
        starting = self.starting_workers(embeds)
        if self.is_bound or not starting:
            return self
        if not self._roster().several:
            return self.bound(*self._variant(starting[0]))
        share = max(worker.hello.traffic_share for worker in starting)
        is_canary = traffic_hash_of(request_id) < share
        could = [worker for worker in starting if (worker.hello.traffic_share > 0) == is_canary] or starting
        ordered = sorted(could, key=self._variant)
        return self.bound(*self._variant(ordered[int(traffic_hash_of(f"{session or request_id}/") * len(ordered))]))

    def bound(self, config_fingerprint: bytes, adapter: bytes = b"") -> "ModelRuntime":
        """Return the runtime of the workers with these files, and this adapter."""
        key = self.name, config_fingerprint, adapter
        if (bound := self._bound.get(key)) is None:
            bound = self._bound[key] = copy.copy(self)
            bound._last_roster, bound.unbound, bound.is_bound, bound.adapter = None, self, True, adapter
            bound._use(config_fingerprint)
        return bound

    def of_revision(self, revision: bytes) -> "ModelRuntime | None":
        """Return the runtime of the workers with a revision, as an Origin has it; None without such a worker."""
        weights, adapter = revision[:REVISION_BYTES], revision[REVISION_BYTES:]
        for worker in self.workers():
            variant = self._variant(worker)
            if worker.hello.revision == weights and variant[1] == adapter:
                return self.bound(*variant)
        return None

    def at(self, revision: bytes) -> "ModelRuntime":
        """Return the runtime of those workers that have this revision."""
        if not revision or revision == self.revision:
            return self
        begun = copy.copy(self)
        begun._last_roster, begun.revision = None, revision
        return begun

    def shown(self) -> "ModelRuntime":
        """Return the runtime bound to the files of most workers, for calls that generate nothing."""
        counts = Counter(self._variant(worker) for worker in self.decode_workers())
        return self.bound(*max(counts, key=lambda variant: (counts[variant], variant))) if counts else self

    def _variant(self, worker: WorkerRecord) -> tuple[bytes, bytes]:
        """Return the fingerprints of a worker's files and of its adapter with this runtime's name."""
        hello = worker.hello
        own = (each.fingerprint for each in hello.adapters if each.name == self.name) if self.base_model else ()
        return hello.config_fingerprint, next(iter(own), b"")

    @property
    def generates(self) -> bool:
        """Whether the model can generate; on vLLM's pooling runner none can."""
        return self.files.generates and self._roster().pooler is None

    @property
    def pooler(self) -> Pooler | None:
        """Way to the model's vectors, as the workers' engine has it or as the files say; None: there are none."""
        return self._roster().pooler or self.files.pooler

    def check_pools(self) -> Pooler:
        """Return the way to the model's vectors.

        Raises InvalidRequest for a model without.
        """
        if (pooler := self.pooler) is None:
            raise InvalidRequest("model", f"{self.name!r} makes no embeddings: {self.files.pooler_fault}")
        return pooler

    def media(self, sources: Sequence[MediaSource]) -> MediaClient:
        """Return the client that makes media ready.

        Raises InvalidRequest for a model that reads text only.
        """
        if self._media is None:
            raise InvalidRequest(sources[0].field, self._reads_text_only)
        return self._media

    async def media_again(self, ready: ReadyMedia) -> ReadyMedia:
        """Have media made ready anew whose preprocessor is gone.

        Raises ServiceError.
        """
        assert self._media is not None, "it made them ready"
        return await self._media.again(ready)

    @property
    def _reads_text_only(self) -> str:
        return f"{self.name!r} reads text only here: the setting `preprocessor` of the model is empty"

    def fault(self, request: pb.GenerateRequest) -> str:
        """Return why this model cannot read the prompt; empty where it can."""
        if self._media is None and sources_of(request):
            return self._reads_text_only
        return self.encoder.fault(request)

    def with_adapter(self, name: str) -> "ModelRuntime | None":
        """Return the model of this name that a LoRA adapter makes of this one; None where no worker has the adapter.

        It shares everything but its name, its workers and its block keys.
        """
        if (fingerprint := self.fleet.adapters.get(name)) is None:
            return None
        adapted = copy.copy(self)
        adapted.name, adapted.base_model, adapted.adapter = name, self.name, fingerprint
        adapted._last_roster, adapted.unbound = None, adapted
        return adapted

    def workers(self) -> list[WorkerRecord]:
        """Workers that serve it; with an adapter only those that have it."""
        return [worker for worker in self.fleet.workers if self._serves(worker.hello)]

    def _serves(self, hello: membership_pb2.Hello) -> bool:
        if self.is_bound and hello.config_fingerprint != self.config_fingerprint:
            return False
        if self.revision and hello.revision not in (b"", self.revision):
            return False
        if not self.base_model:
            return True
        if self.is_bound:
            return any(each.fingerprint == self.adapter for each in hello.adapters)
        return any(each.name == self.name for each in hello.adapters)

    def decode_workers(self) -> list[WorkerRecord]:
        """Decode workers whose engine has reported; a hanging one may join again and again without a report."""
        return self._roster().decode

    def starting_workers(self, embeds: bool) -> list[WorkerRecord]:
        """Return the workers on which requests start: decode workers, or for embeddings prefill workers, if any."""
        roster = self._roster()
        return roster.prefill if embeds and roster.prefill else roster.decode

    def _roster(self) -> "_Roster":
        """Return the workers as they are now; every request asks for them, and they seldom change."""
        number = self.fleet.num_roster_changes
        if (roster := self._last_roster) is None or roster.number != number:
            workers = self.workers()
            reporting = [worker for worker in workers if worker.load is not None and not worker.draining]
            fingerprints: dict[int, set[bytes]] = {}
            for worker in workers:
                fingerprints.setdefault(worker.hello.block_tokens, set()).add(worker.hello.model_fingerprint)
            roster = self._last_roster = _Roster(
                number,
                [worker for worker in reporting if worker.decodes],
                [worker for worker in reporting if not worker.decodes],
                len({self._variant(worker) for worker in reporting}) > 1,
                {block_tokens: sorted(each) for block_tokens, each in fingerprints.items()},
                next((_pooler_of(worker.hello) for worker in reporting if worker.hello.HasField("pooler")), None),
            )
        return roster

    async def await_workers(self, tenant: str, give_up_at: float, embeds: bool = False) -> None:
        """Wait until a worker is there on which requests start.

        Raises Unavailable at `give_up_at`, of the dispatcher's clock, and Overloaded when too many requests wait.
        """
        if self.starting_workers(embeds):
            return
        try:
            self._worker_waits.take(tenant)
        except Refusal as refusal:
            self.dispatcher.admission.num_refused[refusal.reason] += 1
            raise refusal.take() from None
        try:
            await self._first_worker(give_up_at, embeds)
        finally:
            self._worker_waits.give_back(tenant)

    async def _first_worker(self, give_up_at: float, embeds: bool) -> None:
        while not self.starting_workers(embeds):
            self._reported.clear()
            try:
                async with asyncio.timeout(give_up_at - self.dispatcher.clock()):
                    await self._reported.wait()
            except TimeoutError:
                raise Unavailable(f"no decode worker of {self.name!r} has joined") from None

    def on_worker_report(self) -> None:
        """Process a report of one of its workers."""
        if not self._reported.is_set():
            self._reported.set()

    def needs(
        self,
        prompt: Sequence[int],
        sampling: pb.Sampling,
        cache_salt: str,
        chains: Sequence[Sequence[int]],
        to_score: bool,
        traffic_hash: float = 1.0,
        new: bool = True,
        embeds: bool = False,
        only_fills: bool = False,
        items: Sequence[Item] = (),
    ) -> tuple[Demand, list[BlockKey]]:
        """Return the demand of `chains`, the tokens of each choice, and keys of blocks that may come from elsewhere.

        A worker must be there on which it can start. Raises InvalidRequest for a `new` request that no pool could hold;
        an accepted one stays valid although its workers are gone.
        """
        workers = self.starting_workers(embeds)
        if items and new and not any(worker.hello.reads_media for worker in workers):
            raise InvalidRequest("media", f"no worker of {self.name!r} reads media now")
        hello = _hello_for(workers, traffic_hash)
        largest = max(worker.hello.num_blocks for worker in workers) if new else None
        sizes = hello.block_tokens, hello.block_bytes, largest
        files = self.config_fingerprint.hex() if self.is_bound else ""
        demand = demand_of(
            prompt, sampling, chains, to_score, *sizes, traffic_hash, embeds, only_fills, files, self.revision.hex()
        )
        usable = chains[0][: demand.num_usable_blocks * demand.block_tokens]
        own, *others = (
            block_keys(root_key(version, cache_salt, self.adapter), usable, demand.block_tokens, items)
            for version in self._versions(hello)
        )
        if self.adapter or items:
            own_items = tuple((item.offset, item.end) for item in items if not item.encoder)
            demand = replace(demand, adapter=self.adapter.hex(), has_items=bool(items), own_items=own_items)
        return (replace(demand, other_keys=tuple(map(tuple, others))) if others else demand), own

    def _versions(self, hello: membership_pb2.Hello) -> list[bytes]:
        """Return weights fingerprints: that of `hello`, then those of other versions with blocks of equal length.

        Several versions exist while workers are being replaced.
        """
        others = [
            version
            for version in self._roster().versions.get(hello.block_tokens, ())
            if version != hello.model_fingerprint
        ]
        return [hello.model_fingerprint, *others[: MAX_VERSIONS - 1]]

    def predicted_ttft_s(self, priority: int, demand: Demand, keys: Sequence[BlockKey]) -> float | None:
        """Return the predicted TTFT of a request that arrived now, its wait in the queue included.

        None where no worker could hold it.
        """
        decision = self.fleet.decide(demand, keys)
        if decision is not None:
            ttft_s: float | None = decision.predicted_ttft_s
        else:
            ttft_s = self.fleet.least_ttft_s(demand, keys)
        return None if ttft_s is None else self.dispatcher.expected_wait_s(priority, demand) + ttft_s


class _Revision:
    """Files of a revision, and the processes that check grammars with its tokenizer."""

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self.grammars = GrammarChecker(files.model_dir)


@dataclass(frozen=True, slots=True)
class _Roster:
    """Workers of a model that have reported and do not drain, by role."""

    number: int
    """Number of the fleet's changes when it was made."""
    decode: list[WorkerRecord]
    prefill: list[WorkerRecord]
    several: bool
    """Whether they differ in their files, or in the adapter."""
    versions: dict[int, list[bytes]]
    """Fingerprints of the weights of all workers, in order, by the length of their blocks."""
    pooler: Pooler | None
    """Pooler of an engine that answers with vectors only, if one has."""


def _pooler_of(hello: membership_pb2.Hello) -> Pooler:
    wire = hello.pooler
    return Pooler("last" if wire.of_last_token else "mean", wire.normalize, wire.dimensions, wire.classifies)


def _hello_for(workers: Sequence[WorkerRecord], traffic_hash: float) -> membership_pb2.Hello:
    """Return the Hello whose version names the blocks: a canary's for requests of canaries, else another worker's.

    Any worker's, where there is none of these.
    """
    share = max(worker.hello.traffic_share for worker in workers)
    return min(workers, key=lambda worker: (worker.hello.traffic_share > 0) != (traffic_hash < share)).hello
