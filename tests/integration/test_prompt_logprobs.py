"""Log probabilities of prompt tokens, against transformers, in whatever chunks the prompt is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.backends.torch.sampling import scoring
from engine.core_types import SamplingParams, StepBudget, TokenLogprobs
from engine.messages.from_engine import PromptScored, Token
from engine.messages.to_engine import Generate
from support.checked_core import of_kinds
from support.torch_engine import TorchEngine, ids, request
from support.torch_models import random_prompts, runner_of

(PROMPT,) = random_prompts(70, seed=4)
TOP = 3
SAMPLING = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=TOP)


def engine_of(path: Path, chunk: int, dtype: str = "float32", **options: Any) -> TorchEngine:
    return TorchEngine(runner_of(path, dtype, **options), StepBudget(2 * chunk, chunk))


def scores(engine: TorchEngine, request_id: str) -> list[TokenLogprobs]:
    """Of the last that it was asked."""
    given = of_kinds(engine.said, PromptScored)
    return [logprobs for message in given if message.request_id == request_id for logprobs in message.logprobs]


def scored(request_id: str, sampling: SamplingParams = SAMPLING, **fields: Any) -> Generate:
    return request(request_id, PROMPT, sampling, **fields)


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
    engine = engine_of(path, chunk=16)
    said = engine.ask(scored("a"), scored("plain", SAMPLING._replace(prompt_logprobs=None)))
    assert_close(scores(engine, "a"), expected)
    assert scores(engine, "plain") == []
    assert ids(said["a", 0]) == ids(said["plain", 0])
    first_token = next(i for i, m in enumerate(engine.said) if isinstance(m, Token) and m.request_id == "a")
    assert of_kinds(engine.said[first_token:], PromptScored) == []


@pytest.mark.parametrize("backend", ["sdpa", "native"])
def test_no_chunk_size_changes_them_and_nothing_cached_is_used(
    tiny_model: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine_of(tiny_model, chunk=200, backend=backend)
    whole.ask(scored("a"))
    expected = scores(whole, "a")
    assert len(expected) == len(PROMPT) - 1
    whole.ask(scored("again"))
    assert_close(scores(whole, "again"), expected)
    monkeypatch.setattr(scoring, "SLICE_LOGITS", 5 * 500)
    for chunk in (1, 7, 16):
        engine = engine_of(tiny_model, chunk=chunk, backend=backend)
        engine.ask(scored("a"), scored("b"))
        assert_close(scores(engine, "a"), expected)
        assert_close(scores(engine, "b"), expected)


def test_the_kernels_give_the_same_to_the_bit(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model("qwen2", dtype="bfloat16")
    whole = engine_of(path, 200, "bfloat16", backend="native")
    whole.ask(scored("a"))
    expected = scores(whole, "a")
    for chunk, rows in ((1, 9), (7, 2), (16, 100)):
        monkeypatch.setattr(scoring, "SLICE_LOGITS", rows * 500)
        engine = engine_of(path, chunk, "bfloat16", backend="native")
        engine.ask(scored("a"))
        assert scores(engine, "a") == expected


def test_a_preempted_or_moved_request_gives_each_once(tiny_model: Path) -> None:
    alone = engine_of(tiny_model, chunk=16)
    said = alone.ask(scored("a"))
    expected = scores(alone, "a")
    crowded = engine_of(tiny_model, chunk=16, num_blocks=9)
    other = SamplingParams(max_tokens=100, temperature=0)
    crowded.send(request("old", (1, 2, 3), other))
    for _ in range(20):
        crowded.step()
    crowded.ask(scored("a", SAMPLING._replace(max_tokens=40)))
    assert crowded.num_preemptions > 0
    assert_close(scores(crowded, "a"), expected)
    moved = engine_of(tiny_model, chunk=16)
    moved.ask(scored("warm", SAMPLING._replace(prompt_logprobs=None)))
    said_moved = moved.ask(scored("a", num_scored=40))
    assert_close(scores(moved, "a"), expected[40:])
    assert ids(said_moved["a", 0]) == ids(said["a", 0])
