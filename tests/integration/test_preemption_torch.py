"""Preemption with a real model: what comes out of a pool that is too small is what comes out of a large one."""

from pathlib import Path

import pytest

from engine.backends.torch.runner import TorchRunner
from engine.core_types import SamplingParams, StepBudget
from support.torch_engine import Said, TorchEngine, all_ids, requests
from support.torch_models import random_prompts, runner_of

PROMPTS = random_prompts(5, 16, 31, 40, seed=1)
NEW_TOKENS = 48
NUM_BLOCKS = 8
"""Of 16 tokens: room for one request at its end and little more."""

SAMPLING = {
    "greedy": SamplingParams(NEW_TOKENS, temperature=0, ignore_eos=True),
    "seeded": SamplingParams(NEW_TOKENS, temperature=0.9, top_p=0.95, top_k=60, seed=11, ignore_eos=True),
    "penalised": SamplingParams(
        NEW_TOKENS, temperature=0.8, seed=3, presence_penalty=0.7, repetition_penalty=1.2, min_tokens=40
    ),
}


def serve(runner: TorchRunner, sampling: SamplingParams) -> tuple[Said, int]:
    """What is said to all at once, and how often one of them was preempted, by their own accounts."""
    said = TorchEngine(runner, StepBudget(64, 24)).ask(*requests(PROMPTS, sampling))
    assert len(said) == len(PROMPTS), "all are admitted at once"
    accounts = [[token.account for token in tokens if token.account is not None] for tokens in said.values()]
    return said, sum(of_one[-1].preemptions for of_one in accounts)


@pytest.mark.parametrize("how", sorted(SAMPLING))
def test_a_tiny_pool_gives_the_tokens_of_a_large_one(tiny_model: Path, how: str) -> None:
    expected, preemptions = serve(runner_of(tiny_model), SAMPLING[how])
    assert preemptions == 0
    assert all(len(tokens) == NEW_TOKENS for tokens in expected.values())
    got, preemptions = serve(runner_of(tiny_model, num_blocks=NUM_BLOCKS), SAMPLING[how])
    assert preemptions >= 2
    assert all_ids(got) == all_ids(expected)
