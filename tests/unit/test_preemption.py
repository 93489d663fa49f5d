"""Engines whose pools are too small for what they admit. Blocks of four tokens; every book checked at every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import CoreLimits, EngineCore
from engine.layout import KvLayout
from engine.messages import (
    Cancel,
    FromEngine,
    Generate,
    KvAccount,
    Lend,
    LendClosed,
    LendReady,
    LendRefused,
    LendStarting,
    Load,
    LoanFailed,
    OpenLoan,
    Rejected,
    ToEngine,
    Token,
)
from engine.preemption import admits, next_victim, oldest_of, restart_order
from engine.scheduler import StepBudget, max_wait_steps
from engine.sim.runner import SimRunner, chain, choice_token, likeliest, token_of
from engine.vocabulary import BeamParams, Chunk, FinishReason, SamplingParams
from engine.vocabulary import Sequence as Tokens
from kvtransfer.local import LocalNetwork, LocalTransport

WIDTH = 4
LAYOUT = KvLayout(layers=1, kv_heads=2, head_dim=1, block_tokens=WIDTH, dtype="float32")
VOCAB = 1000
WIDE = StepBudget(64, 64)
NOTHING_LEFT = (0, 0, 0, 0, 0)
M = TypeVar("M")


def undisturbed(prompt: Sequence[int], max_tokens: int, choice: int = 0) -> list[int]:
    """What the simulated model answers, with no engine about it."""
    state = int.from_bytes(LAYOUT.fingerprint(b"sim")[:8], "little")
    states: list[int] = []
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        for token in tokens[len(states) :]:
            state = chain(state, token)
            states.append(state)
        first = token_of(np.array([states] * LAYOUT.kv_heads, np.uint64)[:, :, None], VOCAB)
        tokens.append(choice_token(first, choice, VOCAB))
    return tokens[len(prompt) :]


def searched(prompt: Sequence[int], sampling: SamplingParams) -> list[tuple[list[int], float]]:
    """The beams that are to be found, with no engine about it, and the logarithms of their probabilities."""
    assert sampling.beam is not None
    width, ends = sampling.beam.width, sampling.stop_token_ids
    live: list[tuple[list[int], float]] = [([], 0.0)]
    found: list[tuple[float, list[int], float]] = []
    for length in range(1, sampling.max_tokens + 1):
        candidates = []
        for chosen, logprob in live:
            (token,) = undisturbed([*prompt, *chosen], 1)
            of = likeliest(token, (1 + len(ends)) * width, VOCAB)
            more = zip(of.top_token_ids, of.top_logprobs, strict=True)
            candidates += [([*chosen, other], logprob + value) for other, value in more]
        candidates = sorted(candidates, key=lambda c: -c[1])[: (1 + len(ends)) * width]
        over = length == sampling.max_tokens
        found += [(c[1] / length, *c) for c in candidates[:width] if over or c[0][-1] in ends]
        found = sorted(found, key=lambda f: -f[0])[:width]
        live = [c for c in candidates if c[0][-1] not in ends][:width]
        if over or (len(found) == width and live[0][1] / length <= found[-1][0]):
            break
    return [(chosen, logprob) for _, chosen, logprob in found]


@dataclass
class Wait:
    """That a request waits for its next token, as seen from one step on."""

    since: int
    """The last step before it."""
    num_periods: int
    """How often at most somebody becomes, or goes on as, the oldest before that token."""
    longest_period: int = 0
    """What such a period may last, in steps: the most that the scheduler's bound came to meanwhile."""


@dataclass
class Stream:
    """One admitted request as its client sees it."""

    request: Generate
    arrival: int
    choice: int = 0
    waits: list[Wait] = field(default_factory=list)
    """For its next token, as seen from where it began and from wherever an older request was over."""
    tokens: list[int] = field(default_factory=list)
    accounts: list[KvAccount] = field(default_factory=list)
    over: bool = False

    @property
    def num_left(self) -> int:
        return self.request.sampling.max_tokens - len(self.tokens)

    @property
    def parts(self) -> bool:
        """Its request is of several choices."""
        return self.request.sampling.n > 1


def name_of(request_id: str, choice: int) -> str:
    return f"{request_id}#{choice}" if choice else request_id


