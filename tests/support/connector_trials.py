"""Trials of the connector in stock vLLM schedulers, without a model: `python -m support.connector_trials FIRST COUNT`.

Each server is vLLM's own scheduler with `TandemConnector` in it. `Computer` stands for the model: it writes into each
block what a model would have written, and checks before each step that all that the step reads is there. Messages and
reads are moved by hand, in an order that the seed decides, between faults. It runs in vLLM's environment.
"""

import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from engine.backends.vllm.kv.groups import KvGroups
from engine.backends.vllm.kv.memory import LayerPlace, VllmKvMemory
from kvtransfer.transport import Pool
from loans.component import Ranks
from loans.network import Lent, Peer, Want
from loans.reads.block_reads import LocalRank
from support.hand_network import HandNetwork
from support.slow_transport import SlowTransport
from support.vllm_trials import (
    BLOCK,
    MODELS,
    PAGE,
    VOCAB,
    Computer,
    Drafting,
    make_caches,
    make_config,
    make_scheduler,
    undisturbed,
)
from tandem_connector import TandemConnector
from tandem_connector.borrowings import BorrowingRules
from tandem_connector.kv import ConnectorKv, Hashes, Naming
from tandem_connector.lender import fingerprint
from tandem_connector.scheduler_half import EngineFacts, SchedulerHalf
from tandem_connector.servers import ASKS_FOR_REFERENCE, Prompt, Reference

init_none_hash(sha256)
FINGERPRINT = bytes(range(32))
PATIENCE_S = 30.0
MOST_ADDED = 12
"""Most tokens that a request adds to its stem, and most that it asks for."""


@dataclass(eq=False)
class Client:
    """One request of a client, or of another server."""

    number: int
    server: "Server"
    prompt: list[int]
    max_tokens: int
    params: dict[str, Any] | None
    salt: str = ""
    request: Any = None
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    is_cancelled: bool = False
    answer: dict[str, Any] | None = None
    on_over: Callable[["Client"], object] = lambda client: None


class HandServers:
    """HTTP between servers, by hand: each call waits in `calls` until the trial makes it."""

    def __init__(self, server: "Server", trial: "Trial") -> None:
        self._server, self._trial = server, trial

    def addresses(self, url: str, on_done: Callable[[list[str]], object]) -> None:
        self._trial.calls.append(partial(self._deliver, partial(on_done, [url])))

    def probe(self, url: str, on_done: Callable[[Reference | None, str], object]) -> None:
        def call() -> None:
            server = self._trial.at(url)
            found = None if server is None else Reference(server.network.peer, 0)
            self._deliver(partial(on_done, found, "" if found else f"{url}: refused"))

        self._trial.calls.append(call)

    def post(self, url: str, prompt: Prompt, on_done: Callable[[str], object]) -> "Future[None]":
        future: Future[None] = Future()

        def call() -> None:
            server = self._trial.at(url)
            if server is None or self._trial.rng.random() < 0.05:
                self._deliver(partial(on_done, f"{url}: status 503"))
                return
            client = self._trial.ask(server, prompt.token_ids, 1, dict(ASKS_FOR_REFERENCE), prompt.cache_salt)
            client.on_over = lambda over: self._deliver(partial(on_done, "aborted" if over.is_cancelled else ""))
            future.add_done_callback(lambda done: server.cancel(client) if done.cancelled() else None)

        self._trial.calls.append(lambda: None if future.cancelled() else call())
        return future

    def _deliver(self, call: Callable[[], object]) -> None:
        self._server.half.loans.post(call)


