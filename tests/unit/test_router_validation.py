"""Every limit of a request, with the field its error names."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import InvalidRequest
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.validation import check_names, check_prompt, check_time_limit, resolve_sampling
from support.refusals import refusal_of

CONTEXT, VOCAB = 100, 50


@pytest.fixture
def model_dir(tmp_path: Path) -> ModelDir:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return ModelDir.open(tmp_path)


def recommending(model_dir: ModelDir, **values: object) -> ModelDir:
    (model_dir.path / "generation_config.json").write_text(json.dumps(values))
    return ModelDir.open(model_dir.path)


def test_defaults_are_filled_in(model_dir: ModelDir) -> None:
    resolved = resolve_sampling(pb.Sampling(), 10, model_dir)
    assert (resolved.max_tokens, resolved.temperature, resolved.top_p, resolved.top_k) == (90, 1.0, 1.0, 0)
    assert resolved.HasField("seed")
    assert not resolved.HasField("logprobs")


def test_what_a_model_recommends_is_its_default(model_dir: ModelDir) -> None:
    wise = recommending(model_dir, temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.05, n=3)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n")
    resolved = resolve_sampling(pb.Sampling(), 10, wise)
    assert tuple(getattr(resolved, name) for name in names) == (0.6, 0.9, 20, 0.05, 1.05, 1)
    given = pb.Sampling(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
    resolved = resolve_sampling(given, 10, wise)
    assert tuple(getattr(resolved, name) for name in names) == (0, 1, 0, 0, 1, 1)


def test_what_no_request_could_ask_for_is_not_recommended(model_dir: ModelDir) -> None:
    strange = recommending(model_dir, temperature=-1, top_p=0.0, top_k=2.5, min_p="0.1", repetition_penalty=True)
    assert strange.sampling_defaults.keys() == {"temperature", "top_p", "top_k"}
    resolved = resolve_sampling(pb.Sampling(seed=0), 10, strange)
    assert resolved == resolve_sampling(pb.Sampling(seed=0), 10, model_dir)


def test_stop_strings_need_text(model_dir: ModelDir) -> None:
    (model_dir.path / "tokenizer.json").unlink()
    with refusal_of("sampling.stop", match="no tokenizer"):
        resolve_sampling(pb.Sampling(stop=["x"]), 10, model_dir)


def test_what_was_given_stays(model_dir: ModelDir) -> None:
    given = pb.Sampling(
        max_tokens=3, temperature=0, top_p=0.5, top_k=7, seed=0, stop=["x"], logprobs=0, repetition_penalty=1.1, n=1
    )
    assert resolve_sampling(given, 10, model_dir) == given


OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 91],
    "temperature": [-0.1, math.nan, math.inf, -math.inf, 1e9],
    "top_p": [0, 1.01, math.nan, math.inf],
    "top_k": [-1],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "n": [0, 65],
    "min_p": [-0.1, math.nan],
    "repetition_penalty": [0, math.nan],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "min_tokens": [-1, 91],
    "logit_bias": [{VOCAB: 1.0}, {1: 101.0}, {1: math.nan}, dict.fromkeys(range(1025), 1.0)],
    "stop": [["x"] * 17, [""], ["x" * 257]],
    "stop_token_ids": [[VOCAB]],
    "beam_width": [2],
    "length_penalty": [1.0],
    "early_stopping": [True],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in OUT_OF_RANGE for value in OUT_OF_RANGE[field]]
)
def test_out_of_range_names_the_field(model_dir: ModelDir, field: str, value: Any) -> None:
    with refusal_of(f"sampling.{field}"):
        resolve_sampling(pb.Sampling(**{field: value}), 10, model_dir)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [0, 2**32 - 1], [0] * CONTEXT])
def test_bad_prompts_name_their_field(model_dir: ModelDir, prompt: list[int]) -> None:
    with refusal_of("token_ids"):
        check_prompt(prompt, "token_ids", model_dir)


def test_the_last_position_may_be_used(model_dir: ModelDir) -> None:
    check_prompt([VOCAB - 1] * (CONTEXT - 1), "token_ids", model_dir)
    resolve_sampling(pb.Sampling(max_tokens=1), CONTEXT - 1, model_dir)


def test_a_max_tokens_beyond_the_context_is_lowered_where_a_setting_says_so(model_dir: ModelDir) -> None:
    asked = pb.Sampling(max_tokens=32_000, min_tokens=5, seed=1)
    lowered = resolve_sampling(asked, 10, model_dir, clamps=True)
    assert lowered == resolve_sampling(pb.Sampling(max_tokens=90, min_tokens=5, seed=1), 10, model_dir)
    assert resolve_sampling(pb.Sampling(max_tokens=7), 10, model_dir, clamps=True).max_tokens == 7
    for wrong in (pb.Sampling(max_tokens=0), pb.Sampling(max_tokens=32_000, min_tokens=91)):
        with pytest.raises(InvalidRequest):
            resolve_sampling(wrong, 10, model_dir, clamps=True)


@pytest.mark.parametrize("field", ["model", "tenant", "session_id", "prompt_cache_key", "request_id", "cache_salt"])
def test_names_have_a_limit(field: str) -> None:
    check_names(pb.GenerateRequest(**{field: "x" * 256}))
    with refusal_of(field):
        check_names(pb.GenerateRequest(**{field: "x" * 257}))


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_that_is_none(limit: float) -> None:
    with refusal_of("max_ttft_ms"):
        check_time_limit(pb.GenerateRequest(max_ttft_ms=limit))
