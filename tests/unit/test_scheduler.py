from itertools import count as counting

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.engine_core import max_wait_steps, schedule
from engine.core_types import Chunk, EngineSequence, SamplingParams, StepBudget

SAMPLING = SamplingParams(max_tokens=4)


def sequence(
    name: str,
    arrival: int,
    prompt: int,
    computed: int = 0,
    emitted: int = 0,
    priority: int = 0,
    job: bool = False,
    turn: int = 0,
) -> EngineSequence:
    """A prompt of `prompt` tokens with `emitted` sampled ones after it; a `job` is of a loan and samples nothing."""
    return EngineSequence(
        request_id=name,
        token_ids=[0] * (prompt + emitted),
        num_prompt=prompt,
        root=b"",
        sampling=None if job else SAMPLING,
        priority=priority,
        arrival=arrival,
        num_computed=computed,
        turn=turn,
    )


def decoding(name: str, arrival: int, priority: int = 0, turn: int = 0) -> EngineSequence:
    return sequence(name, arrival, prompt=4, computed=4, emitted=1, priority=priority, turn=turn)


def plan(batch: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.count) for chunk in batch]


def test_decodes_go_before_prompts_whatever_their_order() -> None:
    state = [sequence("prompt", 1, prompt=10, priority=9), decoding("old", 0), decoding("new", 2)]
    batch = schedule(state, StepBudget(max_tokens=8, max_prefill_tokens=8))
    assert plan(batch) == [("old", 4, 1), ("new", 4, 1), ("prompt", 0, 6)]
    assert [chunk.samples for chunk in batch] == [True, True, False]


def test_a_loans_job_never_samples() -> None:
    batch = schedule([sequence("job", 1, prompt=8, job=True)], StepBudget(16, 16))
    assert plan(batch) == [("job", 0, 8)]
    assert not batch[0].samples


def test_a_preempted_sequence_is_a_prompt_up_to_its_last_token() -> None:
    preempted = sequence("p", 1, prompt=4, emitted=3)
    assert not preempted.decoding
    (chunk,) = schedule([preempted], StepBudget(5, 5))
    assert (chunk.start, chunk.count, chunk.samples) == (0, 5, False)
    preempted.num_computed = 5
    assert not preempted.decoding
    (chunk,) = schedule([preempted], StepBudget(5, 5))
    assert (chunk.start, chunk.count, chunk.samples) == (5, 2, True)
    preempted.num_computed = 6
    assert preempted.decoding, "what is left is what every decoding sequence has left"


def test_who_has_waited_longest_has_a_share_of_every_step() -> None:
    low = sequence("low", 1, prompt=9, turn=1)
    high = sequence("high", 2, prompt=30, priority=1, turn=2)
    budget = StepBudget(max_tokens=16, max_prefill_tokens=12)
    assert budget.guaranteed_tokens == 3
    assert plan(schedule([low, high], budget)) == [("high", 0, 9), ("low", 0, 3)]
    assert plan(schedule([low, decoding("d", 3, turn=9)], budget)) == [("d", 4, 1), ("low", 0, 9)], (
        "and all that is left"
    )


@st.composite
def states(draw: st.DrawFn) -> list[EngineSequence]:
    built: list[EngineSequence] = []
    for arrival in draw(st.permutations(range(draw(st.integers(0, 12))))):
        priority = draw(st.integers(-1, 1))
        prompt = draw(st.integers(1, 30))
        kind = draw(st.sampled_from(["decode", "prompt", "preempted", "job"]))
        if kind == "decode":
            extra = draw(st.integers(1, 5))
            built.append(sequence(str(arrival), arrival, prompt, prompt + extra - 1, extra, priority))
        elif kind == "preempted":
            extra = draw(st.integers(1, 5))
            computed = draw(st.integers(0, prompt + extra - 2))
            built.append(sequence(str(arrival), arrival, prompt, computed, extra, priority))
        else:
            computed = draw(st.integers(0, prompt - 1))
            built.append(sequence(str(arrival), arrival, prompt, computed, 0, priority, job=kind == "job"))
    for turn, waiting in enumerate(draw(st.permutations(built))):
        waiting.turn = turn
    return built


budgets = st.builds(StepBudget, st.integers(1, 20), st.integers(1, 20))


