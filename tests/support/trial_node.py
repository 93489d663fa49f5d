"""An engine under trial, and its clients."""

import math
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.backends.sim.runner import SimRunner
from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits, LoanHost
from engine.core_types import Chunk, EngineSequence, SampleResult, SamplingParams, StepBudget
from engine.messages.from_engine import FromEngine, Token
from engine.messages.to_engine import ToEngine
from kvcache.layout import KvLayout
from kvcache.store.kv_store import ObjectFormat
from kvtransfer.transport import Pool
from loans.reads.verification import BatchVerifier
from support.checked_core import NOTHING_LEFT, held, spread
from support.hand_network import HandNetwork
from support.memory_objects import MemoryObjects, StepExecutor, StepStore
from support.sim_model import LAYOUT, VOCAB, WIDTH
from support.slow_transport import SlowTransport


class TrialRunner(SimRunner):
    """Writes what comes back from a store in two halves; in between anything may happen."""

    def __init__(self, node: "Node", num_blocks: int) -> None:
        super().__init__(LAYOUT, num_blocks, VOCAB)
        self._node = node

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        half, node = len(content) // 2, self._node
        self.pool.memory[block, :half] = content[:half]
        node.writing = block
        node.interrupted()
        node.writing = None
        self.pool.memory[block, half:] = content[half:]


class TrialNode(ABC):
    """One engine process, whatever computes in it."""

    core: LoanHost
    writing: int | None = None
    """A block that half of a store's bytes have been written into."""

    def __init__(self, network: dict[bytes, Pool], name: str, engines: dict[bytes, HandNetwork]) -> None:
        self.name = name
        self.network = HandNetwork(engines, name)
        self.alive = True
        self.stopped = False
        self.said: list[FromEngine | Token] = []
        self.inbox: deque[ToEngine] = deque()
        """What its front has sent and was not handled yet."""
        self.transport = SlowTransport(network, name)
        self.interrupted: Callable[[], None] = lambda: None
        """What may happen in the middle of a write."""
        self.verifying = StepExecutor()
        """Performs the passes over blocks that arrived in a GPU's memory."""
        self.verified_too_early: list[int] = []
        """Blocks that were verified while a read might still write them."""
        self.stores: list[StepStore] = []

    def tell(self, message: FromEngine) -> None:
        """What the engine says to its front."""
        self.said += spread(message)

    def open_stores(
        self,
        layout: KvLayout,
        weights: bytes,
        clock: Callable[[], float],
        local: MemoryObjects | None,
        objects: MemoryObjects | None,
        writes_at_once: bool,
    ) -> list[StepStore]:
        """`objects`: of the store that it shares. `local`: of the store of its host."""
        object_format = ObjectFormat(layout.block_bytes, layout.kv_heads, layout.fingerprint(weights))
        if local is not None:
            self.stores.append(StepStore(local, object_format, clock, is_local=True))
        if objects is not None:
            self.stores.append(StepStore(objects, object_format, clock, writes_at_once=writes_at_once))
        return self.stores

    def start(self, core: LoanHost, on_gpu: bool) -> None:
        """`on_gpu`: blocks that arrive are verified later, as if its pool were in a GPU's memory."""
        self.core = core
        self.transport.on_gpu = on_gpu
        assert core.own_rank is not None
        core.own_rank.batch_verifier = BatchVerifier(self._fingerprints, self.verifying)
        self.endpoint = core.start().endpoint

    @abstractmethod
    def turn(self, rng: random.Random) -> bool:
        """Do a part of a step; return whether there was anything to do."""

    @abstractmethod
    def part_fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Fingerprints of the blocks' present bytes."""

    @abstractmethod
    def waits(self, chain: EngineSequence, block: int) -> bool:
        """No step reads or writes this block of a request's chain."""

    @property
    @abstractmethod
    def named(self) -> Collection[int]:
        """Blocks with names."""

    @property
    def quarantined(self) -> Collection[int]:
        """Blocks that an unfinished read may still write into."""
        return self.core.cached.pool.quarantined

    def tokens_for(self, num_blocks: int) -> int:
        """Tokens that fill so many blocks."""
        return num_blocks * WIDTH

    def send(self, message: ToEngine) -> None:
        """It is handled now, after what arrived before; by a stopped process, when it wakes."""
        self.inbox.append(message)
        if not self.stopped:
            self.receive()

    def receive(self) -> None:
        self.core.handle_posted()
        while self.inbox:
            self.core.handle(self.inbox.popleft())
        self.core.handle_posted()

    def _fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        written = {block for read in self.transport.posted.values() for block in read.blocks()}
        self.verified_too_early += [block for block in blocks if block in written or block == self.writing]
        return self.part_fingerprints(blocks)

    def check(self) -> None:
        """The accounting balances, and nothing is anybody's that a read may still write into."""
        audited = self.core.audit()
        assert audited.fault == "", f"{self.name}: {audited.fault}"
        assert not self.verified_too_early, f"{self.name}: blocks are verified while they are written"
        for read in self.transport.posted.values():
            for block in read.blocks():
                self._check_read_into(block)
        if self.writing is not None:
            self._check_read_into(self.writing)

    def _check_read_into(self, block: int) -> None:
        """It is nobody's, or that of one sequence which waits for it."""
        owners = [
            self.waits(chain, block)
            for request in self.core.requests.by_id.values()
            for chain in request.chains.values()
            if block in chain.blocks
        ]
        owners += [
            loan.fetching
            for loan in self.core.lender_manager.loans.values()
            if loan.job is not None and block in loan.job.blocks
        ]
        if block in self.quarantined:
            assert not owners, f"{self.name}: block {block} is quarantined and owned"
        else:
            assert len(owners) == 1, f"{self.name}: block {block} is read into and has {len(owners)} owners"
            assert owners[0], f"{self.name}: block {block} is in use while a read is in flight"
            assert block not in self.named, f"{self.name}: block {block} is named while a read is in flight"

    def check_contents(self) -> None:
        """A named block never changes after its fingerprint was taken."""
        blocks = sorted(self.named)
        now, cached = self.part_fingerprints(blocks), self.core.cached
        assert now.tobytes() == cached.fingerprints_of(blocks), f"{self.name}: a named block has changed"

    def check_at_rest(self) -> None:
        """Nothing is held for anybody, in the pool or below it."""
        left = held(self.core)
        assert left == NOTHING_LEFT, f"{self.name} holds {left} at rest"
        assert not self.verifying.waiting, f"{self.name}: blocks wait to be verified at rest"
        assert self.core.borrower_manager.num_loans == 0, f"{self.name} borrows at rest"
        for store in self.stores:
            assert store.num_fetching == 0, f"{self.name}: a fetch was not given back"
            assert not store.writing, f"{self.name}: a block is still to be written"


