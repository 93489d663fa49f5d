"""Batches launched on a GPU, with fakes of vLLM's executor and of CUDA's events: when each of them ends."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm.batch_runner import LaunchedBatches


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Executor:
    """Executor whose batches end when a test says so."""

    def __init__(self) -> None:
        self.copied: list[Event] = []
        self.num_dummies = 0
        self.launched: Any = None
        """What a launch gives; None: nothing was sampled."""

    def execute_dummy_batch(self) -> None:
        self.num_dummies += 1

    def execute_model(self, output: Any, non_block: bool) -> Any:
        return self.launched or SimpleNamespace(result=lambda: f"nothing sampled in {output.name}")

    def sample_tokens(self, grammar: Any, non_block: bool) -> Any:
        event = Event()
        self.copied.append(event)
        return SimpleNamespace(async_output=SimpleNamespace(copy_event=event), result=lambda: f"tokens, {grammar}")


class Waits:
    """The thread that waits."""

    def __init__(self) -> None:
        self.calls: deque[Any] = deque()
        self.over: deque[Any] = deque()

    def submit(self, tag: Any, compute: Any) -> None:
        self.calls.append(compute)

    def take(self) -> Any:
        return self.over.popleft() if self.over else None

    def run(self) -> None:
        """Wait for the next event."""
        self.over.append((None, self.calls.popleft()()))


def batch(name: str, tokens: int = 1) -> Any:
    return SimpleNamespace(name=name, total_num_scheduled_tokens=tokens)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_batch_ends_with_its_samples_or_where_drafts_write_kv_after_all_it_launched(drafts: bool) -> None:
    marks: list[Event] = []

    def mark() -> Event:
        marks.append(Event())
        return marks[-1]

    executor, waits = Executor(), Waits()
    batches = LaunchedBatches(executor, waits, mark if drafts else None)
    first, second = batch("first"), batch("second")
    batches.start(first, "grammar 1")
    batches.start(second, "grammar 2")
    assert (batches.has_ended, batches.take()) == (False, None)
    executor.copied[0].done = True
    if drafts:
        assert (batches.has_ended, batches.take()) == (False, None), "its drafts still write"
        marks[0].done = True
    assert batches.take() == (first, "tokens, grammar 1")
    assert (batches.has_ended, batches.take()) == (False, None)
    while waits.calls:
        waits.run()
    assert batches.take() == (second, "tokens, grammar 2")


def test_a_batch_without_tokens_ends_at_once() -> None:
    batches = LaunchedBatches(Executor(), Waits(), Event)
    empty = batch("empty", tokens=0)
    batches.start(empty, None)
    assert batches.take() == (empty, "nothing sampled in empty")


def test_a_dummy_batch_ends_in_its_turn() -> None:
    executor, waits = Executor(), Waits()
    batches = LaunchedBatches(executor, waits)
    real = batch("real")
    batches.start(real, "grammar")
    batches.start_dummy()
    assert executor.num_dummies == 1
    assert (batches.has_ended, batches.take()) == (False, None)
    executor.copied[0].done = True
    assert batches.take() == (real, "tokens, grammar")
    assert batches.take() == (None, None)
    assert batches.take() is None


def test_a_pooling_runner_has_its_result_with_the_launch() -> None:
    executor, waits = Executor(), Waits()
    pooled = Event()
    executor.launched = SimpleNamespace(async_output=SimpleNamespace(copy_event=pooled), result=lambda: "vectors")
    batches = LaunchedBatches(executor, waits, samples=False)
    only = batch("only")
    batches.start(only, None)
    assert not executor.copied, "nothing is sampled"
    assert (batches.has_ended, batches.take()) == (False, None)
    pooled.done = True
    assert batches.take() == (only, "vectors")
