"""A model runner over several ranks."""

import pickle
from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from engine.core_types import Chunk, SampleResult
from engine.kv.rows import Allocate
from engine.model_runner import ModelRunner
from engine.tensor_parallel.gathering import GatheredBlocks, GatheringRank
from engine.tensor_parallel.steps import StepWriter, filled_blocks
from kvtransfer.fingerprint import Folding
from kvtransfer.ranks import BlockPart


class FollowingRank(GatheringRank):
    """A follower rank that computes steps on command.

    Its methods raise RankLost when it is gone.
    """

    @abstractmethod
    def begin_step(self, step: bytes) -> None:
        """Compute a pickled `Step`, now."""

    @abstractmethod
    def end_step(self) -> NDArray[np.uint64]:
        """Wait for the step; return fingerprints of this rank's part of the filled blocks, [blocks, its KV heads]."""

    @abstractmethod
    def copy_block(self, source: int, target: int) -> None:
        """Make block `target` equal to `source` before returning.

        Not while a step runs.
        """


class ParallelRunner(ModelRunner):
    """Runner of rank 0, which computes at the same time as its followers and samples.

    Ranks meet in the model's sums.
    """

    def __init__(self, own: ModelRunner, followers: Seq[FollowingRank], allocate: Allocate) -> None:
        """Create the runner.

        `own` has the layout of whole blocks, and its part of each in its pool. `allocate` returns memory that all ranks
        map.
        """
        self.layout, self.info, self.pool, self.grammars = own.layout, own.info, own.pool, own.grammars
        self.gpu = own.gpu
        self._own = own
        self._followers = followers
        self._writer = StepWriter()
        self._part = BlockPart(own.layout.block_bytes, 0, 1 + len(followers))
        self._gathered = GatheredBlocks(own.layout.block_bytes, followers, allocate, (self._part, own.read_blocks))
        self._filled: dict[int, NDArray[np.uint64]] = {}
        """Fingerprints, of all heads, of the blocks that the last step filled."""

    def bind(self, own_cores: Seq[int], shared_cores: Seq[int]) -> None:
        self._own.bind(own_cores, shared_cores)

    def execute(self, batch: Seq[Chunk]) -> list[SampleResult]:
        step = pickle.dumps(self._writer.step(batch), pickle.HIGHEST_PROTOCOL)
        for follower in self._followers:
            follower.begin_step(step)
        sampled = self._own.execute(batch)
        blocks = filled_blocks(batch, self.layout.block_tokens)
        parts = [self._own.part_fingerprints(blocks), *(follower.end_step() for follower in self._followers)]
        self._filled = dict(zip(blocks, np.concatenate(parts, axis=1), strict=True))
        return sampled

    def copy_block(self, source: int, target: int) -> None:
        self._own.copy_block(source, target)
        for follower in self._followers:
            follower.copy_block(source, target)

    def read_blocks(self, blocks: Seq[int]) -> Iterator[NDArray[np.uint8]]:
        return self._gathered.read(blocks)

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        self._own.write_block(block, self._part.of(content))

    def fingerprints(self, blocks: Seq[int]) -> NDArray[np.uint64]:
        return np.array([self._filled[block] for block in blocks], np.uint64).reshape(-1, self.layout.kv_heads)

    def part_fingerprints(self, blocks: Seq[int]) -> NDArray[np.uint64]:
        return self._own.part_fingerprints(blocks)

    @property
    def folding(self) -> Folding | None:
        return self._own.folding
