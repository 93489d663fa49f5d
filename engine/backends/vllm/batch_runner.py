"""Execution of vLLM's batches on one rank or on several tensor-parallel ranks.

Each rank is a process with vLLM's EngineCore, of which followers use the executor only. Rank 0 schedules, and sends
each batch to its followers before it computes the batch itself. The ranks meet in vLLM's own sums.
"""

import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
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

    def take(self) -> tuple[Any, Any] | None:
        """Return the tag and the result of the next finished call; None while it runs."""


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


class Batches(ABC):
    """Batches between vLLM's scheduler and its executor; their results come in the order in which they were started."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether `take` returns a result, although nothing woke the loop."""

    @abstractmethod
    def start(self, output: Any, grammar: Any) -> None:
        """Compute the batch of a SchedulerOutput and sample its tokens."""

    @abstractmethod
    def launch(self, output: Any) -> None:
        """Compute a batch up to its logits; `sample` must follow before any other batch is started."""

    @abstractmethod
    def sample(self, output: Any, grammar: Any) -> None:
        """Sample the tokens of the launched batch."""

    @abstractmethod
    def take(self) -> tuple[Any, Any] | None:
        """Return the next batch that has ended, and vLLM's result of it; None while it runs.

        Raises what computing raised.
        """


class LaunchedBatches(Batches):
    """Batches that the loop's thread launches on a GPU.

    Another thread waits for the copy of a result and wakes the loop. It does nothing else: each moment of it in Python
    is one in which the loop's thread stands still.
    """

    def __init__(self, executor: Any, thread: Thread, mark_launched: Callable[[], Any] | None = None) -> None:
        """Create it; `thread` waits.

        With `mark_launched` a batch ends when all that it launched has run, and not with its samples: draft layers
        write KV after these. It returns an event of the stream on which vLLM launches.
        """
        self._executor = executor
        self._thread = thread
        self._mark_launched = mark_launched
        self._launched: Any = None
        """vLLM's future of a batch that is launched and not sampled."""
        self._flying: deque[tuple[Any, Any, Any, Sequence[Any]]] = deque()
        """Batches in flight: SchedulerOutput, vLLM's futures of its launch and of its samples, and the events with
        which the batch ends."""

    @property
    def has_ended(self) -> bool:
        return bool(self._flying) and all(event.query() for event in self._flying[0][3])

    def start(self, output: Any, grammar: Any) -> None:
        self.launch(output)
        self.sample(output, grammar)

    def launch(self, output: Any) -> None:
        self._launched = self._executor.execute_model(output, non_block=True)

    def sample(self, output: Any, grammar: Any) -> None:
        sampled = None
        if output.total_num_scheduled_tokens:
            sampled = self._executor.sample_tokens(grammar, non_block=True)
        events = _ends_of(sampled)
        if events and self._mark_launched is not None:
            events.append(self._mark_launched())
        self._flying.append((output, self._launched, sampled, events))
        self._launched = None
        for event in events:
            if not event.query():
                self._thread.submit(None, event.synchronize)

    def take(self) -> tuple[Any, Any] | None:
        while self._thread.take() is not None:
            pass  # a wait that is over
        if not self.has_ended:
            return None
        output, launched, sampled, _ = self._flying.popleft()
        result = None if sampled is None else sampled.result()
        return output, launched.result() if result is None else result


def _ends_of(sampled: Any) -> list[Any]:
    """Return the events after which a future of a batch's samples has its result in main memory."""
    event = getattr(getattr(sampled, "async_output", None), "copy_event", None)
    return [event] if hasattr(event, "query") else []  # vLLM's events on a CPU cannot be asked


def mark_launched() -> Any:
    """Return a CUDA event after all that this thread has launched so far."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class ComputedBatches(Batches):
    """Batches that another thread computes, on a CPU or with several ranks."""

    def __init__(
        self,
        executor: Any,
        thread: Thread,
        memory: VllmKvMemory,
        followers: Sequence[FollowingRank],
        will_fill: Callable[[Any], list[int]],
    ) -> None:
        """Create it; `thread` computes, and `will_fill` gives the blocks that a batch fills."""
        self._executor = executor
        self._thread = thread
        self._memory = memory
        self._followers = followers
        self._will_fill = will_fill

    @property
    def has_ended(self) -> bool:
        return False  # the thread wakes the loop

    def start(self, output: Any, grammar: Any) -> None:
        if self._followers:
            step = _Step(output, self._will_fill(output))
            self._thread.submit(output, partial(self._with_followers, step))
        else:
            self._thread.submit(output, partial(_execute, self._executor, _own(output), grammar))

    def launch(self, output: Any) -> None:
        assert not self._followers, "batches of several ranks have no grammars of vLLM's"
        self._thread.submit(None, partial(self._executor.execute_model, _own(output)))

    def sample(self, output: Any, grammar: Any) -> None:
        self._thread.submit(output, partial(self._executor.sample_tokens, grammar))

    def take(self) -> tuple[Any, Any] | None:
        while (computed := self._thread.take()) is not None:
            if computed[0] is not None:  # None: a launch
                return computed
        return None

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
