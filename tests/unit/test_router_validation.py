"""Every limit of a request, with the field its error names."""

import json
import math
from pathlib import Path

import pytest

from cluster.errors import InvalidRequest
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.validation import check_names, check_prompt, resolve_sampling

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
    with pytest.raises(InvalidRequest, match="no tokenizer") as caught:
        resolve_sampling(pb.Sampling(stop=["x"]), 10, model_dir)
    assert caught.value.field == "sampling.stop"


def test_what_was_given_stays(model_dir: ModelDir) -> None:
    given = pb.Sampling(
        max_tokens=3, temperature=0, top_p=0.5, top_k=7, seed=0, stop=["x"], logprobs=0, repetition_penalty=1.1, n=1
    )
    assert resolve_sampling(given, 10, model_dir) == given


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("max_tokens", pb.Sampling(max_tokens=0)),
        ("max_tokens", pb.Sampling(max_tokens=-1)),
        ("max_tokens", pb.Sampling(max_tokens=91)),
        ("temperature", pb.Sampling(temperature=-0.1)),
        ("temperature", pb.Sampling(temperature=math.nan)),
        ("temperature", pb.Sampling(temperature=math.inf)),
        ("top_p", pb.Sampling(top_p=0)),
        ("top_p", pb.Sampling(top_p=1.01)),
        ("top_p", pb.Sampling(top_p=math.nan)),
        ("top_k", pb.Sampling(top_k=-1)),
        ("logprobs", pb.Sampling(logprobs=-1)),
        ("logprobs", pb.Sampling(logprobs=21)),
        ("min_p", pb.Sampling(min_p=-0.1)),
        ("min_p", pb.Sampling(min_p=math.nan)),
        ("repetition_penalty", pb.Sampling(repetition_penalty=0)),
        ("repetition_penalty", pb.Sampling(repetition_penalty=math.nan)),
        ("presence_penalty", pb.Sampling(presence_penalty=2.1)),
        ("frequency_penalty", pb.Sampling(frequency_penalty=-2.1)),
        ("min_tokens", pb.Sampling(min_tokens=-1)),
        ("min_tokens", pb.Sampling(max_tokens=3, min_tokens=4)),
        ("logit_bias", pb.Sampling(logit_bias={VOCAB: 1.0})),
        ("logit_bias", pb.Sampling(logit_bias={1: 101.0})),
        ("logit_bias", pb.Sampling(logit_bias={1: math.nan})),
        ("logit_bias", pb.Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))),
        ("stop", pb.Sampling(stop=["x"] * 17)),
        ("stop", pb.Sampling(stop=[""])),
        ("stop", pb.Sampling(stop=["x" * 257])),
        ("stop_token_ids", pb.Sampling(stop_token_ids=[VOCAB])),
        ("beam_width", pb.Sampling(beam_width=2)),
        ("length_penalty", pb.Sampling(length_penalty=1.0)),
        ("early_stopping", pb.Sampling(early_stopping=True)),
    ],
)
def test_out_of_range_names_the_field(model_dir: ModelDir, field: str, sampling: pb.Sampling) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_sampling(sampling, 10, model_dir)
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize("prompt", [[], [VOCAB], [0, 2**32 - 1], [0] * CONTEXT])
def test_bad_prompts_name_their_field(model_dir: ModelDir, prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_prompt(prompt, "token_ids", model_dir)
    assert caught.value.field == "token_ids"


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
    with pytest.raises(InvalidRequest) as caught:
        check_names(pb.GenerateRequest(**{field: "x" * 257}))
    assert caught.value.field == field
