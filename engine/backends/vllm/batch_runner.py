"""Execution of vLLM's batches on one rank or on several tensor-parallel ranks.

Each rank is a process with vLLM's EngineCore, of which followers use the executor only. Rank 0 schedules, and sends
each batch to its followers before it computes the batch itself. The ranks meet in vLLM's own sums.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from engine.backends.vllm.kv_memory import VllmKvMemory
from engine.tensor_parallel.runner import FollowingRank
from kvtransfer.fingerprint import Folding


class Thread(Protocol):
    """Thread that performs calls in order."""

    def submit(self, tag: Any, compute: Callable[[], Any]) -> None:
        """Perform `compute` after all earlier calls, and keep its result with `tag`."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step as followers get it: vLLM's batch, and the blocks that are full after it."""

    output: SchedulerOutput
    filled: list[int] = field(default_factory=list)


def rank_executor(rank: int, meeting: Path) -> type[UniProcExecutor]:
    """Return the class of executors whose only worker is `rank` of several, which meet through a file."""

    class RankExecutor(UniProcExecutor):
        """Executor of this rank."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{meeting}", rank, rank

    return RankExecutor


class BatchRunner:
    """Runner of rank 0: starts batches, whose results come out of `thread` with their SchedulerOutput as the tag.

    Results come in the order of the batches.
    """

    def __init__(
        self,
        executor: Any,
        memory: VllmKvMemory,
        followers: Sequence[FollowingRank],
        thread: Thread,
        launches_here: bool,
        will_fill: Callable[[Any], list[int]],
    ) -> None:
        """Create the runner.

        `launches_here`: batches are launched on the calling thread, and `thread` waits for their results; otherwise
        `thread` computes them. `will_fill` gives the blocks that a batch fills.
        """
        self._executor = executor
        self._memory = memory
        self._followers = followers
        self._thread = thread
        self._launches_here = launches_here
        self._will_fill = will_fill
        self._launched: Any = None
        """vLLM's future of a batch that is launched and not sampled."""

    def start(self, output: Any, grammar: Any) -> None:
        """Compute a batch and sample its tokens."""
        if self._followers:
            step = _Step(output, self._will_fill(output))
            self._thread.submit(output, partial(self._with_followers, step))
        elif self._launches_here:
            self.launch(output)
            self.sample(output, grammar)
        else:
            self._thread.submit(output, partial(_execute, self._executor, _own(output), grammar))

    def launch(self, output: Any) -> None:
        """Compute a batch up to its logits; `sample` must follow before any other batch is started."""
        assert not self._followers, "batches of several ranks have no grammars of vLLM's"
        if self._launches_here:
            self._launched = self._executor.execute_model(output, non_block=True)
        else:
            self._thread.submit(None, partial(self._executor.execute_model, _own(output)))

    def sample(self, output: Any, grammar: Any) -> None:
        """Sample the tokens of the launched batch."""
        if not self._launches_here:
            self._thread.submit(output, partial(self._executor.sample_tokens, grammar))
            return
        launched, sampled = self._launched, None
        if output.total_num_scheduled_tokens:
            sampled = self._executor.sample_tokens(grammar, non_block=True)
        self._thread.submit(output, partial(_result, launched, sampled))

    def _with_followers(self, step: _Step) -> Any:
        """Return vLLM's result of a batch that all ranks compute.

        Raises RankLost, and what vLLM raises.
        """
        message = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
        for follower in self._followers:
            follower.begin_step(message)
        computed = _execute(self._executor, step.output, None)
        parts = [self._memory.part_fingerprints(step.filled), *(each.end_step() for each in self._followers)]
        self._memory.filled = dict(zip(step.filled, np.concatenate(parts, axis=1), strict=True))
        return computed


def _execute(executor: Any, output: SchedulerOutput, grammar: Any) -> Any:
    """Compute a batch on this process's rank and return vLLM's result of it."""
    computed = executor.execute_model(output)
    return executor.sample_tokens(grammar) if computed is None else computed


def _result(launched: Any, sampled: Any) -> Any:
    """Wait for vLLM's result of a batch.

    Raises what vLLM raised.
    """
    result = None if sampled is None else sampled.result()
    return launched.result() if result is None else result


def _own(output: SchedulerOutput) -> SchedulerOutput:
    """Return a batch of which another thread may read the tokens while the scheduler adds to them."""
    for new in output.scheduled_new_reqs:
        if new.prefill_token_ids is not None:
            new.prefill_token_ids = list(new.prefill_token_ids)
    return output


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
        batch: _Step = pickle.loads(step)
        _execute(self._executor, batch.output, None)
        return self.fingerprints(batch.filled)

    def copy_block(self, source: int, target: int) -> None:
        """Refuse: vLLM copies no blocks."""
        raise NotImplementedError
