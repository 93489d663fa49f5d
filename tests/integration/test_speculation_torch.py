"""With a real model: guesses change when tokens come, and not which. float32, so that nothing else changes them."""

from pathlib import Path
from typing import Any

import pytest

from engine.backends.torch.runner import TorchRunner
from engine.core_types import SamplingParams, StepBudget
from engine.errors import EngineStartError
from engine.model.model_dir import ModelDir
from engine.speculation.speculator import DraftModelProposer, NgramProposer, Speculator
from support.drafting import FreeRows, Recording, always
from support.long_runs import long
from support.torch_engine import Said, TorchEngine, all_ids, ids, request, requests
from support.torch_models import VOCAB, copy_with, random_prompts, runner_of

NEW_TOKENS = 40
BIAS = tuple((token, 12.0) for token in range(40, 46))
"""A few tokens come again and again, so that there is something to guess."""
SAMPLING = {
    "greedy": SamplingParams(NEW_TOKENS, temperature=0, ignore_eos=True),
    "seeded": SamplingParams(NEW_TOKENS, temperature=0.6, top_p=0.95, top_k=60, seed=11, logit_bias=BIAS),
    "penalised": SamplingParams(
        NEW_TOKENS, temperature=0.8, seed=3, presence_penalty=0.3, frequency_penalty=0.1, logit_bias=BIAS, min_tokens=40
    ),
    "repetition": SamplingParams(NEW_TOKENS, temperature=0, logit_bias=BIAS, repetition_penalty=1.01),
    "logprobs": SamplingParams(NEW_TOKENS, temperature=0.5, seed=5, logit_bias=BIAS, logprobs=3, prompt_logprobs=2),
    "stopped": SamplingParams(
        NEW_TOKENS, temperature=0.9, seed=2, logit_bias=BIAS, stop_token_ids=frozenset({43}), min_tokens=15
    ),
    "choices": SamplingParams(NEW_TOKENS, temperature=0.7, seed=8, logit_bias=BIAS, n=3, min_p=0.02),
}
PROMPTS = random_prompts(5, 16, 31, 40, seed=1)


def ask(engine: TorchEngine, how: str) -> Said:
    """All prompts at once."""
    return engine.ask(*requests(PROMPTS, SAMPLING[how]))


def rights(said: Said) -> tuple[int, int]:
    """How many guesses were right, of how many."""
    every = [token for tokens in said.values() for token in tokens]
    return sum(token.followed_draft for token in every), sum(token.drafted for token in every)


