"""Guesses: where they come from, what they are worth, and that an engine with them says what one without them says."""

from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.ngrams import MAX_ADDED, MAX_AGREEING, MAX_PLACES, Match, NgramIndex, continuation
from engine.speculation.worth import GAIN, Chances, OwnChances, StepCost, Wish, allot

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
