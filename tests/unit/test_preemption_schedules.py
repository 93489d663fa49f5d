"""Any schedule of requests, forks and cancels on a pool that is too small; books and bounds checked at every step."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core_types import StepBudget
from engine.messages.from_engine import Rejected
from engine.messages.to_engine import Cancel
from support.core_engine import WIDE
from support.crowded_engine import Engine, tokens


@dataclass(frozen=True)
class New:
    trunk: int
    length: int
    max_tokens: int
    priority: int
    n: int = 1


@dataclass(frozen=True)
class Abort:
    number: int
    in_step: bool
    choice: bool = False
    """Only one of its choices, if that has begun."""


news = st.builds(New, st.integers(0, 3), st.integers(1, 12), st.integers(1, 12), st.integers(-1, 1))
aborts = st.builds(Abort, st.integers(0, 40), st.booleans(), st.booleans())
parting = st.builds(
    New, st.integers(0, 3), st.integers(1, 12), st.integers(1, 6), st.integers(-1, 1), st.integers(2, 4)
)
mixed_events = st.lists(st.one_of(st.none(), news, parting, parting, aborts), min_size=30, max_size=60)
events = st.lists(st.one_of(st.none(), news, news, news, news, aborts), min_size=30, max_size=90)
budgets = st.one_of(
    st.builds(StepBudget, st.integers(1, 12), st.integers(1, 12)), st.sampled_from([StepBudget(1, 1), WIDE])
)


@given(st.integers(3, 10), budgets, st.sampled_from([1, 1, 4, 100]), events)
def test_any_schedule(num_blocks: int, budget: StepBudget, reserve: int, moves: list[New | Abort | None]) -> None:
    """No leak, no starvation, the budget kept, the books in order and every token right, at every step."""
    run_schedule(Engine(num_blocks, budget, reserve), moves)


@given(st.integers(4, 14), budgets, st.sampled_from([1, 1, 4, 100]), mixed_events)
def test_any_schedule_of_forks(
    num_blocks: int, budget: StepBudget, reserve: int, moves: list[New | Abort | None]
) -> None:
    """Choices that share blocks: a block written by two, or copied wrongly, gives a wrong token."""
    run_schedule(Engine(num_blocks, budget, reserve), moves)


def run_schedule(engine: Engine, moves: list[New | Abort | None]) -> None:
    for number, move in enumerate(moves):
        match move:
            case New(trunk, length, max_tokens, priority, n):
                # Trunks share their first block, so that prefix hits and blocks of several holders occur.
                prompt = (*tokens(0, 4), *tokens(100 * (1 + trunk), 8))[:length]
                engine.ask(f"r{number}", prompt, max_tokens, priority, n=n)
            case Abort(place, in_step, only_one):
                streams = list(engine.streams.values())
                batch = engine.begin_step() if in_step else []
                if streams:
                    stream = streams[place % len(streams)]
                    choice = stream.choice if only_one and stream.tokens else None
                    engine.send(Cancel(stream.request.request_id, choice))
                if batch:
                    engine.end_step(batch)
        engine.step()
    engine.finish()
    assert not any(rejected.permanent and "the pool has" not in rejected.reason for rejected in engine.rejected)


def test_choices_share_the_prompt_and_nothing_else() -> None:
    engine = Engine(num_blocks=12, reserve=3)
    assert engine.ask("a", tokens(10, 11), 3, n=3)
    assert engine.block_counts() == (0, 2 + 3 * 2, 0, 1, 0), "two full blocks of the prompt, once"
    engine.step()
    assert engine.block_counts() == (5, 3, 0, 1, 0), "ten tokens are shared: two blocks, and three copies of the third"
    engine.finish()
    assert [len(stream.tokens) for stream in engine.streams.values()] == [3, 3, 3]


def test_choices_that_could_not_all_end_here_are_rejected_for_good() -> None:
    engine = Engine(num_blocks=8)
    assert not engine.ask("a", tokens(10, 9), 8, n=3)
    reason = "prompt + 3 x max_tokens need 11 KV blocks, the pool has 8"
    assert engine.rejected == [Rejected("a", reason, permanent=True)]


@pytest.mark.parametrize("reserve", [1, 5])
@pytest.mark.parametrize("budget", [WIDE, StepBudget(3, 2), StepBudget(1, 1)])
def test_a_crowd_in_a_tiny_pool_is_served_and_was_preempted(reserve: int, budget: StepBudget) -> None:
    """What the trials above are for does happen."""
    engine = Engine(num_blocks=9, budget=budget, reserve=reserve)
    number = 0
    while number < 40:
        number += engine.ask(f"r{number}", tokens(20 * number, 1 + number % 9), 3 + number * 7 % 20, number % 3)
        engine.step()
    engine.finish()
    preemptions = [stream.accounts[-1].preemptions for stream in engine.streams.values()]
    assert sum(preemptions) == engine.core.requests.running_set.num_preemptions > 10
    assert all(stream.accounts[0] is stream.accounts[-1] for stream in engine.streams.values())
