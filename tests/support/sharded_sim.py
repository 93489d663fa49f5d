"""Engines of several ranks in one process: the sim engine computes whole blocks, the ranks have their parts of them.

What a loan brings, each rank has read for itself; so a token, which is a hash of all heads of the KV, is right only if
every rank read its part right.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.backends.sim.runner import SimRunner
from engine.block_parts.messages import GatheredBlocks, GatheringRank
from engine.block_parts.part_service import MappedMemory, PartCopies, SharedMemory
from engine.core.loan_host import EngineLimits
from engine.core_types import Chunk, SampleResult
from engine.model_runner import ModelRunner
from kvcache.layout import KvLayout
from kvcache.store.kv_store import ObjectFormat
from kvtransfer.fingerprint import Fingerprints
from kvtransfer.local import LocalTransport
from kvtransfer.ranks import BlockPart
from kvtransfer.transport import Pool, Transport
from loans.reads.block_reads import BlockRead, LocalRank, OnQuiet, RemoteRank
from loans.reads.verification import Corruption
from support.checked_core import LandingCore
from support.core_engine import WIDE
from support.hand_network import HandNetwork
from support.memory_objects import MemoryObjects, StepExecutor, StepStore
from support.sim_model import LAYOUT, VOCAB
from support.slow_transport import SlowTransport


class NearPool:
    """Another rank's parts of blocks. What is written comes in two halves; in between, `interrupted` is called."""

    def __init__(self, pool: Pool) -> None:
        self._memory = pool.memory
        self.interrupted: Callable[[], None] = lambda: None

    def read_blocks(self, blocks: Sequence[int]) -> Iterable[NDArray[np.uint8]]:
        return [self._memory[block] for block in blocks]

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        half = len(content) // 2
        self._memory[block, :half] = content[:half]
        self.interrupted()
        self._memory[block, half:] = content[half:]


class NearRank(LocalRank, RemoteRank, GatheringRank):
    """Another rank, which happens to be in this process. It copies whole blocks when a test says so."""

    def __init__(
        self, transport: Transport, part: BlockPart, sharded: "ShardedSim", memory: SharedMemory, rank: int
    ) -> None:
        super().__init__(transport, part, sharded.prints_of(rank), sharded.folding)
        self.endpoint = transport.register(sharded.pools[rank])
        self.near_pool = NearPool(sharded.pools[rank])
        self._shared = memory
        self.executor = StepExecutor()
        self.copies = PartCopies(part, self.near_pool, MappedMemory(os.dup(memory.descriptor)), self, self.executor)
        self.writing: list[tuple[BlockRead, Sequence[int]]] = []
        """Copies that were started, with the blocks they write."""

    def begin_gather(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self.copies.gather(blocks, self._shared.offset_of(rows))

    def end_gather(self) -> None:
        pass

    def start_copy(self, contents: Sequence[NDArray[np.uint8]], blocks: Sequence[int], on_quiet: OnQuiet) -> BlockRead:
        copying = self.copies.start([self._shared.offset_of(content) for content in contents], blocks, on_quiet)
        self.writing = [each for each in self.writing if not each[0].is_quiet] + [(copying, tuple(blocks))]
        return copying

    def corrupt(self, num_blocks: int) -> None:
        self.corruption = Corruption(self.near_pool, num_blocks)


class ShardedSim(ModelRunner):
    """Computes in a pool of its own, which is made of the ranks' parts before each step and cut into them after it."""

    def __init__(self, num_blocks: int, ranks: int) -> None:
        self._sim = SimRunner(LAYOUT, num_blocks, VOCAB)
        self.layout, self.info = self._sim.layout, self._sim.info
        part = LAYOUT.part(ranks)
        self.pools = [Pool(np.zeros((num_blocks, part.block_bytes), np.uint8)) for _ in range(ranks)]
        self.pool = self.pools[0]
        self._prints = [Fingerprints(pool.memory, part.kv_heads) for pool in self.pools]

    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        width = self.pools[0].memory.shape[1]
        for rank, pool in enumerate(self.pools):
            self._sim.pool.memory[:, rank * width : (rank + 1) * width] = pool.memory
        sampled = self._sim.execute(batch)
        for rank, pool in enumerate(self.pools):
            pool.memory[:] = self._sim.pool.memory[:, rank * width : (rank + 1) * width]
        return sampled

    @property
    def pool_layout(self) -> KvLayout:
        return LAYOUT.part(len(self.pools))

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        return np.concatenate([of.of(blocks) for of in self._prints], axis=1)

    def prints_of(self, rank: int) -> Callable[[Sequence[int]], NDArray[np.uint64]]:
        return self._prints[rank].of

    def part_fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        return self._prints[0].of(blocks)

    def gather_from(self, followers: Sequence[GatheringRank], memory: SharedMemory) -> None:
        """Read whole blocks as rank 0 does."""
        part = BlockPart(LAYOUT.block_bytes, 0, len(self.pools))
        self._gathered = GatheredBlocks(LAYOUT.block_bytes, followers, memory.take, (part, super().read_blocks))
        self._part = part

    def read_blocks(self, blocks: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        return self._gathered.read(blocks)

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        super().write_block(block, self._part.of(content))

    def copy_block(self, source: int, target: int) -> None:
        for pool in self.pools:
            pool.memory[target] = pool.memory[source]


@dataclass(frozen=True, slots=True)
class Below:
    """Objects of the stores below a pool."""

    local: MemoryObjects | None = None
    objects: MemoryObjects | None = None
    writes_at_once: bool = False

    def open(self, memory: SharedMemory) -> list[StepStore]:
        object_format = ObjectFormat(LAYOUT.block_bytes, LAYOUT.kv_heads, LAYOUT.fingerprint(b"sim"))
        options = [
            (self.local, {"is_local": True}),
            (self.objects, {"writes_at_once": self.writes_at_once}),
        ]
        return [
            StepStore(objects, object_format, lambda: 100.0, allocate=memory.take, **each)
            for objects, each in options
            if objects is not None
        ]


class ShardedEngine(LandingCore):
    """An engine alone, its core over so many ranks, each with a transport of its own."""

    def __init__(
        self,
        name: str,
        ranks: int,
        open_transport: Callable[[str], Transport],
        num_blocks: int = 8,
        below: "Below | None" = None,
        engines: dict[bytes, HandNetwork] | None = None,
    ) -> None:
        self.sharded = ShardedSim(num_blocks, ranks)
        self.ranks = [open_transport(f"{name}-{rank}") for rank in range(ranks)]
        self.memory = SharedMemory()
        self.others: list[NearRank] = []
        for rank, transport in enumerate(self.ranks[1:], 1):
            part = BlockPart(LAYOUT.block_bytes, rank, ranks)
            self.others.append(NearRank(transport, part, self.sharded, self.memory, rank))
        self.sharded.gather_from(self.others, self.memory)
        self.stores = below.open(self.memory) if below is not None else []
        limits = EngineLimits(WIDE, 2, report_interval_s=0.0, min_report_interval_s=0.0)
        network = HandNetwork({} if engines is None else engines, name)
        super().__init__(self.sharded, self.ranks[0], limits, network, others=self.others, stores=self.stores)

    def land(self) -> bool:
        """One read, of the last rank that has any."""
        steps = (rank.step() for rank in reversed(self.ranks) if isinstance(rank, LocalTransport | SlowTransport))
        return any(steps)
