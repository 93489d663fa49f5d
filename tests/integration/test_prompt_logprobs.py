"""Log probabilities of prompt tokens, against transformers, in whatever chunks the prompt is computed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core import CoreLimits, EngineCore
from engine.messages import FromEngine, Generate, PromptScored, Token
from engine.scheduler import StepBudget
from engine.torch import scoring
from engine.torch.native.kernels import Kernels
from engine.torch.runner import TorchRunner
from engine.vocabulary import SamplingParams, TokenLogprobs
from kvtransfer.local import LocalNetwork, LocalTransport

PROMPT = torch.randint(1, 500, (70,), generator=torch.Generator().manual_seed(4)).tolist()
TOP = 3
SAMPLING = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=TOP)


class Engine:
    def __init__(self, path: Path, chunk: int, dtype: str = "float32", num_blocks: int = 64, **options: Any) -> None:
        self.out: list[FromEngine] = []
        size = TorchRunner(path, dtype, 16, 1 << 20).layout.block_bytes
        runner = TorchRunner(path, dtype, block_tokens=16, kv_bytes=num_blocks * size, **options)
        limits = CoreLimits(StepBudget(2 * chunk, chunk), reserve_output_tokens=1)
        self.core = EngineCore(runner, LocalTransport(LocalNetwork(), "one"), limits, self.out.append)
        self.core.start()

    def ask(self, *requests: Generate) -> None:
        for request in requests:
            self.core.handle(request)
        while self.core.step():
            assert self.core.audit().fault == ""

    def scores(self, request_id: str) -> list[TokenLogprobs]:
        return [of for m in self.out if isinstance(m, PromptScored) and m.request_id == request_id for of in m.logprobs]

    def tokens(self, request_id: str) -> list[int]:
        return [m.token_id for m in self.out if isinstance(m, Token) and m.request_id == request_id]


def scored(request_id: str, sampling: SamplingParams = SAMPLING, **fields: Any) -> Generate:
    return Generate(request_id, tuple(PROMPT), (), sampling, "", 0, borrow=False, **fields)


def assert_close(got: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_token_ids == other.top_token_ids
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_they_are_those_of_transformers(make_model: Any, family: str) -> None:
    path = make_model(family)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = []
    for row, token_id in zip(logprobs, PROMPT[1:], strict=False):
        top = row.topk(TOP)
        expected.append(TokenLogprobs(float(row[token_id]), tuple(top.indices.tolist()), tuple(top.values.tolist())))
    engine = Engine(path, chunk=16)
    engine.ask(scored("a"), scored("plain", replace(SAMPLING, prompt_logprobs=None)))
    assert_close(engine.scores("a"), expected)
    assert engine.scores("plain") == []
    assert engine.tokens("a") == engine.tokens("plain")
    first_token = next(i for i, m in enumerate(engine.out) if isinstance(m, Token) and m.request_id == "a")
    assert all(isinstance(m, PromptScored) is False for m in engine.out[first_token:])


@pytest.mark.parametrize("backend", ["sdpa", "native"])
def test_no_chunk_size_changes_them_and_nothing_cached_is_used(
    tiny_model: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Engine(tiny_model, chunk=200, backend=backend)
    whole.ask(scored("a"))
    expected = whole.scores("a")
    assert len(expected) == len(PROMPT) - 1
    whole.ask(scored("again"))
    assert_close(whole.scores("again"), expected)
    monkeypatch.setattr(scoring, "SLICE_LOGITS", 5 * 500)
    for chunk in (1, 7, 16):
        engine = Engine(tiny_model, chunk=chunk, backend=backend)
        engine.ask(scored("a"), scored("b"))
        assert_close(engine.scores("a"), expected)
        assert_close(engine.scores("b"), expected)


def test_the_kernels_give_the_same_to_the_bit(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Kernels().multiplies_bfloat16:
        pytest.skip("no bfloat16 dot products on this CPU: linear layers are torch's")
    path = make_model("qwen2", dtype="bfloat16")
    whole = Engine(path, 200, "bfloat16", backend="native")
    whole.ask(scored("a"))
    expected = whole.scores("a")
    for chunk, rows in ((1, 9), (7, 2), (16, 100)):
        monkeypatch.setattr(scoring, "SLICE_LOGITS", rows * 500)
        engine = Engine(path, chunk, "bfloat16", backend="native")
        engine.ask(scored("a"))
        assert engine.scores("a") == expected


def test_a_preempted_or_moved_request_gives_each_once(tiny_model: Path) -> None:
    alone = Engine(tiny_model, chunk=16)
    alone.ask(scored("a"))
    expected = alone.scores("a")
    crowded = Engine(tiny_model, chunk=16, num_blocks=9)
    other = SamplingParams(max_tokens=100, temperature=0)
    crowded.core.handle(Generate("old", (1, 2, 3), (), other, "", 0, borrow=False))
    for _ in range(20):
        crowded.core.step()
    crowded.ask(scored("a", replace(SAMPLING, max_tokens=40)))
    assert crowded.core._requests.residency.num_preemptions > 0
    assert_close(crowded.scores("a"), expected)
    moved = Engine(tiny_model, chunk=16)
    moved.ask(scored("warm", replace(SAMPLING, prompt_logprobs=None)))
    moved.ask(scored("a", num_scored=40))
    assert_close(moved.scores("a"), expected[40:])
    assert moved.tokens("a") == alone.tokens("a")
