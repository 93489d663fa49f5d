"""Made-up requests, and prompts for them: lengths, sharing, and that equal ids are equal text."""

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.loadgen.frontends import LEAST_TOKEN, PromptWords, sample, token_ids
from workloads.profiles import HASH_TOKENS, PROFILES, evenly, poisson, profile_named, requests_of
from workloads.request import BadSetup, TraceRequest


@given(
    st.sampled_from(sorted(PROFILES)),
    st.integers(0, 1 << 40),
    st.floats(0.01, 20),
    st.integers(64, 20_000),
)
def test_every_profile_fits_every_context(name: str, seed: int, scale: float, context: int) -> None:
    for request in islice(requests_of(PROFILES[name], evenly(5), seed, scale, context), 20):
        assert request.input_tokens >= 1
        assert request.output_tokens >= 1
        assert request.input_tokens + request.output_tokens <= context
        assert len(request.hash_ids) == -(-request.input_tokens // HASH_TOKENS)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_the_same_seed_makes_the_same_and_another_one_does_not(name: str) -> None:
    def made(seed: int) -> list[TraceRequest]:
        return list(islice(requests_of(profile_named(name), poisson(3, seed), seed), 50))

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    requests = list(islice(requests_of(profile_named("tool-calling"), evenly(1)), 400))
    longer = [
        (before, after)
        for before in requests
        for after in requests[before.number + 1 :]
        if len(before.hash_ids) > 200 and after.hash_ids[: len(before.hash_ids)] == before.hash_ids
    ]
    assert longer
    for before, after in longer[:50]:
        full = before.input_tokens // HASH_TOKENS * HASH_TOKENS
        assert token_ids(after, 5000)[:full] == token_ids(before, 5000)[:full]
    systems = {request.hash_ids[0] for request in requests}
    assert len(systems) == profile_named("tool-calling").system_prompts


def test_lengths_are_about_what_the_profile_says() -> None:
    requests = list(islice(requests_of(profile_named("offline-batch"), evenly(1)), 2000))
    inputs = sorted(request.input_tokens for request in requests)
    assert inputs[1000] == pytest.approx(400 + 1200 + 20, rel=0.1)
    assert {request.priority for request in requests} == {-1}


def test_poisson_comes_at_its_rate_and_evenly_at_equal_gaps() -> None:
    times = list(islice(poisson(50, seed=3), 20_000))
    assert times[-1] == pytest.approx(400, rel=0.03)
    gaps = [after - before for before, after in pairwise(times)]
    assert sum(gap > 2 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.135, abs=0.01)  # e^-2: no memory
    assert list(islice(evenly(4), 3)) == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (lambda: profile_named("chat"), "profile"),
        (lambda: poisson(0).__next__(), "rate"),
        (lambda: evenly(float("nan")), "rate"),
        (lambda: requests_of(PROFILES["short-chat"], evenly(1), scale=0), "scale"),
        (lambda: requests_of(PROFILES["short-chat"], evenly(1), context=8), "context"),
    ],
)
def test_what_cannot_be_offered_is_refused_by_name(asked: object, field: str) -> None:
    with pytest.raises(BadSetup, match=field):
        asked()  # type: ignore[operator]


def request_of(ids: tuple[int, ...], tokens: int, number: int = 0, size: int = 16) -> TraceRequest:
    return TraceRequest(number, 0.0, tokens, 1, ids, size)


@given(st.lists(st.integers(0, 1 << 30), max_size=6), st.integers(1, 200), st.integers(20, 200_000))
def test_prompts_have_their_length_and_their_vocabulary(ids: list[int], tokens: int, vocab_size: int) -> None:
    request = request_of(tuple(ids[: tokens // 16]), tokens, number=7)
    found = token_ids(request, vocab_size)
    assert len(found) == tokens
    assert all(min(LEAST_TOKEN, vocab_size // 2) <= token < vocab_size for token in found)


def test_equal_ids_are_equal_prompts_up_to_there_and_no_further() -> None:
    one, other = request_of((1, 2, 3), 48, 0), request_of((1, 2, 4), 48, 1)
    first, second = token_ids(one, 30_000), token_ids(other, 30_000)
    assert first[:32] == second[:32]
    assert first[32] != second[32]
    alone, too = token_ids(request_of((), 48, 2), 30_000), token_ids(request_of((), 48, 3), 30_000)
    assert alone[:4] != too[:4]  # without ids nothing is shared
    words = PromptWords(1.6)
    said, also = words.text(one).split(), words.text(other).split()
    assert said[:20] == also[:20]
    assert said[20] != also[20]
    assert len(said) == 30  # 48 tokens, 1.6 a word
    assert len(sample(200).split()) == 200
