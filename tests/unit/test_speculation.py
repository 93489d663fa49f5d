"""Guesses: where they come from, what they are worth, and that an engine with them says what one without them says."""

from collections.abc import Sequence as Seq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core_types import BeamParams, Chunk, SamplingParams, Sequence, StepBudget
from engine.messages.to_engine import Cancel
from engine.speculation.ngrams import MAX_ADDED, MAX_AGREEING, MAX_PLACES, Match, NgramIndex, continuation
from engine.speculation.speculation_policy import (
    GAIN,
    AcceptanceRates,
    DraftBudget,
    SequenceAcceptance,
    StepCost,
    allot,
)
from engine.speculation.speculator import NgramProposer, Speculator
from support.crowded_engine import Engine, tokens
from support.drafting import Oracle, always

# ------------------------------------------------------------------------------------------------ prompt lookup


def brute_force(tokens: Seq[int], width: int) -> Match | None:
    """By comparing the text's end with every place in it."""
    agreeing = {}
    for end in range(width, len(tokens)):
        count = 0
        while count < min(end, MAX_AGREEING) and tokens[end - 1 - count] == tokens[len(tokens) - 1 - count]:
            count += 1
        if count >= width:
            agreeing[end] = count
    latest = sorted(agreeing, reverse=True)[:MAX_PLACES]
    return max((Match(end, agreeing[end]) for end in latest), key=lambda m: (m.agreeing, m.end), default=None)


@given(st.lists(st.integers(0, 2), max_size=120), st.integers(1, 4), st.data())
def test_the_index_finds_what_comparing_every_place_finds(text: list[int], width: int, data: st.DataObject) -> None:
    index, length = NgramIndex(width), 0
    while length < len(text):
        length = min(len(text), length + data.draw(st.integers(1, 30)))
        assert index.search(text[:length]) == brute_force(text[:length], width)


def test_a_long_text_is_indexed_a_part_at_a_time() -> None:
    text = [*range(2 * MAX_ADDED), 5, 6, 7]
    index = NgramIndex(width=3)
    assert index.search(text) == Match(8, 3)
    text[-3:] = range(MAX_ADDED + 100, MAX_ADDED + 103)
    index = NgramIndex(width=3)
    assert index.search(text) is None
    assert index.search(text) == Match(MAX_ADDED + 103, 3)


def test_large_token_ids_do_not_collide() -> None:
    index = NgramIndex(width=2)
    assert index.search([1, 1 << 31, 7, 2, 1 << 31]) is None
    assert index.search([1, 1 << 31, 7, 2, 1 << 31, 1, 1 << 31]) == Match(2, 2)


@pytest.mark.parametrize(("end", "expected"), [(1, (2, 3, 4, 5)), (3, (4, 5, 4, 5)), (4, (5, 5, 5, 5))])
def test_a_continuation_goes_on_in_its_own_copy(end: int, expected: tuple[int, ...]) -> None:
    assert continuation([1, 2, 3, 4, 5], end, 4) == expected


# ----------------------------------------------------------------------------------------------- what they are worth


def line(step_s: float, row_s: float) -> StepCost:
    cost = StepCost()
    for rows in (1, 9, 3, 7) * 20:
        cost.learn(rows, step_s + row_s * rows)
    return cost


def test_what_a_row_costs_is_read_from_steps_of_different_sizes() -> None:
    cost = line(0.030, 0.002)
    assert cost.row_s == pytest.approx(0.002)
    assert cost.seconds(5) == pytest.approx(0.040)
    cost.learn(5, 30.0)  # the process was stopped
    assert cost.seconds(5) == pytest.approx(0.040, rel=0.15)
    for _ in range(200):
        cost.learn(5, 0.040)
    assert cost.seconds(5) == pytest.approx(0.040, rel=0.01)


def test_a_row_never_seems_free_and_slowly_becomes_cheaper_while_it_is_not_tried() -> None:
    assert line(0.030, 0.0).row_s == pytest.approx(0.005 * 0.030)
    cost = line(0.010, 0.010)
    for _ in range(400):
        cost.forgive()
        cost.learn(4, 0.050)
    assert cost.row_s < 0.005


def test_while_nothing_is_known_of_steps_guesses_are_tried() -> None:
    assert allot([DraftBudget(0.5, 4), DraftBudget(0.1, 2)], 2, 2, left=8, cost=StepCost()) == [4, 2]


