"""Engines of several ranks in one process: the sim engine computes whole blocks, the ranks have their parts of them.

What a loan brings, each rank has read for itself; so a token, which is a hash of all heads of the KV, is right only if
every rank read its part right.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.backends.sim.runner import SimRunner
from engine.core.engine_core import EngineLimits
from engine.core_types import Chunk, SampleResult
from engine.kv.layout import KvLayout
from engine.lending.block_reads import LocalRank, RemoteRank
from engine.model_runner import ModelRunner
from kvtransfer.fingerprint import Fingerprints
from kvtransfer.local import LocalTransport
from kvtransfer.ranks import BlockPart
from kvtransfer.transport import Pool, Transport
from support.checked_core import LandingCore
from support.core_engine import WIDE
from support.sim_model import LAYOUT, VOCAB
from support.slow_transport import SlowTransport


class NearRank(LocalRank, RemoteRank):
    """Another rank, which happens to be in this process."""


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

    def copy_block(self, source: int, target: int) -> None:
        for pool in self.pools:
            pool.memory[target] = pool.memory[source]


class ShardedEngine(LandingCore):
    """An engine alone, its core over so many ranks, each with a transport of its own."""

    def __init__(self, name: str, ranks: int, open_transport: Callable[[str], Transport], num_blocks: int = 8) -> None:
        self.sharded = ShardedSim(num_blocks, ranks)
        self.ranks = [open_transport(f"{name}-{rank}") for rank in range(ranks)]
        others: list[RemoteRank] = []
        for rank, transport in enumerate(self.ranks[1:], 1):
            part = BlockPart(LAYOUT.block_bytes, rank, ranks)
            other = NearRank(transport, part, self.sharded.prints_of(rank), self.sharded.folding)
            other.endpoint = transport.register(self.sharded.pools[rank])
            others.append(other)
        limits = EngineLimits(WIDE, 2, report_interval_s=0.0, min_report_interval_s=0.0)
        super().__init__(self.sharded, self.ranks[0], limits, others=others)

    def land(self) -> bool:
        """One read, of the last rank that has any."""
        steps = (rank.step() for rank in reversed(self.ranks) if isinstance(rank, LocalTransport | SlowTransport))
        return any(steps)
