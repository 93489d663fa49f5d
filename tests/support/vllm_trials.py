"""Trials of vLLM engines with several KV groups, without a model: `python -m support.vllm_trials FIRST COUNT`.

Each engine is Tandem's core over vLLM's own scheduler and block pool. Instead of a model, `Computer` writes into each
block what a model would have written, and looks, before each step, whether all that the step reads is there. Some
engines draft tokens, right ones and wrong ones, whose KV lies in blocks until it is written over. Reads between
engines, messages, cancels, cuts and kills happen in an order drawn from the seed; after every move the books balance,
and every named block has the bytes of its name. It runs in vLLM's environment.
"""

import os
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams as VllmParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from engine.backends.vllm.connector import TandemConnector
from engine.backends.vllm.core import VllmCore
from engine.backends.vllm.kv.groups import KvGroups
from engine.backends.vllm.kv.memory import LayerPlace, VllmKvMemory, pool_allocation
from engine.backends.vllm.sampling.sampling import FILLS, Sampling
from engine.block_keys import block_keys, root_key
from engine.core.loan_host import EngineLimits, EngineParts
from engine.core_types import SampleResult, SamplingParams, StepBudget
from engine.messages.from_engine import CloseLoan, LendReady, LendRefused, LendStarting, OpenLoan, Rejected, ReleaseLoan
from engine.messages.from_engine import Token as TokenSaid
from engine.messages.to_engine import (
    Cancel,
    Generate,
    Lend,
    LendClosed,
    LendReleased,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
)
from engine.model_runner import ModelInfo
from kvtransfer.transport import Pool
from support.slow_transport import SlowTransport
from tandem.storyteller import STORYTELLER

VOCAB, PAGE = 997, 64
BLOCK = 4
MODELS: dict[str, Callable[[], list[Any]]] = {
    "windows": lambda: [_window(9), _full(), _window(9)],
    "two windows": lambda: [_window(6), _window(14), _full()],
    "states": lambda: [_state(), _full(), _state()],
    "states and a window": lambda: [_state(), _window(9), _full()],
    "full": lambda: [_full()],
    "one window": lambda: [_window(9)],
    "one state": lambda: [_state()],
}
"""KV groups of each kind of model."""


def _full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=PAGE // BLOCK // 4, dtype=torch.float16)


def _window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=PAGE // BLOCK // 4, dtype=torch.float16, sliding_window=tokens
    )


def _state() -> MambaSpec:
    return MambaSpec(block_size=BLOCK, shapes=((PAGE,),), dtypes=(torch.int8,), mamba_cache_mode="align")