def test_the_likeliest_guesses_go_first_and_only_while_they_pay() -> None:
    cost = line(0.030, 0.003)  # 36 ms for 2 tokens: a row is worth 1/6 token, and the more the more is gained
    assert allot([DraftBudget(0.9, 8), DraftBudget(0.5, 8)], 2, 2, left=100, cost=cost) == [8, 1]
    assert allot([DraftBudget(0.9, 8), DraftBudget(0.5, 8)], 2, 2, left=5, cost=cost) == [5, 0]
    assert allot([DraftBudget(0.15, 8), DraftBudget(0.1, 8)], 2, 2, left=100, cost=cost) == [0, 0]
    assert allot([], 2, 2, left=100, cost=cost) == []


def test_in_a_batch_that_computes_for_every_row_only_what_is_nearly_certain_is_guessed() -> None:
    cost = line(0.004, 0.003)  # 32 sequences: 100 ms for 32 tokens, so that a row is worth 0.96 token
    assert not any(allot([DraftBudget(0.8, 8)] * 32, 32, 32, left=1000, cost=cost))
    assert not any(allot([DraftBudget(0.99, 8)] * 32, 32, 32, left=1000, cost=cost)), "what is gained is less than GAIN"


@pytest.mark.parametrize(("pass_s", "depth"), [(0.001, 8), (0.010, 3), (0.040, 0)])
def test_a_draft_model_goes_only_as_far_as_its_passes_pay(pass_s: float, depth: int) -> None:
    cost = line(0.030, 0.0005)
    (count,) = allot([DraftBudget(0.8, 8)], 1, 1, left=100, cost=cost, pass_s=pass_s)
    assert count == depth


@given(
    st.lists(st.builds(DraftBudget, st.floats(0, 1), st.integers(1, 8)), max_size=12),
    st.integers(0, 40),
    st.sampled_from([(0.03, 0.0), (0.03, 0.002), (0.001, 0.01)]),
    st.sampled_from([0.0, 0.002, 0.02]),
)
def test_what_is_given_out_keeps_to_the_limits_and_pays(
    wishes: list[DraftBudget], left: int, line_of: tuple[float, float], pass_s: float
) -> None:
    cost, num = line(*line_of), max(1, len(wishes))
    counts = allot(wishes, num, num, left, cost, pass_s)
    assert len(counts) == len(wishes)
    assert sum(counts) <= left
    assert all(0 <= count <= wish.most for count, wish in zip(counts, wishes, strict=True))
    if any(counts):
        gained = sum(wish.chance**j for wish, count in zip(wishes, counts, strict=True) for j in range(1, count + 1))
        seconds = cost.seconds(num) + sum(counts) * cost.row_s + max(counts) * pass_s
        assert (num + gained) / seconds >= GAIN * num / cost.seconds(num) * 0.999


def test_chances_begin_as_those_of_all_and_end_at_the_first_wrong_guess() -> None:
    of_all = AcceptanceRates()
    first, second = SequenceAcceptance(of_all), SequenceAcceptance(of_all)
    assert first.of(3) == second.of(3) == 0.5
    for _ in range(30):
        first.learn(3, [True, False, True])
    assert first.of(3) == pytest.approx(0.46, abs=0.05)
    for _ in range(30):
        first.learn(3, [False])
    assert first.of(3) < 0.01
    assert 0.2 < second.of(3) < 0.5
    assert second.of(2) == 0.5, "of another kind nothing was learnt"


# --------------------------------------------------------------------------------------------- engines with guesses


def guessing(mistakes: float = 0.0, seed: int = 0, most: int = 5) -> Speculator:
    return always(Oracle(mistakes, seed), most)


def test_right_guesses_save_steps_and_the_last_ones_are_not_wasted() -> None:
    speculator = guessing()
    engine = Engine(num_blocks=16, speculator=speculator)
    engine.ask("a", tokens(10, 7), 14)
    engine.run()
    engine.check_finished()
    # The prompt gives one token; then 6, 6, and the last one by itself: guesses beyond max_tokens are not made.
    assert engine.num_steps == 4
    assert (speculator.num_draft_tokens, speculator.num_right) == (10, 10)


def test_wrong_guesses_cost_nothing_but_rows() -> None:
    speculator = guessing(mistakes=1.0)
    engine = Engine(num_blocks=16, speculator=speculator)
    engine.ask("a", tokens(10, 7), 14)
    engine.run()
    engine.check_finished()
    assert engine.num_steps == 14
    assert speculator.num_right == 0
    assert speculator.num_draft_tokens == 5 * 8 + 4 + 3 + 2 + 1