class Node(TrialNode):
    """One with Tandem's own scheduler."""

    core: EngineCore

    def __init__(
        self,
        network: dict[bytes, Pool],
        name: str,
        num_blocks: int,
        budget: StepBudget,
        reserve: int = 256,
        local: MemoryObjects | None = None,
        read_silence_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        objects: MemoryObjects | None = None,
        on_gpu: bool = False,
        engines: dict[bytes, HandNetwork] | None = None,
    ) -> None:
        """`engines`: those whose loans it can take."""
        super().__init__(network, name, {} if engines is None else engines)
        self.runner = TrialRunner(self, num_blocks)
        limits = EngineLimits(budget, 4, reserve, report_interval_s=0.0, read_silence_s=read_silence_s)
        stores = self.open_stores(
            LAYOUT, self.runner.info.weights_fingerprint, clock, local, objects, writes_at_once=num_blocks % 2 == 0
        )
        core = EngineCore(
            self.runner, self.transport, limits, self.tell, stores=stores, clock=clock, network=self.network
        )
        self.start(core, on_gpu)
        self.batch: list[Chunk] = []
        """Being computed: `end_step` is still to come."""
        self.sampled: list[SampleResult] | None = None

    def turn(self, rng: random.Random) -> bool:
        """A step begins, or ends. In between anything else may happen to the engine."""
        if self.batch:
            # The runner writes at any time between the halves: here just before the end, or just after the beginning.
            sampled = self.runner.execute(self.batch) if self.sampled is None else self.sampled
            batch, self.batch = self.batch, []
            self.core.end_step(batch, sampled)
            return True
        self.batch = self.core.begin_step()
        self.sampled = self.runner.execute(self.batch) if rng.random() < 0.5 else None
        return bool(self.batch)

    def part_fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        return self.runner.part_fingerprints(blocks)

    def waits(self, chain: EngineSequence, block: int) -> bool:
        if chain not in self.core.requests.running_set:
            return True
        return chain.held_at is not None and chain.held_at <= chain.blocks.index(block) * WIDTH

    @property
    def named(self) -> dict[int, tuple[bytes, bytes]]:
        return self.core.kv_cache.pool.name_of


@dataclass(eq=False)
class Client:
    """A request as its client sees it, over all attempts."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    num_choices: int = 1
    scored: bool = False
    """It wants log probabilities of its prompt."""
    deadline: float = float("inf")
    """The last move of the trial that it waits for."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By choice."""
    finished: set[int] = field(default_factory=set)
    scores: list[float] = field(default_factory=list)
    state: str = "new"
    attempt: str = ""
    """The request id of the latest attempt."""

    @property
    def sampling(self) -> SamplingParams:
        scores = 0 if self.scored else None
        return SamplingParams(self.max_tokens, n=self.num_choices, prompt_logprobs=scores)

    def chain(self) -> tuple[int, ...]:
        """The tokens of the choice that borrows for all."""
        lead = next(choice for choice in range(self.num_choices) if choice not in self.finished)
        return (*self.prompt, *self.tokens.get(lead, ()))


@dataclass(frozen=True)
class Attempt:
    """A client's request at one engine."""

    client: Client
    node: TrialNode
    chain: tuple[int, ...]
    """The tokens it may borrow blocks of."""