def content(tokens: Sequence[int], group: int, spec: Any) -> bytes:
    """What a group's last block has in it after these tokens: a state, or a slot for each of its tokens."""
    text, person = np.array(tokens, np.uint32).tobytes(), b"group %d" % group
    if isinstance(spec, MambaSpec):
        return blake2b(text, digest_size=PAGE, person=person).digest()
    ends = range((len(tokens) - 1) // BLOCK * BLOCK + 1, len(tokens) + 1)
    return b"".join(blake2b(text[: 4 * end], digest_size=PAGE // BLOCK, person=person).digest() for end in ends)


def next_token(tokens: Sequence[int]) -> int:
    return int.from_bytes(blake2b(np.array(tokens, np.uint32).tobytes(), digest_size=4).digest(), "little") % VOCAB


def undisturbed(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Drafting(NamedTuple):
    """How an engine drafts."""

    num_drafts: int
    num_lookahead: int
    """Positions after a step's own into which draft layers write."""
    overlaps: bool
    """Whether the scheduler runs ahead of the drafts."""


@dataclass
class Row:
    """A request as a model runner has it."""

    tokens: list[int]
    computed: int
    blocks: list[list[int]]
    drafts: list[int] = field(default_factory=list)


class Computer:
    """Stands for vLLM's model runner: keeps requests by what the scheduler's outputs say, and computes in order."""

    def __init__(self, specs: Sequence[Any], memory: np.ndarray[Any, Any], drafting: "Drafting", rng: Any) -> None:
        self._specs = specs
        self._memory = memory
        self._drafting = drafting
        self._rng = rng
        self._rows: dict[str, Row] = {}
        self.drafts = DraftTokenIds([], [])
        """Drafts of the requests in the last batch."""
        self.num_accepted = 0

    def compute(self, output: Any) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            self._rows[new.req_id] = Row(tokens, new.num_computed_tokens, [list(b) for b in new.block_ids])
        cached = output.scheduled_cached_reqs
        for place, request_id in enumerate(cached.req_ids):
            row, new_blocks = self._rows[request_id], cached.new_block_ids[place]
            # a scheduler that runs ahead counts drafts that are rejected meanwhile
            if request_id in cached.resumed_req_ids:
                row.computed = cached.num_computed_tokens[place]
                row.tokens = list(cached.all_token_ids[request_id])
                row.blocks = [list(blocks) for blocks in new_blocks]
            elif new_blocks is not None:
                for blocks, more in zip(row.blocks, new_blocks, strict=True):
                    blocks += more
        names, sampled = list(output.num_scheduled_tokens), list[list[int]]()
        for request_id in names:
            row, scheduled = self._rows[request_id], output.scheduled_spec_decode_tokens.get(request_id, [])
            drafts = row.drafts if self._drafting.overlaps else scheduled
            drafts = (drafts + [-1] * len(scheduled))[: len(scheduled)]
            end = row.computed + output.num_scheduled_tokens[request_id] - len(drafts)
            assert not drafts or end == len(row.tokens), "drafts before a prompt's end"
            self._read(row)
            self._write(row, [*row.tokens[:end], *(max(draft, 0) for draft in drafts)])
            sampled.append(self._sample(row, drafts) if end >= len(row.tokens) else [])
            row.computed = end + max(0, len(sampled[-1]) - 1)
            row.drafts = self._guess(row) if sampled[-1] else []
        self.drafts = DraftTokenIds(names, [self._rows[name].drafts for name in names])
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)

    def _sample(self, row: Row, drafts: Sequence[int]) -> list[int]:
        """Return the tokens of a step: the right drafts, and one more."""
        first = len(row.tokens)
        for draft in [*drafts, -1]:
            row.tokens.append(next_token(row.tokens))
            if draft != row.tokens[-1]:
                break
            self.num_accepted += 1
        return row.tokens[first:]

    def _guess(self, row: Row) -> list[int]:
        guesses = undisturbed(row.tokens, self._drafting.num_drafts)
        return [token if self._rng.random() < 0.7 else self._rng.randrange(VOCAB) for token in guesses]

    def _read(self, row: Row) -> None:
        """Raises AssertionError where a block that the step reads has other bytes than it should."""
        start = row.computed
        for group, spec in enumerate(self._specs):
            for at in self._needed(spec, start):
                end = start if isinstance(spec, MambaSpec) else min((at + 1) * BLOCK, start)
                wanted = content(row.tokens[:end], group, spec)
                held = self._memory[row.blocks[group][at]].tobytes()[: len(wanted)]
                assert held == wanted, f"wrong KV: group {group}, block {at}, {start} tokens"

    def _needed(self, spec: Any, start: int) -> range:
        """Return the blocks of a group that a step after `start` tokens reads."""
        if not start:
            return range(0)
        last = (start - 1) // BLOCK
        if isinstance(spec, MambaSpec):
            return range(last, last + 1)
        first = max(0, start - spec.sliding_window + 1) // BLOCK if isinstance(spec, SlidingWindowSpec) else 0
        return range(first, last + 1)

    def _write(self, row: Row, tokens: list[int]) -> None:
        """Write the KV of a step, which ends after these tokens, drafts included."""
        end, ahead = len(tokens), len(tokens) + self._drafting.num_lookahead
        for group, spec in enumerate(self._specs):
            first = (end - 1) // BLOCK if isinstance(spec, MambaSpec) else row.computed // BLOCK
            for at in range(first, (end - 1) // BLOCK + 1):
                if number := row.blocks[group][at]:
                    upto = end if isinstance(spec, MambaSpec) else min((at + 1) * BLOCK, end)
                    written = np.frombuffer(content(tokens[:upto], group, spec), np.uint8)
                    self._memory[number, : len(written)] = written
            for number in row.blocks[group][(end - 1) // BLOCK + 1 : (ahead - 1) // BLOCK + 1]:
                self._memory[number] = self._rng.randrange(256)  # the KV of draft layers


class TrialSampling(Sampling):
    """Whole chains as prompts, as on Model Runner V1."""

    def request(self, sequence: Any, request_id: str, arguments: dict[str, Any], wake: Callable[[], None]) -> Request:
        if sequence.sampling is None or sequence.only_fills:
            return Request(request_id, self.fill_tokens(sequence), FILLS, **arguments)
        count = sequence.sampling.max_tokens - sequence.num_sampled
        params = VllmParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        return Request(request_id, list(sequence.token_ids), params, **arguments)

    def results(self, sequence: Any, request: Request, output: Any) -> list[SampleResult]:
        return [SampleResult(token_id) for token_id in output.new_token_ids]


class Shell:
    """What is left of vLLM's EngineCore without a model."""

    check_for_draft_tokens = False

    def __init__(self, scheduler: Any, computer: Computer, overlaps: bool) -> None:
        self.scheduler, self.vllm_config = scheduler, scheduler.vllm_config
        self._computer, self._overlaps = computer, overlaps

    def post_step(self, model_executed: bool) -> None:
        if self.scheduler.num_spec_tokens and not self._overlaps and model_executed:
            self.scheduler.update_draft_token_ids(self._computer.drafts)

    def shutdown(self) -> None: ...


class Node:
    """One engine."""

    def __init__(self, network: dict[bytes, Pool], name: str, kind: str, num_blocks: int, rng: random.Random) -> None:
        self.name, self.rng = name, rng
        self.overlaps = rng.random() < 0.5
        self.specs = specs = MODELS[kind]()
        is_stateless = not any(isinstance(spec, MambaSpec) for spec in specs)
        num_drafts = rng.choice((0, 0, 1, 3)) if is_stateless else 0
        self.drafting = Drafting(num_drafts, rng.choice((0, num_drafts)), self.overlaps)
        config = _vllm_config(self.overlaps, num_drafts)
        config.cache_config.num_gpu_blocks = num_blocks
        groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
        tensors = [KVCacheTensor(num_blocks * PAGE, group.layer_names, PAGE, PAGE) for group in groups]
        kv_config = KVCacheConfig(num_blocks, tensors, groups)
        size, unit = resolve_kv_cache_block_sizes(kv_config, config)
        kv_config.hash_block_size = unit
        scheduler = config.scheduler_config.get_scheduler_cls()(
            config, kv_config, StructuredOutputManager(config), size, unit
        )
        pools: list[Pool] = []
        with pool_allocation(False, pools):
            raw = torch.zeros(num_blocks * PAGE, dtype=torch.int8)
        caches = {group.layer_names[0]: raw.view(num_blocks, 1, PAGE) for group in groups}
        scheduler.num_lookahead_tokens = self.drafting.num_lookahead
        ahead = 1 + num_drafts + self.drafting.num_lookahead if num_drafts else 0
        kv_groups = KvGroups(scheduler.kv_cache_manager, unit, ahead)
        memory = VllmKvMemory(caches, [LayerPlace(0, PAGE)], num_blocks, unit, "trial", pools, kv_groups)
        self.memory = pools[0].memory.reshape(num_blocks, PAGE)
        self.computer = Computer(specs, self.memory, self.drafting, rng)
        self.transport = SlowTransport(network, name)
        self.said: list[Any] = []
        limits = EngineLimits(StepBudget(rng.randint(4, 24), rng.randint(2, 16)), 4, 8, report_interval_s=0.0)
        info = ModelInfo(bytes(32), VOCAB, 128, frozenset())
        self.unhashed: deque[tuple[Any, Callable[[], Any]]] = deque()
        self.core = VllmCore(
            EngineParts(self.transport, limits, self.said.append),
            Shell(scheduler, self.computer, self.overlaps),
            memory,
            scheduler.kv_cache_manager.block_pool,
            info,
            TrialSampling(),
            {},
            (),
            (lambda tag, compute: self.unhashed.append((tag, compute))) if self.overlaps else None,
        )
        self.endpoint = self.core.start().endpoint
        self.root = root_key(self.core._model_fingerprint, "")
        self.flying: deque[list[Any]] = deque()
        """Batches in flight: the scheduler's output, and its result once it is computed."""

    def send(self, message: Any) -> None:
        self.core.handle(message)
        self.core.handle_posted()

    def step(self) -> bool:
        """One thing happens in the engine's loop or beside it."""
        self.core.handle_posted()
        choices = ["begin"] * (len(self.flying) < 1 + self.overlaps)
        choices += ["compute"] * any(batch[1] is None for batch in self.flying)
        choices += ["end"] * bool(self.flying and self.flying[0][1] is not None) + ["hash"] * bool(self.unhashed)
        worked = True
        match self.rng.choice(choices):
            case "begin":
                output = self.core.schedule() if self.core.may_schedule or self.core._lender_manager.num_loans else None
                worked = output is not None
                if output is not None:
                    self.flying.append([output, None])
            case "compute":
                batch = next(batch for batch in self.flying if batch[1] is None)
                batch[1] = self.computer.compute(batch[0])
            case "end":
                self.core.end_step(*self.flying.popleft())
            case "hash":
                tag, compute = self.unhashed.popleft()
                self.core.name(tag, compute())
        self.core.report()
        return worked

    @property
    def is_idle(self) -> bool:
        return self.core.idle and not self.flying and not self.unhashed

    def check(self, chains: dict[bytes, tuple[int, ...]]) -> None:
        audited = self.core.audit()
        assert audited.fault == "", f"{self.name}: {audited.fault}"
        for block, place in self.core._kv_cache.pool._place_of.items():
            if (tokens := chains.get(place.of.key)) is not None:
                right = self.memory[block].tobytes() == content(tokens, place.of.group, self.specs[place.of.group])
                assert right, f"{self.name}: block {block} of group {place.of.group} is named and has other bytes"


def _vllm_config(overlaps: bool, num_drafts: int) -> Any:
    if (overlaps, num_drafts) not in _configs:
        transfer = KVTransferConfig(
            kv_connector=TandemConnector.__name__,
            kv_connector_module_path=TandemConnector.__module__,
            kv_role="kv_both",
        )
        drafts = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 2}
        options = EngineArgs(
            model=str(STORYTELLER), enforce_eager=True, max_model_len=128, max_num_seqs=8, dtype="float32",
            block_size=32, skip_tokenizer_init=True, kv_transfer_config=transfer, scheduling_policy="priority",
            max_num_batched_tokens=128, disable_log_stats=True, kv_cache_memory_bytes=1 << 20,
            speculative_config=drafts if num_drafts else None,
        )  # fmt: skip
        config = _configs[overlaps, num_drafts] = options.create_engine_config()
        config.scheduler_config.async_scheduling = overlaps
        config.cache_config.block_size, config.cache_config.mamba_cache_mode = BLOCK, "align"
    return _configs[overlaps, num_drafts]


_configs: dict[tuple[bool, int], Any] = {}


@dataclass(eq=False)
class Client:
    prompt: tuple[int, ...]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    state: str = "new"
    node: Node | None = None
    attempt: str = ""


@dataclass(eq=False)
class Stream:
    """One loan's messages, both ways."""

    request_id: str
    borrower: Node
    lender: Node
    to_lender: deque[Any] = field(default_factory=deque)
    to_borrower: deque[Any] = field(default_factory=deque)
    is_over: bool = False


class Trial:
    """A few engines of one kind of model."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.kind = list(MODELS)[seed % len(MODELS)]
        self.network: dict[bytes, Pool] = {}
        self.num_started = 0
        self.seen: Counter[str] = Counter()
        self.nodes = [self.new_node() for _ in range(2 + seed // 5 % 2)]
        trunk = [rng.randrange(VOCAB) for _ in range(44)]
        trunks = [trunk, trunk[:21] + [rng.randrange(VOCAB) for _ in range(23)]]
        trunks += [[rng.randrange(VOCAB) for _ in range(44)] for _ in range(rng.randint(0, 3))]
        self.clients = [Client(tuple(rng.choice(trunks)[: rng.randint(1, 44)]), rng.randint(1, 8)) for _ in range(12)]
        self.streams: list[Stream] = []
        self.num_attempts = 0
        self.chains: dict[bytes, tuple[int, ...]] = {}
        """Tokens of every block key that a trial can see."""
        root = self.nodes[0].root
        for client in self.clients:
            tokens = (*client.prompt, *undisturbed(client.prompt, client.max_tokens))
            for end, key in enumerate(block_keys(root, tokens, BLOCK), 1):
                self.chains[key] = tokens[: end * BLOCK]

    def new_node(self) -> Node:
        self.num_started += 1
        return Node(self.network, f"node-{self.num_started}", self.kind, self.rng.randint(48, 98), self.rng)

    def run(self) -> None:
        for number in range(500):
            self.move(faults=True)
            for node in self.nodes:
                node.check(self.chains if number % 8 == 0 else {})
        for _ in range(6000):
            if all(c.state in ("over", "cancelled") for c in self.clients) and self.is_quiet():
                break
            self.move(faults=False)
        else:
            raise AssertionError(f"no rest: {[(c.state, len(c.tokens)) for c in self.clients]}")
        for node in self.nodes:
            node.check(self.chains)
            audited = node.core.audit()
            left = (audited.held_blocks, audited.reserved_blocks, audited.quarantined_blocks, audited.loans)
            assert left == (0, 0, 0, 0), f"{node.name} holds {left} at rest"
            self.seen["accepted"] += node.computer.num_accepted
        for client in self.clients:
            expected = undisturbed(client.prompt, client.max_tokens)
            assert client.tokens == expected[: len(client.tokens)], "a wrong token"
            assert client.state == "cancelled" or client.tokens == expected

    def is_quiet(self) -> bool:
        talk = any(stream.to_lender or stream.to_borrower for stream in self.streams)
        busy = any(not node.is_idle or node.transport.posted or node.transport.busy() for node in self.nodes)
        return not talk and not busy

    def move(self, faults: bool) -> None:
        rng = self.rng
        new = [client for client in self.clients if client.state == "new"]
        talk = [stream for stream in self.streams if stream.to_lender or stream.to_borrower]
        transfers = [node for node in self.nodes if node.transport.posted or node.transport.busy()]
        kinds = 8 * ["step"] + 2 * ["submit"] * bool(new) + 5 * ["talk"] * bool(talk) + 4 * ["read"] * bool(transfers)
        if faults and rng.random() < 0.06:
            kinds = ["cancel", "cut", "kill", "scribble", "corrupt", "fail"]
        match kind := rng.choice(kinds):
            case "step":
                self.step(rng.choice(self.nodes))
            case "submit":
                self.submit(rng.choice(new))
            case "talk":
                self.deliver(rng.choice(talk))
            case "read":
                self.transfer(rng.choice(transfers).transport, "land")
            case "scribble" | "corrupt" | "fail":
                if transfers:
                    self.transfer(rng.choice(transfers).transport, kind)
            case "cancel":
                self.cancel([client for client in self.clients if client.state == "running"])
            case "cut":
                self.cut([stream for stream in self.streams if not stream.is_over])
            case "kill":
                if rng.random() < 0.3:
                    self.kill(rng.choice(self.nodes))

    def step(self, node: Node) -> None:
        node.step()
        self.route(node)

    def submit(self, client: Client) -> None:
        self.num_attempts += 1
        client.attempt, client.state = f"r{self.num_attempts}", "running"
        client.node, lender = self.rng.sample(self.nodes, 2)
        borrows = self.rng.random() < 0.8
        if borrows:
            self.streams.append(Stream(client.attempt, client.node, lender))
        sampling = SamplingParams(client.max_tokens, temperature=0.0, ignore_eos=True)
        request = Generate(client.attempt, client.prompt, tuple(client.tokens), sampling, "", 0, borrow=borrows)
        computes = self.rng.random() < 0.7
        client.node.send(request._replace(lender_computes=computes))
        self.route(client.node)

    def transfer(self, transport: SlowTransport, how: str) -> None:
        if not transport.posted:
            transport.post(self.rng.choice(transport.busy()))
            return
        peer = self.rng.choice(sorted(transport.posted))
        self.seen[how] += 1
        match how:
            case "land":
                transport.land(peer)
            case "scribble":
                transport.scribble(peer, self.rng)
            case "corrupt":
                transport.land_corrupted(peer, self.rng)
            case "fail":
                transport.fail(peer)

    def cancel(self, running: list[Client]) -> None:
        if running:
            client = self.rng.choice(running)
            assert client.node is not None
            client.state = "cancelled"
            self.seen["cancelled"] += 1
            client.node.send(Cancel(client.attempt))
            self.route(client.node)

    def cut(self, live: list[Stream]) -> None:
        if live:
            self.seen["cut"] += 1
            self.end(self.rng.choice(live))

    def end(self, stream: Stream) -> None:
        """Both ends hear that the connection broke; what was under way is lost."""
        stream.is_over = True
        stream.to_lender.clear()
        stream.to_borrower.clear()
        if stream.lender in self.nodes:
            stream.to_lender.append(LendClosed(stream.request_id))
        if stream.borrower in self.nodes:
            stream.to_borrower.append(LoanFailed(stream.request_id, "the connection broke"))

    def kill(self, node: Node) -> None:
        self.seen["killed"] += 1
        self.seen["accepted"] += node.computer.num_accepted
        node.transport.close()
        self.nodes[self.nodes.index(node)] = self.new_node()
        for stream in self.streams:
            if node in (stream.borrower, stream.lender):
                self.end(stream)
        for client in self.clients:
            if client.state == "running" and client.node is node:
                client.state = "new"

    def deliver(self, stream: Stream) -> None:
        if stream.to_lender and (not stream.to_borrower or self.rng.random() < 0.5):
            stream.lender.send(stream.to_lender.popleft())
            self.route(stream.lender)
        else:
            stream.borrower.send(stream.to_borrower.popleft())
            self.route(stream.borrower)

    def route(self, node: Node) -> None:
        """Carry what an engine said."""
        said, node.said[:] = list(node.said), []
        by_id = {stream.request_id: stream for stream in self.streams}
        clients = {client.attempt: client for client in self.clients if client.node is node}
        for message in said:
            match message:
                case TokenSaid(request_id, token_id):
                    client = clients.get(request_id)
                    if client is not None and client.state == "running":
                        client.tokens.append(token_id)
                        self.seen["moved"] += bool(message.account is not None and message.account.moved_blocks)
                        self.seen["mismatched"] += bool(
                            message.account is not None and message.account.mismatched_blocks
                        )
                        if message.finish is not None:
                            client.state = "over"
                case Rejected(request_id):
                    client = clients.get(request_id)
                    if client is not None and client.state == "running":
                        assert not message.permanent, message.reason
                        client.state = "new"
                case OpenLoan(request_id, first, end, may_compute):
                    stream = by_id[request_id]
                    if not stream.is_over:
                        client = clients[request_id]
                        tokens = (*client.prompt, *client.tokens)[: end * BLOCK]
                        stream.to_lender.append(Lend(request_id, tokens, first, "", may_compute, 0))
                    else:
                        stream.to_borrower.append(LoanFailed(request_id, "the connection broke"))
                case ReleaseLoan(request_id, first, count):
                    self._to_lender(by_id[request_id], LendReleased(request_id, first, count))
                case CloseLoan(request_id):
                    self._to_lender(by_id[request_id], LendClosed(request_id))
                    by_id[request_id].is_over = True
                case LendStarting(loan_id, end, cached_end, queued_ms):
                    started = LoanStarted(loan_id, node.endpoint, end, cached_end, queued_ms)
                    self._to_borrower(by_id[loan_id], started)
                case LendReady(loan_id, first, block_ids, fingerprints, fetched):
                    self._to_borrower(by_id[loan_id], LoanBlocks(loan_id, first, block_ids, fingerprints, fetched))
                case LendRefused(loan_id, reason):
                    self._to_borrower(by_id[loan_id], LoanFailed(loan_id, reason))

    def _to_lender(self, stream: Stream, message: Any) -> None:
        if not stream.is_over and stream.lender in self.nodes:
            stream.to_lender.append(message)

    def _to_borrower(self, stream: Stream, message: Any) -> None:
        if not stream.is_over and stream.borrower in self.nodes:
            stream.to_borrower.append(message)


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        trial = Trial(seed)
        try:
            trial.run()
        except BaseException as error:
            error.add_note(f"seed {seed}, {trial.kind}")
            raise
        seen += trial.seen
        seen[trial.kind] += 1
    print(dict(seen))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
