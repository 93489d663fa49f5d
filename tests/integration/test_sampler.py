"""The sampler's distributions against a float64 reference."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from engine.torch.sampler import sample, uniform
from engine.vocabulary import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
DRAWS = 4000


def reference(temperature: float, top_k: int, top_p: float) -> np.ndarray:  # type: ignore[type-arg]
    """In float64, token by token, from the definitions."""
    scaled = LOGITS.double().numpy() / temperature
    probs = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-probs)
    kept = list(order[: top_k or None])
    probs = np.array([p if i in kept else 0.0 for i, p in enumerate(probs)])
    probs /= probs.sum()
    total, final = 0.0, []
    for index in kept:
        if total < top_p:
            final.append(index)
        total += probs[index]
    probs = np.array([p if i in final else 0.0 for i, p in enumerate(probs)])
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 2, 1.0),
        (1.0, 0, 0.7),
        (1.3, 4, 0.8),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-9),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    expected = reference(temperature, top_k, top_p)
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p, seed=11)
    drawn = sample(LOGITS.repeat(DRAWS, 1), [(params, position) for position in range(DRAWS)])
    counts = Counter(token.token_id for token in drawn)
    for token, probability in enumerate(expected):
        if probability == 0:
            assert counts[token] == 0
        else:  # five standard deviations of a binomial
            spread = 5 * math.sqrt(DRAWS * probability * (1 - probability)) + 1
            assert abs(counts[token] - DRAWS * probability) <= spread


def test_greedy_takes_the_likeliest_whatever_else_is_asked() -> None:
    params = SamplingParams(1, temperature=0, top_k=3, top_p=0.1, seed=5)
    assert sample(LOGITS[None], [(params, 9)])[0].token_id == 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(1, seed=3)
    other = SamplingParams(1, temperature=0.3, top_k=2, seed=99)
    alone = sample(LOGITS[None], [(params, 7)])[0]
    in_company = sample(LOGITS.repeat(3, 1), [(other, 1), (params, 7), (other, 7)])[1]
    assert alone == in_company


def test_uniform_is_uniform() -> None:
    values = np.array([uniform(1, position) for position in range(DRAWS)])
    assert ((values >= 0) & (values < 1)).all()
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert abs(counts - DRAWS / 10).max() < 5 * math.sqrt(DRAWS / 10)
    assert uniform(1, 2) != uniform(2, 1)


def test_logprobs_are_the_models_own() -> None:
    expected = LOGITS.double().log_softmax(-1)
    params = SamplingParams(1, temperature=0.2, top_k=1, logprobs=3)
    (token,) = sample(LOGITS[None], [(params, 0)])
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[0]), abs=1e-6)
    assert token.logprobs.top_token_ids == (0, 1, 2)
    assert token.logprobs.top_logprobs == pytest.approx(expected[:3].tolist(), abs=1e-6)


def test_more_logprobs_than_tokens_and_none_at_all() -> None:
    (many,) = sample(LOGITS[None], [(SamplingParams(1, logprobs=20), 0)])
    assert many.logprobs is not None
    assert len(many.logprobs.top_token_ids) == 6
    (zero,) = sample(LOGITS[None], [(SamplingParams(1, logprobs=0), 0)])
    assert zero.logprobs is not None
    assert zero.logprobs.top_token_ids == ()
    (none,) = sample(LOGITS[None], [(SamplingParams(1), 0)])
    assert none.logprobs is None
