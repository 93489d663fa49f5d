"""Execution of vLLM's batches: launched on a GPU, computed on a CPU, or sent to several ranks."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Thread(Protocol):
    """Thread that performs calls in order."""

    def submit(self, tag: Any, compute: Callable[[], Any]) -> None:
        """Perform `compute` after all earlier calls, and keep its result with `tag`."""

    def take(self) -> tuple[Any, Any] | None:
        """Return the tag and the result of the next finished call; None while it runs."""


class Batches(ABC):
    """Batches between vLLM's scheduler and its executor; their results come in the order in which they were started."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether `take` returns a result, although nothing woke the loop."""

    def start(self, output: Any, grammar: Any) -> None:
        """Compute the batch of a SchedulerOutput and sample its tokens."""
        self.launch(output)
        self.sample(output, grammar)

    @abstractmethod
    def launch(self, output: Any) -> None:
        """Compute a batch up to its logits; `sample` must follow before any other batch is started."""

    @abstractmethod
    def sample(self, output: Any, grammar: Any) -> None:
        """Sample the tokens of the launched batch."""

    @abstractmethod
    def start_dummy(self) -> None:
        """Compute a batch of nobody, so that other data-parallel ranks can compute theirs."""

    @abstractmethod
    def take(self) -> tuple[Any, Any] | None:
        """Return the next batch that has ended, None for a dummy, and vLLM's result of it; None while it runs.

        Raises what computing raised.
        """


class LaunchedBatches(Batches):
    """Batches that the loop's thread launches on a GPU.

    Another thread waits for the copy of a result and wakes the loop. It does nothing else: each moment of it in Python
    is one in which the loop's thread stands still.
    """

    def __init__(
        self, executor: Any, thread: Thread, mark_launched: Callable[[], Any] | None = None, samples: bool = True
    ) -> None:
        """Create it; `thread` waits. A pooling runner, which `samples` nothing, has its result with the launch.

        With `mark_launched` a batch ends when all that it launched has run, and not with its samples: draft layers
        write KV after these. It returns an event of the stream on which vLLM launches.
        """
        self._executor = executor
        self._thread = thread
        self._samples = samples
        self._mark_launched = mark_launched
        self._launched: Any = None
        """vLLM's future of a batch that is launched and not sampled."""
        self._flying: deque[tuple[Any, Any, Any, Sequence[Any]]] = deque()
        """Batches in flight: SchedulerOutput, vLLM's futures of its launch and of its samples, and the events with
        which the batch ends. A dummy has events only."""

    @property
    def has_ended(self) -> bool:
        return bool(self._flying) and all(event.query() for event in self._flying[0][3])

    def launch(self, output: Any) -> None:
        self._launched = self._executor.execute_model(output, non_block=True)

    def sample(self, output: Any, grammar: Any) -> None:
        sampled = None
        if output.total_num_scheduled_tokens and self._samples:
            sampled = self._executor.sample_tokens(grammar, non_block=True)
        events = _ends_of(sampled if self._samples else self._launched)
        if events and self._mark_launched is not None:
            events.append(self._mark_launched())
        self._flying.append((output, self._launched, sampled, events))
        self._launched = None
        for event in events:
            if not event.query():
                self._thread.submit(None, event.synchronize)

    def start_dummy(self) -> None:
        self._executor.execute_dummy_batch()
        self._flying.append((None, None, None, [mark_launched()] if torch.cuda.is_available() else []))
        for event in self._flying[-1][3]:
            self._thread.submit(None, event.synchronize)

    def take(self) -> tuple[Any, Any] | None:
        while self._thread.take() is not None:
            pass  # a wait that is over
        if not self.has_ended:
            return None
        output, launched, sampled, _ = self._flying.popleft()
        if output is None:
            return None, None
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
    """Batches that another thread computes, on a CPU."""

    def __init__(self, executor: Any, thread: Thread) -> None:
        """Create it; `thread` computes."""
        self._executor = executor
        self._thread = thread

    @property
    def has_ended(self) -> bool:
        return False  # the thread wakes the loop

    def start(self, output: Any, grammar: Any) -> None:
        self._thread.submit(output, partial(_execute, self._executor, _own(output), grammar))

    def launch(self, output: Any) -> None:
        self._thread.submit(_LAUNCH, partial(self._executor.execute_model, _own(output)))

    def sample(self, output: Any, grammar: Any) -> None:
        self._thread.submit(output, partial(self._executor.sample_tokens, grammar))

    def start_dummy(self) -> None:
        self._thread.submit(None, self._executor.execute_dummy_batch)

    def take(self) -> tuple[Any, Any] | None:
        while (computed := self._thread.take()) is not None:
            if computed[0] is not _LAUNCH:
                return computed
        return None


_LAUNCH = object()
"""Tag of a launch, whose batch ends with its samples."""


class SentBatches(Batches):
    """Batches that the loop's thread sends to worker processes.

    Another thread waits for their results, in the order in which the batches were sent.
    """

    def __init__(self, executor: Any, thread: Thread, samples: bool = True) -> None:
        """Create it; `thread` waits. A pooling runner, which `samples` nothing, has its result with the launch."""
        self._executor = executor
        self._thread = thread
        self._samples = samples
        self._launched: Any = None
        """vLLM's future of a batch that is launched and not sampled."""

    @property
    def has_ended(self) -> bool:
        return False  # the thread wakes the loop

    def launch(self, output: Any) -> None:
        self._launched = self._executor.execute_model(output, non_block=True)

    def sample(self, output: Any, grammar: Any) -> None:
        launched, self._launched, sampled = self._launched, None, None
        if output.total_num_scheduled_tokens and self._samples:
            sampled = self._executor.sample_tokens(grammar, non_block=True)
        self._thread.submit(output, partial(_received, launched, sampled))

    def start_dummy(self) -> None:
        executor = self._executor
        sent = executor.collective_rpc("execute_dummy_batch", unique_reply_rank=executor.output_rank, non_block=True)
        self._thread.submit(None, sent.result)

    def take(self) -> tuple[Any, Any] | None:
        return self._thread.take()


def _received(launched: Any, sampled: Any) -> Any:
    """Wait for the result of a batch that was sent to worker processes.

    Raises what one of them raised.
    """
    result = launched.result()
    return result if sampled is None else sampled.result()


def _execute(executor: Any, output: "SchedulerOutput", grammar: Any) -> Any:
    """Compute a batch on this process's rank and return vLLM's result of it."""
    computed = executor.execute_model(output)
    return executor.sample_tokens(grammar) if computed is None else computed


def _own(output: "SchedulerOutput") -> "SchedulerOutput":
    """Return a batch of which another thread may read the tokens while the scheduler adds to them."""
    for new in output.scheduled_new_reqs:
        if new.prefill_token_ids is not None:
            new.prefill_token_ids = list(new.prefill_token_ids)
    return output
