"""How `auto` reads a prompt to choose among several models, and which one it takes."""

import math
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Forbidden, InvalidRequest, Unavailable
from protos import inference_pb2 as pb
from router.config import RouterConfig
from router.models.media import ReadingContext
from router.models.model_runtimes import ModelRuntimes
from router.models.model_selector import ModelSelector, SelectedModel
from support.refusals import refusal_of
from support.served_models import TEXT, arrival_of, join, served, staffed
from support.sim_directories import write_sim_model, write_tokenizer


async def choose(config: RouterConfig, models: ModelRuntimes, **request: Any) -> SelectedModel:
    asked, arrival = pb.GenerateRequest(**request), arrival_of(config)
    context = ReadingContext("r", "", math.inf)
    return await ModelSelector(config, models).choose(asked, context, time.monotonic(), arrival)


def counted(choice: SelectedModel) -> list[str]:
    return [verdict.option.name for verdict in choice.verdicts if verdict.option.counted]


async def test_only_the_tokenizers_that_matter_read_the_prompt(
    byte_model: Path, word_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same 40 words are 230 tokens of the one and 40 of the other: a price a token says little of a prompt's."""
    cheap_token = {"path": byte_model, "input_price": 1, "output_price": 1}
    config, models = staffed([cheap_token, {"path": word_model, "input_price": 100, "output_price": 100}])
    choice = await choose(config, models, text=TEXT)
    assert (choice.model.name, counted(choice)) == ("bytes", ["bytes"])
    assert len(choice.reading.prompt) == 230

    # What costs twice as much a token costs a third: known once the first one has read it.
    config, models = staffed([cheap_token, {"path": word_model, "input_price": 2, "output_price": 1}])
    choice = await choose(config, models, text=TEXT)
    assert (choice.model.name, counted(choice)) == ("words", ["bytes", "words"])
    assert len(choice.reading.prompt) == 40
    assert "words" not in choice.reason.split(";")[1]
    assert "bytes (no cheaper)" in choice.reason

    # And what it took last time is remembered.
    for _ in range(40):
        choice = await choose(config, models, text=TEXT)
    assert counted(choice) == ["words"]

    monkeypatch.setattr("router.models.model_selector.MAX_COUNTED_MODELS", 1)
    config, models = staffed([cheap_token, {"path": word_model, "input_price": 2, "output_price": 1}])
    choice = await choose(config, models, text=TEXT)
    assert (choice.model.name, counted(choice)) == ("bytes", ["bytes"])
    assert "words (not looked at: 1 tokenizers have read the prompt, the limit)" in choice.reason


async def test_a_rule_by_length_counts_with_the_first_model(byte_model: Path, word_model: Path) -> None:
    rules = [{"name": "short", "max_prompt_tokens": 100, "models": ["bytes"]}, {"models": ["words"]}]
    entries = [{"path": byte_model}, {"path": word_model}]
    config, models = staffed(entries, model_rules=rules)
    short, long = await choose(config, models, text="word1"), await choose(config, models, text=TEXT)
    assert (short.model.name, long.model.name) == ("bytes", "words")
    assert "rule 'short'" in short.reason
    assert "rule '2'" in long.reason
    config, models = staffed(entries[::-1], model_rules=rules)
    assert (await choose(config, models, text=TEXT)).model.name == "bytes", "40 words"


async def test_what_no_model_can_serve_says_of_each_why(byte_model: Path, word_model: Path) -> None:
    config, models = staffed(
        [{"path": byte_model, "quality": 0.3}, {"path": word_model, "tasks": ["code"]}], num_blocks=40
    )
    with pytest.raises(InvalidRequest) as caught:
        await choose(config, models, text=TEXT, task="prose", min_quality=0.3, sampling=pb.Sampling(max_tokens=800))
    assert caught.value.field == "model"
    assert "bytes (sampling.max_tokens: prompt of 230 tokens + max_tokens of 800 exceed" in caught.value.message
    assert "words (it has quality 0, below the 0.3 asked)" in caught.value.message
    with refusal_of("sampling.max_tokens", match="need 60 KV blocks; the largest pool has 40"):
        await choose(config, models, text=TEXT, task="code", sampling=pb.Sampling(max_tokens=720))
    with pytest.raises(InvalidRequest) as caught:
        await choose(config, models, text=TEXT, sampling=pb.Sampling(temperature=-1))
    assert caught.value.message == "must be 0 to 100, not -1.0", "the request's own fault, said once"
    with refusal_of("token_ids", match="have different meanings in bytes, words"):
        await choose(config, models, token_ids=[1, 2])
    with refusal_of("messages", match="no chat template"):
        await choose(config, models, messages=[pb.ChatMessage(role="user", content="x")])
    with pytest.raises(InvalidRequest, match="exactly one of text"):
        await choose(config, models, text="x", token_ids=[1])


async def test_a_model_without_workers_is_not_taken(byte_model: Path, word_model: Path) -> None:
    config, models = served([{"path": byte_model}, {"path": word_model, "input_price": 1, "output_price": 1}])
    with pytest.raises(Unavailable, match=r"bytes \(no decode worker\); words \(no decode worker\)"):
        await choose(config, models, text=TEXT)
    join(models.named("words"))
    choice = await choose(config, models, text=TEXT)
    assert choice.model.name == "words"
    assert "passed over: bytes (no decode worker)" in choice.reason
    with pytest.raises(Unavailable, match="no decode worker of 'bytes' has joined"):
        await models.named("bytes").await_workers("t", time.monotonic())


async def test_a_busy_model_is_passed_over_for_one_that_is_in_time(byte_model: Path, word_model: Path) -> None:
    config, models = served(
        [{"path": byte_model}, {"path": word_model, "input_price": 1, "output_price": 1}],
        decode_prefill_tokens_per_s=1000,
        model_rules=[{"tenants": ["hasty"], "max_ttft_ms": 1000}],
    )
    join(models.named("bytes"), queued_tokens=5000)
    join(models.named("words"))
    assert (await choose(config, models, text=TEXT)).model.name == "bytes"
    for asked in ({"max_ttft_ms": 1000.0}, {"tenant": "hasty"}):
        choice = await choose(config, models, text=TEXT, **asked)
        assert choice.model.name == "words"
        assert "bytes (first token predicted in 5231 ms, the limit is 1000 ms)" in choice.reason


async def test_models_of_one_tokenizer_read_token_ids_alike_and_text_once(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = write_sim_model(tmp_path / "larger", 600, context=3000)
    write_tokenizer(larger, 600)
    monkeypatch.setattr("router.models.model_selector.MAX_COUNTED_MODELS", 1)
    config, models = staffed([{"path": byte_model, "quality": 0.1}, {"path": larger, "quality": 0.9}])
    assert (await choose(config, models, token_ids=[1, 2], min_quality=0.5)).model.name == "larger"
    choice = await choose(config, models, text="x" * 990, sampling=pb.Sampling(max_tokens=20))
    assert (choice.model.name, counted(choice)) == ("larger", ["bytes", "larger"])


async def test_a_key_is_served_by_its_models_only(byte_model: Path, word_model: Path) -> None:
    prices = {"input_price": 9.0, "output_price": 9.0}
    entries = [{"path": byte_model, "name": "cheap"}, {"path": word_model, "name": "dear"} | prices]
    rules = [{"name": "drafts", "tasks": ["draft"], "models": ["cheap"]}]
    config, models = staffed(entries, default_model="cheap", model_rules=rules)
    assert models.only(None) is models
    dear = models.only(["dear", "unknown"])
    assert [model.name for model in dear] == ["dear"]
    asked, why = dear.asked_for("")
    assert asked is models.named("dear")
    assert why == "the only one served", "the default is not this key's"
    assert (await choose(config, models, text=TEXT)).model.name == "cheap"
    assert (await choose(config, dear, text=TEXT)).model.name == "dear", "auto, too"
    with pytest.raises(Forbidden, match="allows none of the models"):
        await choose(config, dear, text=TEXT, task="draft")
    with pytest.raises(Forbidden):
        models.only(["unknown"]).asked_for("")