@given(states(), budgets)
def test_every_batch_keeps_the_rules(state: list[EngineSequence], budget: StepBudget) -> None:
    batch = schedule(state, budget)
    decodes = [chunk for chunk in batch if chunk.sequence.decoding]
    prompts = [chunk for chunk in batch if not chunk.sequence.decoding]
    assert batch == decodes + prompts
    assert sum(chunk.count for chunk in batch) <= budget.max_tokens
    assert sum(chunk.count for chunk in prompts) <= budget.max_prefill_tokens
    assert len({id(chunk.sequence) for chunk in batch}) == len(batch)
    for chunk in batch:
        assert chunk.start == chunk.sequence.num_computed
        assert 1 <= chunk.count <= chunk.sequence.num_remaining
    if not state:
        return
    longest = min(state, key=lambda s: s.turn)
    counts = {chunk.sequence: chunk.count for chunk in batch}
    share = min(longest.num_remaining, budget.guaranteed_tokens)
    assert counts[longest] >= share, "who has waited longest has no share"
    for part, decoding_now in ((decodes, True), (prompts, False)):
        ranks = [(-c.sequence.priority, c.sequence.arrival) for c in part]
        assert ranks == sorted(ranks)
        served = [rank for rank, c in zip(ranks, part, strict=True) if c.sequence is not longest]
        others = sorted((-s.priority, s.arrival) for s in state if s.decoding is decoding_now and s is not longest)
        assert served == others[: len(served)], "somebody was passed over"
    # Work conserving: what was left out or cut short was so by the budget, decoding sequences last of all.
    others_share = 0 if longest.decoding else share
    assert len(decodes) == min(sum(s.decoding for s in state), budget.max_tokens - others_share)
    wanted = sum(s.num_remaining for s in state if not s.decoding)
    room = min(budget.max_tokens - len(decodes), budget.max_prefill_tokens)
    assert sum(chunk.count for chunk in prompts) == min(wanted, room)


@given(states(), budgets, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    state: list[EngineSequence], budget: StepBudget, random: object
) -> None:
    shuffled = list(state)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan(schedule(state, budget)) == plan(schedule(shuffled, budget))


@given(states(), budgets)
def test_everything_ends_within_the_steps_its_work_needs(state: list[EngineSequence], budget: StepBudget) -> None:
    """No starvation: every step does something, so the work bounds the steps, whatever the priorities are."""
    running = list(state)
    steps = 0
    work = sum(s.num_remaining for s in state) + sum(SAMPLING.max_tokens + 5 for s in state)
    while running:
        batch = schedule(running, budget)
        assert batch
        steps += 1
        for chunk in batch:
            chunk.sequence.num_computed += chunk.count
            if chunk.samples:
                chunk.sequence.token_ids.append(0)
        running = [s for s in running if s.num_remaining > 0 and s.num_sampled <= SAMPLING.max_tokens + 4]
        assert steps <= work


@given(states(), budgets, st.data())
def test_everybody_gets_a_token_within_the_bound_however_many_come_later(
    state: list[EngineSequence], budget: StepBudget, data: st.DataObject
) -> None:
    """The bound in the module's docstring, for all of them, under a flow of prompts of the highest priority."""

    def bound(waiting: EngineSequence, runnable: list[EngineSequence]) -> int:
        ahead = [s for s in runnable if s.turn <= waiting.turn]
        return sum(-(-s.num_remaining // budget.guaranteed_tokens) for s in ahead)

    turns = counting(100)
    runnable = list(state)
    due = {s: bound(s, runnable) for s in runnable}
    for step in range(1, 1 + max(due.values(), default=0)):
        if data.draw(st.booleans()):
            urgent = sequence(f"urgent-{step}", 100 + step, data.draw(st.integers(1, 30)), priority=9, turn=next(turns))
            runnable.append(urgent)
            due[urgent] = step - 1 + bound(urgent, runnable)
        for chunk in schedule(runnable, budget):
            served = chunk.sequence
            served.num_computed += chunk.count
            if chunk.samples:
                served.token_ids.append(0)
                served.turn = next(turns)
                due[served] = step + bound(served, runnable)
        runnable = [s for s in runnable if s.num_remaining]
        late = [s.request_id for s in runnable if due[s] <= step]
        assert not late, f"still waiting after {step} steps: {late}"


@pytest.mark.parametrize(("budget", "steps"), [(StepBudget(1, 1), 8 + 32), (StepBudget(64, 16), 8 + 8)])
def test_the_bound_of_a_whole_pool(budget: StepBudget, steps: int) -> None:
    assert max_wait_steps(budget, num_blocks=8, block_tokens=4) == steps
