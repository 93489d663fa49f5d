"""One stock server as a worker of its model, as often as it comes back.

It is met, watched and left:

    away ──answers──▶ joined ──listed as leaving──▶ draining ──idle──▶ away
      ▲                 │
      └─────────────────┘ refuses, or is silent: its requests are placed again
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from urllib.parse import urlsplit
from zlib import crc32

import zmq.asyncio

from cluster.errors import ServiceError, Unavailable
from cluster.network.rpc import PROTOCOL
from cluster.process.loop_watch import loop_time
from cluster.process.tasks import Tasks, happens
from kvcache.block_keys import ADAPTER_BYTES, BlockKey, root_key
from protos import membership_pb2 as pb
from router.models.config import FleetConfig
from router.models.model_runtime import REVISION_BYTES, ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.stock.facts import Load, ServerAccess, ServerApi, ServerFacts, ask, load_of
from router.stock.kv_events import AssumedBlocks, EventFeed, NamedBlocks
from router.stock.link import OUTPUT_TOKENS, StockLink
from router.stock.sources.servers import Server

log = logging.getLogger(__name__)

SCRAPE_S = 1.0
"""Seconds between two looks at a server's load; what this router sends there counts at once."""
AWAY_S = 0.5, 5.0
"""Shortest and longest pause in seconds before a server that is away is asked again."""
NAMES_PER_BLOCK = 4
"""Names of blocks that are remembered for each block of a cache."""
PROGRESS_S = 0.1
"""Seconds between two estimates of what a server has computed, while prompts wait there."""
LOANS = 1
"""Version of loans of servers with TandemConnector."""
PLAIN_BLOCK_TOKENS, PLAIN_BLOCKS = 16, 1 << 20
"""Size of a block, and the number of blocks, that stand for those of a server that tells none."""


class Surroundings:
    """Surroundings that all servers of a fleet share."""

    def __init__(
        self,
        config: FleetConfig,
        models: ModelRuntimes,
        access: ServerAccess,
        silence_s: float,
        on_lost: Callable[[str], object],
    ) -> None:
        self.config = config
        self.models = models
        self.access = access
        self.silence_s = silence_s
        self.on_lost = on_lost
        self.zmq = zmq.asyncio.Context()


class Member:
    """One server, from its first listing until `leave`."""

    def __init__(self, server: Server, around: Surroundings) -> None:
        self._server = server
        self._around = around
        self._api = ServerApi(server.url, around.access)
        self._wake = asyncio.Event()
        self._leaves = False
        self._said = ""

    def listed(self, server: Server) -> None:
        """Take over a change of the listing: whether the server drains."""
        self._server = server
        self._wake.set()

    def leave(self) -> None:
        """Let the server finish what it has, and leave it."""
        self._leaves = True
        self._wake.set()

    async def run(self) -> None:
        """Serve until `leave`, or cancellation."""
        pause_s = AWAY_S[0]
        while not self._leaves:
            try:
                facts = await ask(self._api)
                joined = self._join(facts)
                joined.link.failed = self._wake  # a failed request has the server looked at
            except ServiceError as error:
                self._log(str(error))
                self._wake.clear()
                await self._sleep(pause_s)
                pause_s = min(AWAY_S[1], 2 * pause_s)
                continue
            self._said, pause_s = "", AWAY_S[0]
            try:
                await self._watch(joined)
            finally:
                joined.left()

    def _log(self, reason: str) -> None:
        if reason != self._said:
            log.warning("%s; it is asked again", reason)
        self._said = reason

    async def _sleep(self, seconds: float) -> None:
        """Sleep until the listing changed or a request failed, or for so long."""
        await happens(self._wake, seconds)

    def _join(self, facts: ServerFacts) -> "Joined":
        model = model_of(facts, self._around.models, self._api.name)
        hello = hello_of(facts, self._server, model, self._api.name)
        return Joined(facts, hello, self._server, model, self._api, self._around)

    async def _watch(self, joined: "Joined") -> None:
        """Watch a joined server until it is gone, or has left."""
        feed = joined.feed()
        async with Tasks() as tasks:
            following = None if feed is None else tasks.spawn(feed.run())
            while True:
                self._wake.clear()
                if not await joined.report(self._server.draining or self._leaves):
                    return
                if self._leaves and joined.link.idle:
                    return
                await self._sleep(SCRAPE_S)
                if following is not None and following.done():
                    following.result()