def assert_same(got: Said, expected: Said) -> None:
    assert all_ids(got) == all_ids(expected)
    for key, tokens in got.items():
        for one, other in zip(tokens, expected[key], strict=True):
            assert (one.finish, one.logprobs is None) == (other.finish, other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
                assert one.logprobs.top_token_ids == other.logprobs.top_token_ids


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> TorchRunner:
    return runner_of(tiny_model)


@pytest.fixture(scope="module")
def plain(runner: TorchRunner) -> dict[str, Said]:
    """What is said without guesses."""
    return {how: ask(TorchEngine(runner), how) for how in SAMPLING}


@pytest.mark.parametrize("how", sorted(SAMPLING))
def test_guesses_change_nothing_that_is_said(runner: TorchRunner, plain: dict[str, Said], how: str) -> None:
    source = Recording(all_ids(plain[how]), VOCAB, mistakes=0.3)
    got = ask(TorchEngine(runner, StepBudget(96, 7), always(source)), how)
    assert_same(got, plain[how])
    num_right, num_guessed = rights(got)
    assert 0.3 < num_right / num_guessed < 0.9


@pytest.mark.parametrize("how", ["repetition", "choices"])
def test_what_comes_again_is_guessed_by_prompt_lookup(runner: TorchRunner, plain: dict[str, Said], how: str) -> None:
    got = ask(TorchEngine(runner, speculator=Speculator(NgramProposer(), cost=FreeRows())), how)
    assert_same(got, plain[how])
    num_right, num_guessed = rights(got)
    assert 2 < num_right < num_guessed


@pytest.mark.parametrize("how", ["greedy", "seeded", "penalised"])
def test_in_a_tiny_pool_too(tiny_model: Path, plain: dict[str, Said], how: str) -> None:
    """Preempted with guesses under way, computed anew, and guessed for again."""
    source = Recording(all_ids(plain[how]), VOCAB)
    engine = TorchEngine(runner_of(tiny_model, num_blocks=8), speculator=always(source))
    assert all_ids(ask(engine, how)) == all_ids(plain[how])
    assert engine.num_preemptions >= 2


def test_what_was_emitted_elsewhere_is_gone_on_with(runner: TorchRunner, plain: dict[str, Said]) -> None:
    said = all_ids(plain["penalised"])["2", 0]
    engine = TorchEngine(runner, speculator=always(Recording({("r", 0): said}, VOCAB, mistakes=0.2)))
    for cut in (1, 9, 30):
        rest = engine.ask(request("r", PROMPTS[2], SAMPLING["penalised"], said[:cut]))
        assert ids(rest["r", 0]) == said[cut:]


def test_the_cpu_kernels_give_the_same_to_the_bit(tiny_model: Path) -> None:
    """A token's result does not depend on its batch: log probabilities in bfloat16 are equal, not close."""
    runner = runner_of(tiny_model, dtype="bfloat16")
    if runner.backend != "native" or runner.paged._last_rows is None:
        pytest.skip("this CPU has no bfloat16 kernels")
    expected = ask(TorchEngine(runner), "logprobs")
    got = ask(TorchEngine(runner, speculator=always(Recording(all_ids(expected), VOCAB))), "logprobs")
    assert rights(got)[0] > 20
    for key, tokens in got.items():
        assert [(t.token_id, t.logprobs) for t in tokens] == [(t.token_id, t.logprobs) for t in expected[key]]


# ------------------------------------------------------------------------------------------------- a draft model


@pytest.mark.parametrize("how", ["greedy", "seeded", "stopped", "choices"])
def test_a_draft_model_that_is_the_model_itself_guesses_right(
    tiny_model: Path, plain: dict[str, Said], how: str
) -> None:
    """Where the likeliest is what is sampled. Nothing else is said elsewhere."""
    runner = runner_of(tiny_model, draft=tiny_model)
    got = ask(TorchEngine(runner, speculator=Speculator(DraftModelProposer(runner), 4, FreeRows())), how)
    assert_same(got, plain[how])
    num_right, num_guessed = rights(got)
    assert num_guessed > 20
    if how == "greedy":  # else it knows nothing of the bias
        assert num_right == num_guessed
    assert runner.draft_pass_s > 0


@long
def test_another_draft_model_changes_nothing_even_in_a_tiny_pool(
    make_model: Any, tiny_model: Path, plain: dict[str, Said]
) -> None:
    runner = runner_of(tiny_model, num_blocks=8, draft=make_model("qwen3", seed=3))
    engine = TorchEngine(runner, speculator=Speculator(DraftModelProposer(runner), 4, FreeRows()))
    for how in ("greedy", "seeded"):
        assert all_ids(ask(engine, how)) == all_ids(plain[how])
    assert engine.num_preemptions >= 2


def test_what_the_draft_model_has_read_it_need_not_read_again(tiny_model: Path) -> None:
    """Of a prompt that is cached, and of one longer than it reads in a step."""
    runner = runner_of(tiny_model, draft=tiny_model)
    engine = TorchEngine(runner, StepBudget(96, 64), Speculator(DraftModelProposer(runner), 4, FreeRows()))
    (prompt,) = random_prompts(400, seed=5)
    sampling = SAMPLING["greedy"]._replace(max_tokens=12)
    drafted: list[list[int]] = []
    for _ in range(2):
        tokens = engine.ask(request("r", prompt, sampling))["r", 0]
        drafted.append([token.drafted for token in tokens if not token.followed_draft])
    assert drafted[0][:4] == [0, 0, 4, 4], "256 tokens in the first step of decoding, and the rest in the next"
    assert drafted[1][:3] == [0, 4, 4]


def test_a_draft_model_of_other_tokens_is_refused(tiny_model: Path, make_model: Any, tmp_path: Path) -> None:
    other = copy_with(make_model("qwen3", seed=3), tmp_path / "other", vocab_size=501)
    assert ModelDir.open(other).vocab_size == 501
    with pytest.raises(
        EngineStartError, match=r"speculation: the vocabulary of .* has 501 tokens, the served model's 500"
    ):
        runner_of(tiny_model, draft=other)
    with pytest.raises(EngineStartError, match=r"speculation: .* no directory"):
        runner_of(tiny_model, draft=tmp_path / "nothing")
