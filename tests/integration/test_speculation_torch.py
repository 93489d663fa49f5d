"""With a real model: guesses change when tokens come, and not which. float32, so that nothing else changes them."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import CoreLimits, EngineCore
from engine.messages import FromEngine, Generate, Token
from engine.scheduler import StepBudget
from engine.speculation.speculator import NgramSource, Speculator
from engine.speculation.worth import StepCost
from engine.torch.runner import TorchRunner
from engine.vocabulary import SamplingParams
from kvtransfer.local import LocalNetwork, LocalTransport

NEW_TOKENS = 48
BIAS = tuple((token, 12.0) for token in range(40, 46))
"""A few tokens come again and again, so that there is something to guess."""
SAMPLING = {
    "greedy": SamplingParams(NEW_TOKENS, temperature=0, ignore_eos=True),
    "greedy of few": SamplingParams(NEW_TOKENS, temperature=0, logit_bias=BIAS, repetition_penalty=1.01),
    "seeded": SamplingParams(NEW_TOKENS, temperature=0.6, top_p=0.95, top_k=60, seed=11, logit_bias=BIAS),
    "penalised": SamplingParams(
        NEW_TOKENS, temperature=0.8, seed=3, presence_penalty=0.3, frequency_penalty=0.1, logit_bias=BIAS, min_tokens=40
    ),
    "logprobs": SamplingParams(NEW_TOKENS, temperature=0.5, seed=5, logit_bias=BIAS, logprobs=3, prompt_logprobs=2),
    "stopped": SamplingParams(
        NEW_TOKENS, temperature=0.9, seed=2, logit_bias=BIAS, stop_token_ids=frozenset({43}), min_tokens=25
    ),
    "choices": SamplingParams(NEW_TOKENS, temperature=0.7, seed=8, logit_bias=BIAS, n=3, min_p=0.02),
}


class FreeRows(StepCost):
    """Every guess pays."""

    def learn(self, rows: int, seconds: float) -> None:
        pass


def always(max_guesses: int = 5) -> Speculator:
    return Speculator(NgramSource(), max_guesses, FreeRows())


class Engine:
    def __init__(self, runner: TorchRunner, speculator: Speculator | None, chunk: int = 24) -> None:
        self.out: list[FromEngine] = []
        limits = CoreLimits(StepBudget(96, chunk), reserve_output_tokens=1)
        transport = LocalTransport(LocalNetwork(), "one")
        self.core = EngineCore(runner, transport, limits, self.out.append, speculator=speculator)
        self.core.start()
        self.num_steps = 0

    def ask(self, *requests: Generate) -> dict[tuple[str, int], list[Token]]:
        """By request and choice."""
        for request in requests:
            self.core.handle(request)
        while self.core.step():
            self.num_steps += 1
            assert self.core.audit().fault == ""
        assert self.core.audit().held_blocks == 0
        tokens: dict[tuple[str, int], list[Token]] = {}
        for message in self.out:
            if isinstance(message, Token):
                tokens.setdefault((message.request_id, message.choice), []).append(message)
        self.out.clear()
        return tokens


def prompts(count: int = 4) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 16, 31, 40)
    return [tuple(torch.randint(1, 500, (lengths[i % 4],), generator=generator).tolist()) for i in range(count)]


def requests(sampling: SamplingParams, **fields: Any) -> list[Generate]:
    return [
        Generate(str(number), prompt, (), sampling, "", number % 2, borrow=False, **fields)
        for number, prompt in enumerate(prompts())
    ]


def ids(tokens: Seq[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def runner_of(path: Path, num_blocks: int = 400) -> TorchRunner:
    size = TorchRunner(path, "float32", 16, 1 << 20).layout.block_bytes
    return TorchRunner(path, "float32", block_tokens=16, kv_bytes=num_blocks * size)


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> TorchRunner:
    return runner_of(tiny_model)


@pytest.mark.parametrize("how", sorted(SAMPLING))
def test_the_same_comes_in_fewer_steps(runner: TorchRunner, how: str) -> None:
    plain, guessing = Engine(runner, None), Engine(runner, always())
    expected, got = plain.ask(*requests(SAMPLING[how])), guessing.ask(*requests(SAMPLING[how]))
    assert {key: ids(tokens) for key, tokens in got.items()} == {key: ids(tokens) for key, tokens in expected.items()}
    for key, tokens in got.items():
        for one, other in zip(tokens, expected[key], strict=True):
            assert (one.finish, one.logprobs is None) == (other.finish, other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
                assert one.logprobs.top_token_ids == other.logprobs.top_token_ids
    right = sum(token.followed_guess for tokens in got.values() for token in tokens)
    guessed = sum(token.guessed for tokens in got.values() for token in tokens)
    assert 2 < right < guessed, "some guesses are right, and some are not"
    assert guessing.num_steps <= plain.num_steps
