"""State of penalties: what is advanced by new tokens equals what is made anew from all of them."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.torch.sampling.logit_edits import DistinctTokens, adjusted
from engine.core_types import EngineSequence, SamplingParams

VOCAB = 20
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=40)
OPTIONS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((3, 2.0), (7, -1.0)),
    "min_tokens": 6,
    "stop_token_ids": frozenset({1, 2}),
}


def made(prompt: list[int], output: list[int]) -> EngineSequence:
    return EngineSequence(
        "r", [*prompt, *output], len(prompt), b"", 0, 0, sampling=SamplingParams(max_tokens=99, **OPTIONS)
    )


@given(TOKENS, TOKENS)
def test_counts_advance_by_new_tokens(first: list[int], more: list[int]) -> None:
    known, whole = DistinctTokens(first), DistinctTokens([*first, *more])
    known.add(more)
    counts, expected = (dict(zip(each.tokens.tolist(), each.counts.tolist(), strict=True)) for each in (known, whole))
    assert counts == expected
    assert known.num_seen == len(first) + len(more)


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), TOKENS, st.lists(st.integers(0, 3), max_size=8))
def test_a_sequence_that_grows_has_the_logits_of_one_made_anew(
    prompt: list[int], output: list[int], cuts: list[int]
) -> None:
    """Steps of several tokens, and a sequence that loses tokens again."""
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB)
    grown = made(prompt, [])
    left = list(output)
    for cut in [*cuts, len(left)]:
        grown.token_ids += left[:cut]
        del left[:cut]
        fresh = made(prompt, grown.token_ids[len(prompt) :])
        assert grown.sampling is not None
        expected = adjusted(logits, [fresh], [grown.sampling], frozenset({0}))
        assert torch.equal(adjusted(logits, [grown], [grown.sampling], frozenset({0})), expected)
    del grown.token_ids[len(prompt) :]
    assert grown.sampling is not None
    got = adjusted(logits, [grown], [grown.sampling], frozenset({0}))
    assert torch.equal(got, adjusted(logits, [made(prompt, [])], [grown.sampling], frozenset({0})))
