"""Preemption with a real model: what comes out of a pool that is too small is what comes out of a large one."""

from pathlib import Path

import pytest
import torch

from engine.core import CoreLimits, EngineCore
from engine.messages import FromEngine, Generate, Token
from engine.scheduler import StepBudget
from engine.torch.runner import TorchRunner
from engine.vocabulary import SamplingParams
from kvtransfer.local import LocalNetwork, LocalTransport

LENGTHS = (5, 16, 31, 40)
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


def serve(path: Path, kv_bytes: int | None, sampling: SamplingParams) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how often one was preempted. `kv_bytes` None: NUM_BLOCKS blocks."""
    if kv_bytes is None:
        kv_bytes = NUM_BLOCKS * TorchRunner(path, "float32", block_tokens=16, kv_bytes=1 << 20).layout.block_bytes
    runner = TorchRunner(path, "float32", block_tokens=16, kv_bytes=kv_bytes)
    out: list[FromEngine] = []
    limits = CoreLimits(StepBudget(64, 24), reserve_output_tokens=1)
    core = EngineCore(runner, LocalTransport(LocalNetwork(), "one"), limits, out.append)
    core.start()
    generator = torch.Generator().manual_seed(1)
    for number, length in enumerate(LENGTHS):
        prompt = tuple(torch.randint(1, 500, (length,), generator=generator).tolist())
        core.handle(Generate(str(number), prompt, (), sampling, "", number % 2, borrow=False))
    while core.step():
        assert core.audit().fault == ""
    tokens: dict[str, list[int]] = {}
    preemptions = dict.fromkeys(map(str, range(len(LENGTHS))), 0)
    for message in out:
        if isinstance(message, Token):
            tokens.setdefault(message.request_id, []).append(message.token_id)
            if message.account is not None:
                preemptions[message.request_id] = message.account.preemptions
    assert set(tokens) == set(preemptions), "all are admitted at once"
    assert core.audit().held_blocks == 0
    return tokens, sum(preemptions.values())


@pytest.mark.parametrize("how", sorted(SAMPLING))
def test_a_tiny_pool_gives_the_tokens_of_a_large_one(tiny_model: Path, how: str) -> None:
    expected, preemptions = serve(tiny_model, 8 << 20, SAMPLING[how])
    assert preemptions == 0
    assert all(len(tokens) == NEW_TOKENS for tokens in expected.values())
    got, preemptions = serve(tiny_model, None, SAMPLING[how])
    assert preemptions >= 2
    assert got == expected
