"""The sampler's distributions against a float64 reference, each option alone and combined."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.backends.torch.sampling.sampler import LIKELIEST, sample, uniform
from engine.core_types import EngineSequence, SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
DRAWS = 4000
PROMPT = [0, 3]
OUTPUT = [1, 1, 4]
EOS = frozenset({0})


def sequence(options: dict[str, Any], prompt: list[int] = PROMPT, output: list[int] = OUTPUT) -> EngineSequence:
    params = SamplingParams(**{"max_tokens": 10} | options)
    made = EngineSequence("r", [*prompt, *output], len(prompt), b"", 0, 0, sampling=params)
    assert made.output_token_ids == output
    return made


def reference(options: dict[str, Any]) -> NDArray[np.float64]:
    """In float64, step by step, from the definitions."""
    logits = LOGITS.double().numpy().copy()
    for token, bias in options.get("logit_bias", ()):
        logits[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        penalty = options.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, times in Counter(OUTPUT).items():
        logits[token] -= options.get("presence_penalty", 0.0) + options.get("frequency_penalty", 0.0) * times
    if len(OUTPUT) < options.get("min_tokens", 0):
        for token in {*options.get("stop_token_ids", ()), *(() if options.get("ignore_eos") else EOS)}:
            logits[token] = -np.inf
    probs = np.exp(logits / options.get("temperature", 1.0))
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = [token for token in order if probs[token] >= options.get("min_p", 0.0) * probs.max()]
    kept = kept[: options.get("top_k") or None]
    probs = np.array([p if token in kept else 0.0 for token, p in enumerate(probs)])
    probs /= probs.sum()
    total, final = 0.0, []
    for token in kept:
        if total < options.get("top_p", 1.0):
            final.append(token)
        total += probs[token]
    probs = np.array([p if token in final else 0.0 for token, p in enumerate(probs)])
    normalised: NDArray[np.float64] = probs / probs.sum()
    return normalised


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 1e-9},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.8},
    {"logit_bias": ((5, 4.0), (0, -100.0))},
    {"min_tokens": 4},
    {"min_tokens": 4, "ignore_eos": True, "stop_token_ids": frozenset({1, 2})},
    {"min_tokens": 3},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"temperature": 1.5, "presence_penalty": -1.0, "logit_bias": ((2, 1.5),), "min_tokens": 9, "top_p": 0.95},
]


@pytest.mark.parametrize("options", CASES, ids=lambda options: " ".join(options) or "plain")
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    expected = reference(options)
    rows = [sequence(options | {"seed": seed}) for seed in range(DRAWS)]
    counts = Counter(token.token_id for token in sample(LOGITS.repeat(DRAWS, 1), rows, EOS))
    for token, probability in enumerate(expected):
        if probability == 0:
            assert counts[token] == 0
        else:  # five standard deviations of a binomial
            spread = 5 * math.sqrt(DRAWS * probability * (1 - probability)) + 1
            assert abs(counts[token] - DRAWS * probability) <= spread


@pytest.mark.parametrize("options", CASES, ids=lambda options: " ".join(options) or "plain")
def test_greedy_takes_the_likeliest_after_penalties(options: dict[str, Any]) -> None:
    likeliest = int(reference(options | {"temperature": 1.0, "top_k": 1}).argmax())
    (token,) = sample(LOGITS[None], [sequence(options | {"temperature": 0})], EOS)
    assert token.token_id == likeliest


def test_rows_do_not_mix() -> None:
    """Every case at once, each row as if it were alone; the logits stay as they were."""
    rows = [sequence(options | {"seed": seed}) for options in CASES for seed in range(20)]
    logits = LOGITS.repeat(len(rows), 1)
    together = sample(logits, rows, EOS)
    assert together == [sample(LOGITS[None], [row], EOS)[0] for row in rows]
    assert torch.equal(logits, LOGITS.repeat(len(rows), 1))


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    first = sequence({"seed": 3})
    assert sample(LOGITS[None], [first], EOS) == sample(LOGITS[None], [sequence({"seed": 3})], EOS)
    draws = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(draws) == 2500


def test_a_resumed_request_has_the_same_penalties() -> None:
    """What an earlier attempt emitted is output, not prompt."""
    options = {"frequency_penalty": 2.0, "min_tokens": 4, "seed": 9}
    whole = sequence(options)
    params = whole.sampling
    resumed = EngineSequence("r", [*PROMPT, *OUTPUT], len(PROMPT) + 2, b"", 0, 0, sampling=params, num_emitted_before=2)
    assert (resumed.output_token_ids, resumed.num_sampled) == (OUTPUT, 3)
    assert sample(LOGITS[None], [resumed], EOS) == sample(LOGITS[None], [whole], EOS)


def test_uniform_is_uniform() -> None:
    values = np.array([uniform(1, position) for position in range(DRAWS)])
    assert ((values >= 0) & (values < 1)).all()
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert abs(counts - DRAWS / 10).max() < 5 * math.sqrt(DRAWS / 10)
    assert uniform(1, 2) != uniform(2, 1)


def test_logprobs_are_the_models_own() -> None:
    expected = LOGITS.double().log_softmax(-1)
    (token,) = sample(LOGITS[None], [sequence({"temperature": 0.2, "top_k": 1, "logprobs": 3})], EOS)
    assert token.logprobs.logprob == pytest.approx(float(expected[0]), abs=1e-6)
    assert token.logprobs.top_token_ids == (0, 1, 2)
    assert token.logprobs.top_logprobs == pytest.approx(expected[:3].tolist(), abs=1e-6)


def test_more_logprobs_than_tokens_and_none_at_all() -> None:
    (many,) = sample(LOGITS[None], [sequence({"logprobs": 20})], EOS)
    assert len(many.logprobs.top_token_ids) == 6
    (zero,) = sample(LOGITS[None], [sequence({"logprobs": 0})], EOS)
    assert zero.logprobs.top_token_ids == ()
    (none,) = sample(LOGITS[None], [sequence({})], EOS)
    assert none.logprobs is None


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 2}])
@pytest.mark.parametrize("temperature", [9e-6, 1e-38, 5e-324])
def test_next_to_no_temperature_is_the_likeliest(temperature: float, options: dict[str, Any]) -> None:
    """Quotients that leave float32 would be tokens out of range."""
    rows = [sequence(options | {"temperature": temperature, "seed": seed}) for seed in range(50)]
    assert {token.token_id for token in sample(LOGITS.repeat(50, 1), rows, EOS)} == {0}


def test_next_to_no_penalty_is_the_least_there_is() -> None:
    least = {"repetition_penalty": 1e-300}
    rows = [sequence(least | {"seed": seed, "temperature": 1.0 - seed % 2}) for seed in range(50)]
    assert {token.token_id for token in sample(LOGITS.repeat(50, 1), rows, EOS)} == {0}


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5, "logprobs": 1}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_fail_their_request_alone(value: float, options: dict[str, Any]) -> None:
    """Of a vocabulary that is no multiple of what is summed at once, and large enough for candidates."""
    logits = torch.arange(3000.0).repeat(2, 1)
    logits[0] = value
    broken, whole = sample(logits, [sequence(options), sequence({"temperature": 0.0})], EOS)
    assert "not finite numbers" in broken.failure.reason
    assert whole.token_id == 2999


def native_argmax(rows: torch.Tensor) -> torch.Tensor:
    from engine.backends.torch.native.kernels import Kernels

    return Kernels().argmax(rows.contiguous())


@pytest.mark.parametrize("argmax", [LIKELIEST, native_argmax], ids=["torch", "native"])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9}], ids=["greedy", "drawn", "top"]
)
@pytest.mark.parametrize("places", [[0], [1], [1501], [2999], [5, 700, 2048]])
def test_one_logit_that_is_no_number_fails_its_request_alone(
    argmax: Any, options: dict[str, Any], places: list[int]
) -> None:
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(1))
    logits[1, places] = math.nan
    logits[2, 17] = -math.inf  # a masked token is no fault
    alone = sample(logits[2:], [sequence(options)], EOS, argmax=argmax)
    above, broken, below = sample(logits, [sequence(options)] * 3, EOS, argmax=argmax)
    assert "not finite numbers" in broken.failure.reason
    assert above.failure is None
    assert [below] == alone