def test_guesses_take_what_is_left_of_a_budget() -> None:
    engine = Engine(num_blocks=16, budget=StepBudget(4, 4), speculator=guessing())
    engine.ask("a", tokens(10, 4), 9)
    engine.step()
    batch = engine.begin_step()
    assert [(chunk.count, chunk.num_draft_tokens) for chunk in batch] == [(1, 3)]
    engine.end_step(batch)
    engine.ask("b", tokens(50, 8), 2)
    batch = engine.begin_step()
    assert [(chunk.count, chunk.num_draft_tokens) for chunk in batch] == [(1, 0), (3, 0)]
    engine.end_step(batch)
    engine.run()
    engine.check_finished()


def test_nobody_is_preempted_for_a_guess() -> None:
    """Both fit as they are; with guesses in every step they would not."""
    plain, engine = Engine(num_blocks=5), Engine(num_blocks=5, speculator=guessing(mistakes=1.0))
    for each in (plain, engine):
        each.ask("a", tokens(10, 7), 2)
        each.ask("b", tokens(50, 7), 5)
        each.run()
        each.check_finished()
        assert each.core._requests.running_set.num_preemptions == 0
    assert plain.served == engine.served


def test_beams_get_no_guesses() -> None:
    speculator = guessing()
    engine = Engine(num_blocks=16, bounded=False, speculator=speculator)
    engine.ask("a", tokens(10, 7), 6, beam=BeamParams(2))
    engine.run()
    engine.check_finished()
    assert speculator.num_draft_tokens == 0


def test_blocks_are_named_for_accepted_tokens_only() -> None:
    """What an engine with guesses has cached is, to the bit, what one without has."""
    plain, engine = Engine(num_blocks=64), Engine(num_blocks=64, speculator=guessing(mistakes=0.5, seed=4))
    for each in (plain, engine):
        for name, base in (("a", 10), ("b", 50), ("c", 90)):
            each.ask(name, tokens(base, 7), 21, n=2)
        each.run()
        each.check_finished()
    expected, got = (each.core._kv_cache.pool._block_of for each in (plain, engine))
    assert got.keys() == expected.keys()
    assert len(got) > 30
    for key, block in got.items():
        np.testing.assert_array_equal(engine.runner.pool.memory[block], plain.runner.pool.memory[expected[key]])


@given(st.integers(0, 2**32), st.data())
def test_a_crowd_with_guesses_gets_what_it_would_get_without(seed: int, data: st.DataObject) -> None:
    """Books, bounds and tokens are checked at every step; requests go away at any time, in a step too."""
    budget = StepBudget(data.draw(st.integers(1, 24)), data.draw(st.integers(1, 12)))
    speculator = guessing(data.draw(st.sampled_from([0.0, 0.3, 0.8])), seed, data.draw(st.integers(1, 9)))
    engine = Engine(data.draw(st.integers(8, 14)), budget, data.draw(st.integers(1, 9)), speculator=speculator)
    for number in range(data.draw(st.integers(1, 5))):
        length, most = data.draw(st.integers(1, 13)), data.draw(st.integers(1, 15))
        n = data.draw(st.sampled_from([1, 1, 1, 2]))
        engine.ask(str(number), tokens(100 * number, length), most, data.draw(st.integers(0, 1)), n=n)
        for _ in range(data.draw(st.integers(0, 6))):
            batch = engine.begin_step()
            if data.draw(st.integers(0, 9)) == 0:
                engine.send(Cancel(str(data.draw(st.integers(0, number)))))
            if batch:
                engine.end_step(batch)
    engine.run()
    engine.check_finished()


# ------------------------------------------------------------------------------------- what prompt lookup learns


def text_of(token_ids: list[int]) -> Sequence:
    return Sequence("r", token_ids, 1, b"", SamplingParams(1000), 0, 0)


def test_a_text_in_which_nothing_comes_again_gets_no_guesses_whether_they_were_used_or_not() -> None:
    source, text = NgramProposer(), text_of([1, 2])
    for new in range(100, 140):  # 1, 2 is followed by another token each time
        text.token_ids += [new, 1, 2]
        wish = source.propose_budget(text, 4)
    assert wish is not None
    assert wish.chance < 0.05
    cost = line(0.030, 0.003)
    assert allot([wish], 1, 1, 100, cost) == [0]


def test_a_text_that_repeats_is_guessed_on_and_another_one_begins_with_what_was_learnt() -> None:
    source, text = NgramProposer(), text_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    for token in (3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6):
        wish = source.propose_budget(text, 4)
        assert wish is not None
        chunk = source.drafted(Chunk(text, text.num_tokens - 1, 1), 3)
        assert chunk.draft_tokens == tuple((text.token_ids[-1] + step - 1) % 9 + 1 for step in (1, 2, 3))
        text.token_ids.append(token)
    assert wish.chance > 0.7
    other = source.propose_budget(text_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7]), 4)
    assert other is not None
    assert 0.5 < other.chance < wish.chance