class Server:
    """One stock server."""

    def __init__(self, trial: "Trial", name: str) -> None:
        rng = self._rng = trial.rng
        self.name, self.trial, self.is_alive = name, trial, True
        self.overlaps = rng.random() < 0.5
        specs = MODELS[trial.kind]()
        is_stateless = not any(isinstance(spec, MambaSpec) for spec in specs)
        num_drafts = rng.choice((0, 0, 1, 3)) if is_stateless else 0
        drafting = Drafting(num_drafts, rng.choice((0, num_drafts)), self.overlaps)
        num_blocks = rng.randint(*((16, 40) if len(specs) == 1 else (40, 90)))
        ahead = 2 * num_drafts + drafting.num_lookahead  # two steps in flight, and what draft layers write
        longest = -(-(trial.longest + ahead) // BLOCK)
        num_blocks = max(num_blocks, 1 + longest * len(specs))  # vLLM starts with no smaller pool
        config = make_config(self.overlaps, num_drafts, TandemConnector)
        self.scheduler, self._unit = make_scheduler(config, specs, num_blocks)
        self.scheduler.num_lookahead_tokens = drafting.num_lookahead
        self.scheduler.max_num_scheduled_tokens = rng.choice((8, 16, 64, 128))
        pools: list[Pool] = []
        caches = make_caches(specs, num_blocks, pools)
        hashes = Hashes()
        manager = self.scheduler.kv_cache_manager
        groups = KvGroups(manager, self._unit, 0, 1, hashes.of)
        memory = VllmKvMemory(caches, [LayerPlace(0, PAGE)], num_blocks, self._unit, "trial", pools, groups)
        self.bytes = pools[0].memory.reshape(num_blocks, PAGE)
        self.memory = memory
        self.kv = ConnectorKv(memory, manager, groups, hashes, lambda: trial.now)
        self.network = HandNetwork(trial.engines, name)
        self.transport = SlowTransport(trial.pools, name)
        self.half = SchedulerHalf(
            self.kv,
            Ranks(LocalRank(self.transport, memory.part, memory.part_fingerprints)),
            "slow",
            self.network,
            Naming(FINGERPRINT, self._unit),
            HandServers(self, trial),  # type: ignore[arg-type]
            EngineFacts(
                incarnation=name.encode(),
                vocab_size=VOCAB,
                rank=0,
                tensor_parallel=1,
                lends=True,
                lenders=tuple(trial.urls) if rng.random() < 0.5 else (),
                trusted_lenders=("*",),
                read_silence_s=trial.read_silence_s,
                rules=BorrowingRules(borrows=True, is_guarded=True, min_tokens=0, patience_s=PATIENCE_S),
            ),
            lambda: None,
            lambda: trial.now,
        )
        self.half.start(FINGERPRINT, self.transport.register(pools[0]))
        self.half.identity = Peer(name, "server:5", name.encode())
        self.scheduler.connector.half = self.half
        self.computer = Computer(specs, self.bytes, drafting, rng)
        self._num_drafts = num_drafts
        self.flying: deque[list[Any]] = deque()
        self.announcing: list[tuple[Any, list[int], Any]] = []
        self.clients: dict[str, Client] = {}

    def add(self, client: Client) -> None:
        params = VllmParams(
            max_tokens=client.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": client.params} if client.params is not None else None,
        )
        hasher = get_request_block_hasher(self._unit, sha256)
        name = f"{self.name}-{client.number}"
        client.request = Request(
            name, list(client.prompt), params, None, cache_salt=client.salt or None, block_hasher=hasher
        )
        self.clients[name] = client
        self.scheduler.add_request(client.request)

    def cancel(self, client: Client) -> None:
        if client.is_over or not self.is_alive:
            return
        client.is_cancelled = True
        self.scheduler.finish_requests(client.request.request_id, RequestStatus.FINISHED_ABORTED)
        self._over(client, None)

    def _over(self, client: Client, answer: dict[str, Any] | None) -> None:
        client.is_over, client.answer = True, answer
        self.clients.pop(client.request.request_id, None)
        client.on_over(client)

    def kill(self) -> None:
        self.is_alive = False
        self.transport.close()
        for client in list(self.clients.values()):
            client.is_cancelled = True
            self._over(client, None)

    # ------------------------------------------------------------------ what may happen next

    def moves(self) -> list[Callable[[], object]]:
        """Return what may happen in this server now."""
        moves: list[Callable[[], object]] = [self.turn]
        if len(self.flying) < 1 + self.overlaps and self.scheduler.has_requests():
            moves.append(self.begin)
        if any(batch[1] is None for batch in self.flying):
            moves.append(self.compute)
        if self.flying and self.flying[0][1] is not None:
            moves.append(self.end)
        if self.half.loans.lender.has_seen:
            moves.append(self.fingerprint)
        if self.announcing:
            moves.append(self.announce)
        return moves

    def turn(self) -> None:
        """The thread of loans takes a turn."""
        self.half.turn()
        self.half.loans.report(is_alive=True)

    def begin(self) -> None:
        self.flying.append([self.scheduler.schedule(), None])

    def compute(self) -> None:
        batch = next(batch for batch in self.flying if batch[1] is None)
        batch[1] = self.computer.compute(batch[0])
        if batch[0].total_num_scheduled_tokens:
            batch[1].kv_connector_output = KVConnectorOutput()

    def end(self) -> None:
        output, computed = self.flying.popleft()
        outputs = self.scheduler.update_from_output(output, computed)
        if self._num_drafts and not self.overlaps and output.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self.computer.drafts)
        for of_client in outputs.values():
            for each in of_client.outputs:
                if (client := self.clients.get(each.request_id)) is not None:
                    client.tokens += each.new_token_ids
                    if each.finish_reason is not None:
                        self._over(client, each.kv_transfer_params)

    def fingerprint(self) -> None:
        seen = self.half.loans.lender.take_seen()
        self.announcing.append((seen, *fingerprint(self.kv, seen, self.memory.part_fingerprints)))

    def announce(self) -> None:
        self.half.loans.lender.announce(*self.announcing.pop(0))

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """The accounting balances, and no block that a read may write is anybody else's."""
        half, manager = self.half, self.scheduler.kv_cache_manager
        held = [
            [block for blocks in manager.get_block_ids(request_id) for block in blocks if block]
            for request_id in self.scheduler.requests
        ]
        held += [
            [block.block_id for block in blocks if not block.is_null] for _, blocks in self.scheduler.deferred_frees
        ]
        taken = [tracked.borrowing for tracked in half.borrowings.open.values()]
        held += [each.chain.blocks for each in taken if each is not None and each.chain is not None]
        held += [*self.kv.allocated, *half.loans.lender.holdings()]
        self.kv.pool.check_integrity(held)
        assert self.kv.pool.num_reserved == 0
        for read in self.transport.posted.values():
            for block in read.blocks():
                assert self.scheduler.kv_cache_manager.block_pool.blocks[block].ref_cnt == 1, (
                    "a block is read into twice"
                )
                assert block not in self.kv.pool.place_of, "a named block is read into"

    def check_contents(self) -> None:
        """A named block whose fingerprint was taken never changes."""
        blocks = sorted(self.kv.fingerprinted & set(self.kv.pool.place_of))
        blocks = [block for block in blocks if self.kv.pool.is_cached(self.kv.pool.place_of[block])]
        now = self.memory.part_fingerprints(blocks)
        assert now.tobytes() == self.kv.cached.fingerprints_of(blocks), f"{self.name}: a named block has changed"

    def check_at_rest(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.half.borrowings.open
        assert not self.half.loans.borrower.num_loans
        assert not self.half.requests
        assert not self.half.prefilling
        assert not self.half.waiting
        assert self.half.loans.lender.num_loans == 0
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, f"{self.name}: blocks are left behind"


class Trial:
    """A few servers, their clients, and what goes wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind = list(MODELS)[seed % len(MODELS)]
        self.now = 0.0
        self.read_silence_s = 20.0
        self.engines: dict[bytes, HandNetwork] = {}
        self.pools: dict[bytes, Pool] = {}
        self.calls: deque[Callable[[], object]] = deque()
        count = 2 + seed // 7 % 2
        self.urls = [f"http://server-{number}:80" for number in range(count)]
        self._by_url: dict[str, Server] = {}
        self._num_started = 0
        self.dead: list[Server] = []
        self.seen: Counter[str] = Counter()
        self._num_clients = 0
        self.open: list[Client] = []
        self.over: list[Client] = []
        self._stems = [self._random_tokens(self.rng.randint(4, 40)) for _ in range(3)]
        self.longest = max(map(len, self._stems)) + 2 * MOST_ADDED
        """Tokens of the longest request."""
        for url in self.urls:
            self.start(url)

    @property
    def servers(self) -> list[Server]:
        return list(self._by_url.values())

    def at(self, url: str) -> Server | None:
        return self._by_url.get(url)

    def start(self, url: str) -> None:
        self._num_started += 1
        self._by_url[url] = Server(self, f"engine-{self._num_started:09}")  # as long as an incarnation

    def ask(
        self, server: Server, prompt: Sequence[int], max_tokens: int, params: dict[str, Any] | None, salt: str = ""
    ) -> Client:
        self._num_clients += 1
        client = Client(self._num_clients, server, list(prompt), max_tokens, params, salt)
        self.open.append(client)
        server.add(client)
        return client

    def run(self, num_requests: int, num_moves: int) -> None:
        for number in range(num_moves):
            if self.rng.random() < num_requests / num_moves:
                self._new_request()
            self._move()
            if self.rng.random() < 0.04:
                self._fault()
            for server in self.servers:
                server.check()
            if number % 20 == 0:
                for server in self.servers:
                    server.check_contents()
        self._settle()

    # ------------------------------------------------------------------ what happens

    def _random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def _new_request(self) -> None:
        rng = self.rng
        server = rng.choice(self.servers)
        prompt = rng.choice(self._stems) + self._random_tokens(rng.randint(1, MOST_ADDED))
        max_tokens, salt = rng.randint(1, MOST_ADDED), rng.choice(("", "", "", "a"))
        way = rng.choice(("configured", "named", "two phases", "unknown"))
        params: dict[str, Any] | None = None
        if way == "named":
            params = {"lender": rng.choice(self.urls)}
        elif way == "unknown":
            params = {
                "do_remote_prefill": True,
                "remote_engine_id": f"tandem-{'ab' * 16}-0",
                "remote_host": "x",
                "remote_port": 5,
            }
        elif way == "two phases":
            first = self.ask(rng.choice(self.servers), prompt, 1, dict(ASKS_FOR_REFERENCE), salt)

            def then(over: Client) -> None:
                if over.answer is not None and server.is_alive:
                    self.ask(server, prompt, max_tokens, over.answer, salt)

            first.on_over = then
            return
        self.ask(server, prompt, max_tokens, params, salt)

    def _move(self) -> None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.01, 0.1))
        moves = [move for server in self.servers for move in server.moves()]
        if self.calls:
            moves.append(lambda: self.calls.popleft()())
        for server in self.servers:
            for stream in server.network.taken:
                if stream.to_lender:
                    moves.append(stream.carry_to_lender)
                if stream.to_borrower:
                    moves.append(stream.carry_to_borrower)
            transport = server.transport
            moves += [partial(transport.post, peer) for peer in transport.busy()]
            for peer in transport.posted:
                moves.append(
                    partial(transport.scribble, peer, rng) if rng.random() < 0.3 else partial(transport.land, peer)
                )
        rng.choice(moves)()

    def _fault(self) -> None:
        rng, server = self.rng, self.rng.choice(self.servers)
        kind = rng.choice(("cancel", "cancel", "cut", "cut", "damage", "fail", "kill", "time", "reset", "silence"))
        self.seen[kind] += 1
        streams = [stream for stream in server.network.taken if not stream.over]
        match kind:
            case "cancel" if server.clients:
                server.cancel(rng.choice(list(server.clients.values())))
            case "cut" if streams:
                self._break(rng.choice(streams))
            case "damage" if server.transport.posted:
                server.transport.land_corrupted(rng.choice(list(server.transport.posted)), rng)
            case "fail" if server.transport.posted:
                server.transport.fail(rng.choice(list(server.transport.posted)))
            case "silence" if streams:
                rng.choice(streams).quiet_for_s = rng.choice((0.5, 25.0))
            case "kill" if rng.random() < 0.2:
                url = next(url for url, each in self._by_url.items() if each is server)
                server.kill()
                self.dead.append(server)
                self.engines.pop(server.name.encode(), None)
                for each in [*self.servers, *self.dead]:
                    for stream in each.network.taken:
                        if server.network in (stream.lender, stream.borrower):
                            self._break(stream)
                self.start(url)
            case "time":
                self.now += rng.choice((0.5, 5.0, 40.0))
            case "reset":
                server.half.reset()
                server.scheduler.kv_cache_manager.reset_prefix_cache()

    def _break(self, stream: Any) -> None:
        """The connection of a loan ends; both ends learn of it."""
        if stream.broken:
            return
        stream.broken = True
        stream.to_lender.clear()
        stream.to_borrower.clear()
        if stream.lender is not None:
            arrived = [each for each in stream.lender.arrived if each[0] is stream and not isinstance(each[1], Lent)]
            stream.asked &= not any(isinstance(message, Want) for _, message in arrived)
            for each in arrived:
                stream.lender.arrived.remove(each)
        if stream.lender is not None and stream.asked and not stream.refused:
            stream.lender.calls.append(partial(stream.lender.gives.closed, stream))
        stream.borrower.calls.append(lambda: None if stream.closed else stream.takes.ended("the connection broke"))

    def _settle(self) -> None:
        """Let everything end."""
        for _ in range(40_000):
            self.open = [client for client in self.open if not self._is_done(client)]
            if not self.open and not self.calls and not any(map(self._busy_with, self.servers)):
                break
            self._move()
            self.now += 0.01
            for server in self.servers:
                server.check()
        else:
            left = [(c.number, c.server.name, c.request.status, c.params) for c in self.open]
            raise AssertionError(
                f"a request hangs: {left}, {[*map(self._busy_with, self.servers)]}, {len(self.calls)} calls"
            )
        for server in self.servers:
            server.check_contents()
            server.check_at_rest()

    def _busy_with(self, server: Server) -> list[str]:
        """Return what a server still does."""
        half, network = server.half, server.network
        doing = {
            "steps": server.flying or server.scheduler.has_requests(),
            "announcements": server.announcing,
            "reads": server.transport.posted or server.transport.busy(),
            "messages": any(each.to_lender or each.to_borrower for each in network.taken) or network.arrived,
            "calls": network.calls or not half.loans.posted.empty(),
            "loans given": half.loans.lender.num_loans,
        }
        return [f"{server.name}: {name}" for name, is_so in doing.items() if is_so]

    def _is_done(self, client: Client) -> bool:
        if not client.is_over:
            return False
        if not client.is_cancelled:
            wanted = undisturbed(client.prompt, client.max_tokens)
            assert client.tokens == wanted, f"{client.number}: wrong tokens"
            receipt = (client.answer or {}).get("tandem") or {}
            self.seen["answers"] += 1
            self.seen["borrowed"] += receipt.get("borrowed", 0)
            self.seen["mismatched"] += receipt.get("mismatched", 0)
            self.seen["failed loans"] += bool(receipt.get("failure"))
        return True


def run_trial(seed: int) -> Counter[str]:
    """Run one trial; return what happened in it."""
    trial = Trial(seed)
    try:
        trial.run(num_requests=trial.rng.randint(5, 30), num_moves=600)
    except BaseException as error:
        error.add_note(f"seed {seed}, model {trial.kind}")
        raise
    return trial.seen


def main() -> None:
    first, count = map(int, sys.argv[1:])
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        seen += run_trial(seed)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