class Engine:
    """An engine core that nobody lends to, held to its bound at every step."""

    def __init__(self, num_blocks: int = 8, budget: StepBudget = WIDE, reserve: int = 1, bounded: bool = True) -> None:
        self.said: list[FromEngine] = []
        self.budget = budget
        runner = SimRunner(LAYOUT, num_blocks, VOCAB)
        self.runner = runner
        limits = CoreLimits(budget, 4, reserve, report_interval_s=0.0, min_report_interval_s=0.0)
        self.core = EngineCore(runner, LocalTransport(LocalNetwork(), "engine"), limits, self.said.append)
        self.core.start()
        self.streams: dict[str, Stream] = {}
        self.num_steps = 0
        self.rejected: list[Rejected] = []
        self.others: list[FromEngine] = []
        self.served: list[str] = []
        """Of every token, whose it was."""
        self._bounded = bounded
        self._max_wait = max_wait_steps(budget, num_blocks, WIDTH)

    def ask(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        priority: int = 0,
        borrow: bool = False,
        **sampling: Any,
    ) -> bool:
        """False when it was rejected."""
        params = SamplingParams(max_tokens, **sampling)
        request = Generate(request_id, tuple(prompt), (), params, "", priority, borrow)
        num_rejected = len(self.rejected)
        self.tell(request)
        if len(self.rejected) > num_rejected:
            return False
        for choice in range(params.n):
            name = name_of(request_id, choice)
            self.streams[name] = Stream(request, len(self.streams), choice)
            self._wait(self.streams[name])
        return True

    def tell(self, *messages: ToEngine) -> None:
        for message in messages:
            self.core.handle(message)
            if isinstance(message, Cancel) and message.request_id in self.streams:
                for stream in list(self.streams.values()):
                    if stream.request.request_id == message.request_id and message.choice in (None, stream.choice):
                        self._on_over(stream)
        self.check()

    def begin_step(self) -> list[Chunk]:
        batch = self.core.begin_step()
        self.check()
        assert sum(chunk.count for chunk in batch) <= self.budget.max_tokens
        prompts = [chunk for chunk in batch if not chunk.sequence.decoding]
        assert sum(chunk.count for chunk in prompts) <= self.budget.max_prefill_tokens
        runnable = self.core._runnable()
        period = sum(-(-sequence.num_remaining // self.budget.guaranteed_tokens) for sequence in runnable)
        assert period <= self._max_wait
        for stream in self.streams.values():
            for wait in stream.waits:
                wait.longest_period = max(wait.longest_period, period)
        return batch

    def end_step(self, batch: list[Chunk]) -> None:
        self.core.end_step(batch, self.runner.execute(batch))
        self.num_steps += 1
        self.check()
        if self._bounded:
            for name, stream in self.streams.items():
                for wait in stream.waits:
                    waited, bound = self.num_steps - wait.since, wait.longest_period * wait.num_periods
                    assert waited < max(bound, 1), f"{name} waits for {waited} steps, the bound is {bound}"

    def step(self) -> bool:
        batch = self.begin_step()
        if batch:
            self.end_step(batch)
        return bool(batch)

    def run(self, steps: int = 10_000) -> None:
        while steps and self.step():
            steps -= 1

    def check(self) -> None:
        """The books balance, and every token is the one that an undisturbed model gives, once."""
        assert self.core.audit().fault == ""
        for message in self.said:
            if isinstance(message, Rejected):
                self.rejected.append(message)
            elif isinstance(message, Token):
                self._on_token(message)
            else:
                self.others.append(message)
        self.said.clear()

    def books(self) -> tuple[int, int, int, int, int]:
        """Blocks held, reserved and quarantined; requests; loans given."""
        audited = self.core.audit()
        return (
            audited.held_blocks,
            audited.reserved_blocks,
            audited.quarantined_blocks,
            audited.sequences,
            audited.loans,
        )

    def hear(self, *kinds: type[M]) -> list[M]:
        heard: list[M] = [message for message in self.others if isinstance(message, kinds)]
        self.others.clear()
        return heard

    def preempted(self) -> list[str]:
        return sorted(sequence.request_id for sequence in self.core._requests.residency.preempted)

    def check_finished(self) -> None:
        """Everybody who was admitted has all its tokens, or went away by itself."""
        for stream in self.streams.values():
            assert stream.over
            if stream.request.sampling.beam is None:
                assert stream.tokens == self._expected(stream)[: len(stream.tokens)]
        assert self.books() == NOTHING_LEFT

    def _on_token(self, message: Token) -> None:
        stream = self.streams[name_of(message.request_id, message.choice)]
        assert not stream.over
        stream.tokens.append(message.token_id)
        self.served.append(message.request_id)
        if message.account is not None:
            stream.accounts.append(message.account)
        if stream.request.sampling.beam is not None:
            if message.finish is not None:
                expected = searched(stream.request.prompt, stream.request.sampling)[stream.choice]
                assert (stream.tokens, message.cumulative_logprob) == expected
                self._on_over(stream)
            return
        assert (message.finish is None) == (stream.num_left > 0)
        if message.finish is not None:
            assert message.finish is FinishReason.LENGTH
            assert stream.tokens == self._expected(stream), "a wrong token"
            self._on_over(stream)
        else:
            stream.waits.clear()
            self._wait(stream)

    def _expected(self, stream: Stream) -> list[int]:
        return undisturbed(stream.request.prompt, stream.request.sampling.max_tokens, stream.choice)

    def _on_over(self, stream: Stream) -> None:
        stream.over = True
        stream.waits.clear()
        for other in self.streams.values():
            if not other.over and other.arrival > stream.arrival:
                self._wait(other)

    def _wait(self, stream: Stream) -> None:
        """It waits for its next token; the bound on that is the one that `engine/preemption.py` states, with what the
        scheduler's bound comes to in place of the most that it can."""
        older = [s for s in self.streams.values() if not s.over and s.arrival < stream.arrival]
        since = self.num_steps + self.core._books.in_step  # a step under way does not count
        forks = len({s.request.request_id for s in [*older, stream] if s.parts})
        stream.waits.append(Wait(since, 1 + sum(1 + s.num_left for s in older) + forks))


def tokens(base: int, count: int) -> tuple[int, ...]:
    return tuple(range(base, base + count))


# ------------------------------------------------------------------------------------------------ rules


def waiting(name: str, arrival: int, priority: int = 0) -> Tokens:
    return Tokens(name, [1], 1, b"", SamplingParams(1), priority, arrival)


def test_victims_are_of_the_lowest_priority_and_then_the_youngest_but_never_the_oldest() -> None:
    a, b, c, d = waiting("a", 1, -1), waiting("b", 2), waiting("c", 3), waiting("d", 4, 1)
    oldest = oldest_of([c, a, d, b])
    assert oldest is a
    running, victims = [d, b, a, c], []
    while (victim := next_victim(running, oldest)) is not None:
        running.remove(victim)
        victims.append(victim)
    assert victims == [c, b, d]
    assert oldest_of([]) is None


def test_restarts_go_by_priority_and_arrival_behind_the_oldest() -> None:
    a, b, c, d = waiting("a", 1, -1), waiting("b", 2), waiting("c", 3), waiting("d", 4, 1)
    assert restart_order([d, c, b, a], a) == [a, d, b, c]
    assert restart_order([d, c, b], a) == [d, b, c]


def test_only_what_is_more_urgent_than_all_that_wait_is_admitted_before_them() -> None:
    a, b = waiting("a", 1, 0), waiting("b", 2, 1)
    assert admits(0, [], a)
    assert [admits(priority, [b], a) for priority in (0, 1, 2)] == [False, False, True]
    assert not admits(9, [b, a], a), "the oldest waits for nobody new"


# ---------------------------------------------------------------------------------------------- examples


def test_a_request_is_promised_its_prompt_and_some_output_and_takes_the_rest_as_it_goes() -> None:
    engine = Engine(reserve=3)
    engine.ask("a", tokens(10, 10), 20)
    assert engine.books() == (0, 4, 0, 1, 0)
    engine.run(7)
    assert engine.books() == (4, 0, 0, 1, 0)
    engine.step()
    assert engine.books() == (5, 0, 0, 1, 0)
    engine.run()
    engine.check_finished()
    (account,) = engine.streams["a"].accounts
    assert (account.preemptions, account.recomputed_tokens) == (0, 0)


def test_what_could_never_fit_is_rejected_though_its_promise_would() -> None:
    engine = Engine()
    assert not engine.ask("a", tokens(0, 10), 23)
    assert engine.rejected == [Rejected("a", "prompt + max_tokens need 9 KV blocks, the pool has 8", permanent=True)]
    assert engine.ask("a", tokens(0, 10), 22)
    assert not engine.ask("b", tokens(50, 20), 2)
    assert engine.rejected[1:] == [Rejected("b", "6 KV blocks needed, 5 available now", permanent=False)]


def test_the_younger_gives_its_blocks_back_and_goes_on_where_it_was() -> None:
    engine = Engine(num_blocks=6)
    engine.ask("a", tokens(10, 7), 12)
    engine.ask("b", tokens(50, 7), 16)
    engine.run(6)
    assert engine.books() == (6, 0, 0, 2, 0)
    engine.run(4)
    assert engine.preempted() == ["b"]
    engine.run()
    engine.check_finished()
    assert len(engine.streams["a"].accounts) == 1
    first, again = engine.streams["b"].accounts
    assert again is first
    assert again.preemptions == 1
    assert again.recomputed_tokens == 12 - 4, "the head of its chain was still cached when it came back"
    assert again.computed_tokens == 7, "the prompt; what was computed again is counted by itself"
    times = again.times
    assert times["admitted"] <= times["compute_started"] <= times["first_token"]


def test_load_tells_of_preemptions_and_that_nothing_is_available() -> None:
    engine = Engine(num_blocks=6)
    engine.ask("a", tokens(10, 7), 16)
    engine.ask("b", tokens(50, 7), 16)
    engine.run(10)
    engine.core.report()
    engine.check()
    load = engine.hear(Load)[-1]
    assert (load.running, load.preempted, load.preemptions, load.available_blocks) == (2, 1, 1, 0)
    assert load.queued_prefill_tokens == len(engine.streams["b"].tokens) + 7
    engine.run()
    engine.core.report()
    engine.check()
    load = engine.hear(Load)[-1]
    assert (load.running, load.preempted, load.preemptions, load.available_blocks) == (0, 0, 1, 6)


def test_while_one_waits_only_what_is_more_urgent_is_admitted() -> None:
    engine = Engine(num_blocks=7)
    engine.ask("a", tokens(10, 7), 20)
    engine.ask("b", tokens(50, 15), 12)
    engine.run(8)
    assert engine.preempted() == ["b"]
    assert not engine.ask("c", tokens(90, 3), 1)
    assert not engine.ask("d", tokens(90, 3), 1, priority=-1)
    assert [(r.request_id, r.permanent) for r in engine.rejected] == [("c", False), ("d", False)]
    assert engine.rejected[0].reason == "1 KV blocks needed, 3 available now, 1 preempted requests wait for some"
    assert engine.ask("e", tokens(90, 3), 1, priority=1)
    engine.run()
    engine.check_finished()


def test_when_it_is_the_oldest_it_comes_back_at_the_cost_of_others() -> None:
    engine = Engine(num_blocks=7)
    engine.ask("old", tokens(10, 7), 9)
    engine.ask("low", tokens(50, 11), 16, priority=-1)
    engine.run(7)
    assert engine.preempted() == ["low"]
    assert engine.ask("high", tokens(90, 11), 16, priority=1)
    engine.run(2)
    assert engine.streams["old"].over
    engine.run(1)
    assert engine.preempted() == ["high"]
    assert not engine.ask("same", tokens(130, 3), 1, priority=1)
    engine.run()
    engine.check_finished()


def test_cancelling_one_that_waits_leaves_nothing() -> None:
    engine = Engine(num_blocks=6)
    engine.ask("a", tokens(10, 7), 16)
    engine.ask("b", tokens(50, 7), 16)
    engine.run(10)
    assert engine.preempted() == ["b"]
    engine.tell(Cancel("b"))
    assert engine.preempted() == []
    assert engine.ask("c", tokens(90, 3), 1)
    engine.run()
    engine.check_finished()


@pytest.mark.parametrize("budget", [StepBudget(2, 2), StepBudget(8, 2), StepBudget(8, 8)])
@pytest.mark.parametrize("num_blocks", [6, 12, 30])
def test_a_low_priority_is_served_under_a_constant_flow_of_higher_ones(num_blocks: int, budget: StepBudget) -> None:
    engine = Engine(num_blocks, budget)
    assert engine.ask("low", tokens(0, 13), 8, priority=-1)
    for number in range(400):
        engine.ask(str(number), tokens(100 + 8 * number, 7), 5, priority=1)
        engine.step()
    assert engine.streams["low"].over
    assert len(engine.streams) > 40
    engine.run()
    engine.check_finished()


def test_running_sequences_beyond_the_budget_take_turns_whatever_their_priorities() -> None:
    engine = Engine(num_blocks=20, budget=StepBudget(2, 2))
    for priority in (1, 2, 0):
        engine.ask(f"p{priority}", (priority,), 30, priority)
    engine.run(6)
    counts = []
    for _ in range(3):
        before = {name: len(stream.tokens) for name, stream in engine.streams.items()}
        engine.run(6)
        counts.append({name: len(stream.tokens) - before[name] for name, stream in engine.streams.items()})
    assert counts == [{"p0": 3, "p1": 3, "p2": 6}] * 3
    engine.run()
    engine.check_finished()


def test_who_comes_later_waits_behind_who_waits_already() -> None:
    engine = Engine(num_blocks=20, budget=StepBudget(1, 1))
    engine.ask("low", (1,), 10, priority=-1)
    engine.step()
    for number in range(9):
        engine.ask(str(number), (2,), 1, priority=1)
        engine.step()
    assert engine.served == ["low", "low", "0", "low", "1", "2", "low", "3", "4", "5"]
    engine.run()
    engine.check_finished()


def test_the_step_that_gives_blocks_back_restarts_who_waits_for_them() -> None:
    """Else the loop would sleep."""
    engine = Engine(num_blocks=6)
    engine.ask("a", tokens(10, 7), 16)
    engine.ask("b", tokens(50, 7), 16)
    engine.run(15)
    assert engine.preempted() == ["b"]
    engine.step()
    assert engine.streams["a"].over
    assert engine.core.busy
    engine.run()
    engine.check_finished()


# ------------------------------------------------------------------------------------------------- loans


def lend(loan_id: str, chain_tokens: Sequence[int], priority: int = 0) -> Lend:
    return Lend(loan_id, tuple(chain_tokens), 0, "", True, priority)


def test_lent_blocks_are_never_taken_and_the_oldest_waits_for_them() -> None:
    engine = Engine(num_blocks=6, bounded=False)
    engine.tell(lend("l", tokens(100, 12)))
    engine.ask("a", tokens(10, 7), 16)
    engine.run()
    assert engine.books() == (6, 0, 0, 1, 1)
    assert len(engine.streams["a"].tokens) == 6, "twelve computed, and one that has no slot"
    assert not engine.core.busy, "nothing to do until somebody gives back"
    assert not engine.ask("b", tokens(50, 1), 1, priority=9)
    engine.tell(lend("m", tokens(200, 4), priority=9))
    assert [refused.loan_id for refused in engine.hear(LendRefused)] == ["m"]
    engine.tell(LendClosed("l"))
    engine.run()
    engine.check_finished()
    assert engine.streams["a"].accounts[0].preemptions == 0


def test_a_loan_that_would_have_to_wait_behind_a_preempted_request_is_refused() -> None:
    engine = Engine(num_blocks=6)
    engine.ask("a", tokens(10, 7), 16)
    engine.ask("b", tokens(50, 7), 16)
    engine.run(6)
    engine.tell(lend("waits", tokens(100, 8)))
    assert engine.hear(LendRefused, LendStarting) == []
    engine.run(4)
    assert engine.preempted() == ["b"]
    assert [refused.loan_id for refused in engine.hear(LendRefused, LendStarting)] == ["waits"]
    engine.tell(lend("now", tokens(100, 4)))
    assert [refused.loan_id for refused in engine.hear(LendRefused)] == ["now"]
    engine.run()
    engine.check_finished()


def test_who_is_borrowing_is_never_a_victim() -> None:
    engine = Engine(num_blocks=6, bounded=False)
    engine.ask("a", tokens(10, 7), 16)
    engine.ask("b", tokens(50, 9), 4, priority=-1, borrow=True)
    assert engine.hear(OpenLoan) == [OpenLoan("b", 0, 2, may_compute=True)]
    engine.run()
    assert engine.preempted() == []
    assert engine.books() == (3, 3, 0, 2, 0)
    engine.tell(LoanFailed("b", "refused"))
    assert engine.step()
    assert engine.preempted() == ["b"], "now it runs, and a is the oldest"
    engine.run()
    engine.check_finished()


def test_a_cancel_of_the_one_that_waits_for_lent_blocks_lets_others_in() -> None:
    engine = Engine(num_blocks=6, bounded=False)
    engine.tell(lend("l", tokens(100, 12)))
    engine.ask("a", tokens(10, 7), 16)
    engine.run()
    assert not engine.ask("b", tokens(50, 1), 1)
    engine.tell(Cancel("a"))
    assert engine.ask("c", tokens(50, 1), 1)
    engine.run()
    engine.tell(LendClosed("l"))
    engine.check_finished()


def test_nobody_is_preempted_in_vain_for_the_oldest() -> None:
    """It needs five of seven blocks, and three are of one that is borrowing."""
    engine = Engine(num_blocks=7, bounded=False)
    engine.ask("old", tokens(10, 7), 9)
    engine.ask("low", tokens(50, 11), 16, priority=-1)
    engine.run(7)
    assert engine.preempted() == ["low"]
    assert engine.ask("high", tokens(90, 11), 16, priority=1, borrow=True)
    engine.run()
    assert engine.streams["old"].over
    assert engine.preempted() == ["low"]
    assert not engine.core.busy
    engine.tell(LoanFailed("high", "refused"))
    engine.step()
    assert engine.preempted() == ["high"]
    engine.run()
    engine.check_finished()


def test_what_a_preempted_request_computed_is_lent_from_the_cache() -> None:
    engine = Engine(num_blocks=8)
    engine.ask("a", tokens(10, 7), 24)
    engine.ask("b", tokens(50, 12), 8)
    engine.run(11)
    assert engine.preempted() == ["b"]
    engine.run()
    engine.check_finished()
    engine.tell(lend("l", tokens(50, 12)))
    engine.run()
    assert sum(len(ready.block_ids) for ready in engine.hear(LendReady)) == 3
    engine.tell(LendClosed("l"))


# ------------------------------------------------------------------------------------------- any schedule


@dataclass(frozen=True)
class New:
    trunk: int
    length: int
    max_tokens: int
    priority: int
    n: int = 1
    beams: int = 0


@dataclass(frozen=True)
class Abort:
    number: int
    in_step: bool
    choice: bool = False
    """Only one of its choices, if that has begun."""


news = st.builds(New, st.integers(0, 3), st.integers(1, 12), st.integers(1, 12), st.integers(-1, 1))
aborts = st.builds(Abort, st.integers(0, 40), st.booleans(), st.booleans())
parting = st.builds(
    New, st.integers(0, 3), st.integers(1, 12), st.integers(1, 6), st.integers(-1, 1), st.integers(2, 4), st.just(0)
)
beams = st.builds(
    New,
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(-1, 1),
    st.integers(1, 2),
    st.integers(2, 4),
)
mixed_events = st.lists(st.one_of(st.none(), news, parting, parting, beams, aborts), min_size=30, max_size=60)
events = st.lists(st.one_of(st.none(), news, news, news, news, aborts), min_size=30, max_size=90)
budgets = st.one_of(
    st.builds(StepBudget, st.integers(1, 12), st.integers(1, 12)), st.sampled_from([StepBudget(1, 1), WIDE])
)


@given(st.integers(3, 10), budgets, st.sampled_from([1, 1, 4, 100]), events)
def test_any_schedule(num_blocks: int, budget: StepBudget, reserve: int, moves: list[New | Abort | None]) -> None:
    """No leak, no starvation, the budget kept, the books in order and every token right, at every step."""
    run_schedule(Engine(num_blocks, budget, reserve), moves)


@given(st.integers(4, 14), budgets, st.sampled_from([1, 1, 4, 100]), mixed_events, st.booleans())
def test_any_schedule_of_forks(
    num_blocks: int, budget: StepBudget, reserve: int, moves: list[New | Abort | None], has_beams: bool
) -> None:
    """Choices and beams that share blocks: a block written by two, or copied wrongly, gives a wrong token."""
    if not has_beams:  # whose steps give no tokens, so that bounds on the waiting for one say nothing
        moves = [None if isinstance(move, New) and move.beams else move for move in moves]
    run_schedule(Engine(num_blocks, budget, reserve, bounded=not has_beams), moves)


def run_schedule(engine: Engine, moves: list[New | Abort | None]) -> None:
    for number, move in enumerate(moves):
        match move:
            case New(trunk, length, max_tokens, priority, n, width):
                # Trunks share their first block, so that prefix hits and blocks of several holders occur.
                prompt = (*tokens(0, 4), *tokens(100 * (1 + trunk), 8))[:length]
                options: dict[str, Any] = {"n": n}
                if width:
                    options |= {"beam": BeamParams(width), "stop_token_ids": frozenset({7, 300, 600})}
                engine.ask(f"r{number}", prompt, max_tokens, priority, **options)
            case Abort(place, in_step, only_one):
                streams = list(engine.streams.values())
                batch = engine.begin_step() if in_step else []
                if streams:
                    stream = streams[place % len(streams)]
                    begun = stream.tokens and stream.request.sampling.beam is None
                    choice = stream.choice if only_one and begun else None
                    engine.tell(Cancel(stream.request.request_id, choice))
                if batch:
                    engine.end_step(batch)
        engine.step()
    engine.run()
    engine.check_finished()
    assert not any(rejected.permanent and "the pool has" not in rejected.reason for rejected in engine.rejected)


def test_choices_share_the_prompt_and_nothing_else() -> None:
    engine = Engine(num_blocks=12, reserve=3)
    assert engine.ask("a", tokens(10, 11), 3, n=3)
    assert engine.books() == (0, 2 + 3 * 2, 0, 1, 0), "two full blocks of the prompt, once"
    engine.step()
    assert engine.books() == (5, 3, 0, 1, 0), "ten tokens are shared: two blocks, and three copies of the third"
    engine.run()
    engine.check_finished()
    assert [len(stream.tokens) for stream in engine.streams.values()] == [3, 3, 3]


def test_choices_that_could_not_all_end_here_are_rejected_for_good() -> None:
    engine = Engine(num_blocks=8)
    assert not engine.ask("a", tokens(10, 9), 8, n=3)
    reason = "prompt + 3 x max_tokens need 11 KV blocks, the pool has 8"
    assert engine.rejected == [Rejected("a", reason, permanent=True)]


def test_beams_are_found_whatever_the_pool() -> None:
    preemptions = []
    for length, fewest in ((1, 6), (4, 9), (5, 7), (8, 10)):
        for num_blocks in (fewest, 40):
            engine = Engine(num_blocks, StepBudget(7, 5), reserve=1, bounded=False)
            assert engine.ask("other", tokens(50, 7), 4 * fewest - 8, priority=1)
            assert engine.ask("a", tokens(10, length), 7, n=2, beam=BeamParams(3))
            engine.run()
            engine.check_finished()
            assert len(engine.streams["a#1"].tokens) == 7
            preemptions.append(engine.core._requests.residency.num_preemptions)
    assert sum(preemptions[0::2]) > 0
    assert sum(preemptions[1::2]) == 0


@pytest.mark.parametrize("num_blocks", [10, 11, 12])
@pytest.mark.parametrize("budget", [StepBudget(11, 2), StepBudget(11, 3)])
def test_beams_of_one_search_do_not_take_each_others_blocks_for_ever(num_blocks: int, budget: StepBudget) -> None:
    """The beams of "a" are the first victims: a beam that is done with its step waits for its sibling, and has nothing
    to gain from blocks."""
    for length, other in ((7, 5), (7, 9), (9, 7), (11, 7), (13, 5), (13, 9)):
        engine = Engine(num_blocks, budget, reserve=1, bounded=False)
        assert engine.ask("a", tokens(10, length), 8, n=2, beam=BeamParams(2))
        engine.ask("b", tokens(50, other), 8, priority=1, n=3, beam=BeamParams(3))
        for _ in range(600):
            if not engine.step():
                break
        engine.check_finished()


@pytest.mark.parametrize("reserve", [1, 5])
@pytest.mark.parametrize("budget", [WIDE, StepBudget(3, 2), StepBudget(1, 1)])
def test_a_crowd_in_a_tiny_pool_is_served_and_was_preempted(reserve: int, budget: StepBudget) -> None:
    """What the trials above are for does happen."""
    engine = Engine(num_blocks=9, budget=budget, reserve=reserve)
    number = 0
    while number < 40:
        number += engine.ask(f"r{number}", tokens(20 * number, 1 + number % 9), 3 + number * 7 % 20, number % 3)
        engine.step()
    engine.run()
    engine.check_finished()
    preemptions = [stream.accounts[-1].preemptions for stream in engine.streams.values()]
    assert sum(preemptions) == engine.core._requests.residency.num_preemptions > 10
    assert all(stream.accounts[0] is stream.accounts[-1] for stream in engine.streams.values())