class Joined:
    """A server between its joining and its leaving."""

    def __init__(
        self,
        facts: ServerFacts,
        hello: pb.Hello,
        server: Server,
        model: ModelRuntime,
        api: ServerApi,
        around: Surroundings,
    ) -> None:
        self._facts = facts
        self._server = server
        self._model = model
        self._api = api
        self._around = around
        self._blocks: AssumedBlocks | NamedBlocks = AssumedBlocks(hello.num_blocks)
        self._running: dict[int, Sequence[BlockKey]] = {}
        """Blocks of the requests there, by the identity of their list."""
        self._sequence = 0
        self._step = 0
        self._others = self._others_blocks = 0
        """Requests of other clients, and blocks that these hold."""
        self._draining = False
        self._progress, self._progressed_at = -1.0, loop_time()
        self.worker = model.fleet.joined(hello)
        self.worker.server = facts.summary()
        self.link = StockLink(
            api,
            hello.worker_id,
            facts,
            {adapter.fingerprint: adapter.name for adapter in hello.adapters},
            model.encoder.tokenizer,
            hello.block_tokens,
            around.config.continue_approximately,
            self._sent,
            self._ended,
        )
        self._timer = asyncio.get_running_loop().call_later(0, lambda: None)
        self.link.on_change = self.report_now
        model.links.add(self.worker, self.link)
        self._change((), True)
        log.info("%s joined for %s: %s", hello.worker_id, model.name, facts.summary())

    # ------------------------------------------------------------------ caches

    def feed(self) -> EventFeed | None:
        """Return the feed of its KV events; None where none are published."""
        entry, hello = self._server.entry, self.worker.hello
        if entry.kv_events_port is None or not self._facts.block_tokens:
            return None
        host = urlsplit(self._api.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        adapters = {adapter.name: adapter.fingerprint for adapter in hello.adapters}

        def root_of(salt: str, adapter: str) -> BlockKey | None:
            if adapter and adapter not in adapters:
                return None
            return root_key(hello.model_fingerprint, salt, adapters.get(adapter, b""))

        named = NamedBlocks(root_of, hello.block_tokens, NAMES_PER_BLOCK * hello.num_blocks)

        def come() -> None:
            """Trust the server's events from now on, instead of assuming what it caches."""
            for keys in self._running.values():
                named.sent(keys)
            self._blocks = named
            self._change(named.snapshot(), True)

        replay = None if entry.kv_replay_port is None else f"tcp://{host}:{entry.kv_replay_port}"
        publisher = f"tcp://{host}:{entry.kv_events_port}"
        return EventFeed(self._around.zmq, self._api.name, publisher, replay, named, come, self._change)

    def _sent(self, keys: Sequence[BlockKey]) -> None:
        """Process that a request with these blocks was sent there."""
        self._running[id(keys)] = keys
        self._change(self._blocks.sent(keys), False)

    def _ended(self, keys: Sequence[BlockKey]) -> None:
        """Process the end of such a request."""
        del self._running[id(keys)]
        self._change(self._blocks.ended(keys), False)

    def _change(self, events: Sequence[pb.CacheEvent], replaces: bool) -> None:
        if not (events or replaces):
            return
        if replaces:
            self._sequence = 0
        self._model.fleet.cache_changed(
            self.worker, pb.CacheEvents(sequence=self._sequence, events=events, snapshot=replaces)
        )
        if not replaces:
            self._sequence += len(events)

    # ------------------------------------------------------------------ load

    async def report(self, draining: bool) -> bool:
        """Report the server's load; return whether the server is there."""
        own_before = self.link.num_running
        try:
            status, page = await self._api.get("/metrics", self._around.silence_s)
        except Unavailable as error:
            return self._lost(error)
        load = load_of(page) if status == 200 else None
        if load is None and self._facts.block_tokens:
            return self._lost(Unavailable(f"server {self._api.name} answers /metrics with {status}"))
        if load is not None and self._stands_still(load):
            still = f"server {self._api.name} computes nothing for {self._around.silence_s:g} s"
            return self._lost(Unavailable(still))
        if load is not None:
            own = max(own_before, self.link.num_running)
            used = round(load.cache_use * self.worker.hello.num_blocks)
            self._others = max(0, load.running + load.waiting - own)
            self._others_blocks = max(0, used - self.link.num_blocks)
        self._draining = draining
        self.report_now()
        self._model.on_worker_report()
        self._model.dispatcher.kick()
        return True

    def report_now(self) -> None:
        """Report what this router has there, at once, and what others have, as it was last told."""
        self._timer.cancel()
        fleet, link = self._model.fleet, self.link
        row = fleet.snapshot.row_of.get(self.worker.worker_id)
        tokens_per_s = 0.0 if row is None else float(fleet.rates.decode_prefill_tokens_per_s[row])
        num_blocks = self.worker.hello.num_blocks
        self._step += 1
        fleet.reported(
            self.worker,
            pb.LoadReport(
                step=self._step,
                running=self._others + link.num_running,
                decoding=self._others + link.num_decoding,
                queued_prefill_tokens=link.queued_tokens(tokens_per_s),
                available_blocks=max(0, num_blocks - self._others_blocks - link.num_blocks),
                num_blocks=num_blocks,
                placements_seen={fleet.mark: link.last_sequence},
                draining=self._draining,
            ),
        )
        if link.num_running > link.num_decoding:
            self._timer = asyncio.get_running_loop().call_later(PROGRESS_S, self.report_now)

    def _stands_still(self, load: Load) -> bool:
        """Return whether the engine has requests of this router, and did no step for the time of silence."""
        now = loop_time()
        if load.progress != self._progress or self.link.idle:
            self._progress, self._progressed_at = load.progress, now
        return now - max(self._progressed_at, self.link.heard_at) > self._around.silence_s

    def _lost(self, reason: ServiceError) -> bool:
        log.warning("%s: its requests are placed again", reason)
        if not self.link.idle:
            self._around.on_lost(self._model.name)
        self.worker.lost = True
        self.link.break_off(Unavailable(f"worker {self.worker.worker_id} is lost: {reason}"))
        return False

    def left(self) -> None:
        """Remove the server from placement, and end what runs there."""
        log.info("%s left", self.worker.worker_id)
        self._timer.cancel()
        self.link.on_change = lambda: None
        self._model.fleet.left(self.worker)
        self.link.break_off(Unavailable(f"worker {self.worker.worker_id} left"))
        self._model.links.let_go()
        self._model.dispatcher.kick()


def model_of(facts: ServerFacts, models: ModelRuntimes, name: str) -> ModelRuntime:
    """Return the model that a server serves: of that name, or the only one. Raises Unavailable."""
    named = [model for model in models if facts.model in (model.name, model.model_dir.name)]
    if len(models) == 1:
        named = list(models)
    if not named:
        known = ", ".join(model.name for model in models)
        raise Unavailable(f"server {name} serves {facts.model!r}, and this router {known}")
    return named[0]


def hello_of(facts: ServerFacts, server: Server, model: ModelRuntime, name: str) -> pb.Hello:
    """Return the Hello of a server, as a worker of Tandem would send it."""
    identity = f"stock\n{facts.root}\n".encode() + model.config_fingerprint
    block_tokens = facts.block_tokens or PLAIN_BLOCK_TOKENS
    hello = pb.Hello(
        worker_id=name,
        incarnation=secrets.token_bytes(16),
        role=pb.ROLE_PREFILL if server.role == "prefill" else pb.ROLE_DECODE,
        address=server.url,
        model=facts.model,
        model_fingerprint=blake2b(identity + bytes([facts.block_tokens % 256]), digest_size=32).digest(),
        config_fingerprint=model.config_fingerprint,
        block_tokens=block_tokens,
        num_blocks=facts.num_blocks or PLAIN_BLOCKS,
        block_bytes=block_tokens * kv_bytes_per_token(model),
        max_context_tokens=facts.max_context_tokens or model.model_dir.max_context_tokens,
        transport="TandemConnector" if facts.lends else "",
        lends=facts.lends,
        reserve_output_tokens=OUTPUT_TOKENS,
        protocol=PROTOCOL,
        revision=blake2b(identity, digest_size=REVISION_BYTES).digest(),
        loan_address=server.url,
        # Servers of different versions lend each other nothing: one without the connector has a version of its own.
        loan_version=LOANS if facts.lends else (1 << 31) + (crc32(name.encode()) >> 1),
    )
    for adapter, root in facts.adapters:
        fingerprint = blake2b(f"{adapter}\n{root}".encode(), digest_size=ADAPTER_BYTES).digest()
        hello.adapters.add(name=adapter, fingerprint=fingerprint)
    return hello


def kv_bytes_per_token(model: ModelRuntime) -> int:
    """Return the bytes of a token's KV in 16 bits, by the model's config; transfers are predicted by it."""
    config = model.model_dir.read_json("config.json")
    config = config.get("text_config", config)
    heads = config.get("num_attention_heads", 1)
    width = config.get("head_dim") or config.get("hidden_size", heads) // heads
    return int(max(1, 4 * config.get("num_hidden_layers", 1) * config.get("num_key_value_heads", heads) * width))
