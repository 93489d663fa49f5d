"""Execution of vLLM's batches on one rank or on several tensor-parallel ranks.

Each rank is a process with vLLM's EngineCore, of which followers use the executor only. Rank 0 schedules, and sends
each batch to its followers before it computes the batch itself. The ranks meet in vLLM's own sums.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from engine.backends.vllm.kv_memory import VllmKvMemory
from engine.tensor_parallel.runner import FollowingRank
from kvtransfer.fingerprint import Folding


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: vLLM's batch, and the blocks that are full after it."""

    output: SchedulerOutput
    filled: list[int] = field(default_factory=list)


def rank_executor(rank: int, meeting: Path) -> type[UniProcExecutor]:
    """Return the class of executors whose only worker is `rank` of several, which meet through a file."""

    class RankExecutor(UniProcExecutor):
        """Executor of this rank."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{meeting}", rank, rank

    return RankExecutor


def execute(executor: Any, output: SchedulerOutput) -> Any:
    """Compute a batch on this process's rank and return vLLM's result of it."""
    computed = executor.execute_model(output)
    return executor.sample_tokens(None) if computed is None else computed


class BatchRunner:
    """Runner of rank 0: computes batches at the same time as the followers do."""

    def __init__(self, executor: Any, memory: VllmKvMemory, followers: Sequence[FollowingRank]) -> None:
        self._executor = executor
        self._memory = memory
        self._followers = followers

    def execute(self, batch: Batch) -> Any:
        """Return vLLM's result of the batch.

        Raises RankLost, and what vLLM raises.
        """
        if not self._followers:
            return execute(self._executor, batch.output)
        step = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        for follower in self._followers:
            follower.begin_step(step)
        computed = execute(self._executor, batch.output)
        parts = [self._memory.part_fingerprints(batch.filled), *(each.end_step() for each in self._followers)]
        self._memory.filled = dict(zip(batch.filled, np.concatenate(parts, axis=1), strict=True))
        return computed


class VllmFollower:
    """Runner of a follower rank."""

    folding: Folding | None = None

    def __init__(self, executor: Any, memory: VllmKvMemory) -> None:
        self._executor = executor
        self.pool = memory.pool
        self.part = memory.part
        self.fingerprints = memory.part_fingerprints
        self.read_blocks = memory.read_parts
        self.write_block = memory.write_part

    def follow(self, step: bytes) -> NDArray[np.uint64]:
        """Compute rank 0's batch; return this rank's fingerprints of the blocks that it filled."""
        batch: Batch = pickle.loads(step)
        execute(self._executor, batch.output)
        return self.fingerprints(batch.filled)

    def copy_block(self, source: int, target: int) -> None:
        """Refuse: vLLM copies no blocks."""
        raise NotImplementedError
