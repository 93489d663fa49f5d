"""Batches in flight between vLLM's scheduler and its executor: their number, their order, and deferred sampling."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.process.vllm.process import VllmSteps


@dataclass(eq=False)
class Batch:
    """A SchedulerOutput, as far as steps look at it."""

    number: int
    total_num_scheduled_tokens: int
    pending_structured_output_tokens: bool


class Bench:
    """Core, runner and threads of fakes; a test says when a call on the thread ends."""

    def __init__(self, depth: int) -> None:
        self.wanted: deque[tuple[int, bool]] = deque()
        """Batches that the core will schedule: tokens, and whether its grammars need the tokens before."""
        self.scheduled: list[Batch] = []
        self.ended: list[Batch] = []
        self.deferred: list[Batch] = []
        """Batches whose grammars were asked for after their launch."""
        self.sampled_after: dict[int, int] = {}
        """Number of batches that had ended when a batch was sampled, by batch."""
        self.sampled: deque[tuple[Batch, str]] = deque()
        """Batches in flight that are sampled; the first `num_done` of them have ended."""
        self.num_done = 0
        self.hashed: deque[tuple[str, str]] = deque()
        self.named: list[str] = []
        self.steps = VllmSteps(self, self, (None, Hashes(self)), depth)  # type: ignore[arg-type]

    # the core

    @property
    def may_schedule(self) -> bool:
        return bool(self.wanted)

    def schedule(self) -> Batch | None:
        if not self.wanted:
            return None
        tokens, needs = self.wanted.popleft()
        batch = Batch(len(self.scheduled), tokens, needs and len(self.scheduled) > len(self.ended))
        self.scheduled.append(batch)
        return batch

    def grammar_of(self, batch: Batch) -> str:
        self.sampled_after[batch.number] = len(self.ended)
        return f"grammar {batch.number}"

    def deferred_grammar_of(self, batch: Batch) -> str:
        self.deferred.append(batch)
        return self.grammar_of(batch)

    def end_step(self, batch: Batch, result: object) -> None:
        assert result == f"grammar {batch.number}"
        self.ended.append(batch)

    def name(self, filled: str, fingerprints: str) -> None:
        self.named.append(filled)

    # the batches

    @property
    def has_ended(self) -> bool:
        return self.num_done > 0

    def start(self, batch: Batch, grammar: str) -> None:
        self.sampled.append((batch, grammar))

    def launch(self, batch: Batch) -> None:
        pass

    def sample(self, batch: Batch, grammar: str) -> None:
        self.sampled.append((batch, grammar))

    def take(self) -> tuple[Batch, str] | None:
        if not self.num_done:
            return None
        self.num_done -= 1
        return self.sampled.popleft()

    @property
    def num_flying(self) -> int:
        return len(self.scheduled) - len(self.ended)


class Hashes:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def take(self) -> tuple[Any, Any] | None:
        return self._bench.hashed.popleft() if self._bench.hashed else None


TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("done"), st.integers(1, 3)),
        st.tuples(st.just("hashed")),
    ),
    max_size=60,
)


@given(depth=st.integers(1, 3), turns=TURNS)
def test_batches_end_in_order_and_no_more_are_in_flight_than_allowed(depth: int, turns: list[tuple[Any, ...]]) -> None:
    bench, num_hashed = Bench(depth), 0

    def turn() -> None:
        bench.steps.end()
        bench.steps.begin()
        assert bench.num_flying <= depth + 1, "one more is launched and waits to be sampled"
        assert bench.ended == bench.scheduled[: len(bench.ended)]
        if bench.wanted and not bench.num_done:
            assert not bench.steps.ready, "a step that may begin has begun"

    for kind, *values in turns:
        match kind:
            case "want":
                bench.wanted.append((values[0], values[1]))
            case "done":
                bench.num_done = min(len(bench.sampled), bench.num_done + values[0])
            case "hashed":
                num_hashed += 1
                bench.hashed.append((f"blocks {num_hashed}", "fingerprints"))
        turn()
    while bench.num_flying or bench.wanted:
        bench.num_done = len(bench.sampled)
        turn()
    bench.steps.end()
    assert bench.ended == bench.scheduled
    assert bench.named == [f"blocks {number + 1}" for number in range(num_hashed)]
    for batch in bench.scheduled:
        if batch.pending_structured_output_tokens and batch.total_num_scheduled_tokens:
            assert bench.sampled_after[batch.number] == batch.number, "its grammars knew every token before it"
            assert batch in bench.deferred


def test_the_next_batch_is_scheduled_while_one_computes() -> None:
    bench = Bench(2)
    bench.wanted.extend([(1, False)] * 3)
    bench.steps.begin()
    assert (len(bench.scheduled), len(bench.sampled)) == (2, 2)
    bench.num_done = 1
    assert bench.steps.end()
    bench.steps.begin()
    assert [batch.number for batch in bench.ended] == [0]
    assert len(bench.scheduled) == 3
    assert not bench.steps.end()
