"""Several models of one router: which one a request or a worker means, and how `auto` reads a prompt."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from cluster.errors import Forbidden, Incompatible, InvalidRequest, Overloaded, StartError, Unavailable, UnknownModel
from engine.keys import block_keys, root_key
from protos import inference_pb2 as pb
from protos import membership_pb2
from router.admission.request import Claim
from router.config import RouterConfig
from router.intake import Intake
from router.models.chooser import Chosen, ModelChooser
from router.models.config import ModelEntry
from router.models.costs import Costs
from router.models.served_model import ServedModel, ServedModels, read_models
from router.placement.demand import Demand
from router.runtime import serve_models
from router.security.api_keys import Principal
from router.tenant_gate import TenantGate
from support.sim_directories import write_sim_model, write_tokenizer

WORDS = [f"word{number}" for number in range(300)]
TEXT = " ".join(WORDS[:40])


def write_word_tokenizer(path: Path) -> None:
    """A token a word, where that of the support package has one a byte."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))


@pytest.fixture
def byte_model(tmp_path: Path) -> Path:
    path = write_sim_model(tmp_path / "bytes", 600, context=1000)
    write_tokenizer(path, 600)
    return path


@pytest.fixture
def word_model(tmp_path: Path) -> Path:
    path = write_sim_model(tmp_path / "words", 400, context=2000)
    write_word_tokenizer(path)
    return path


def served(entries: Sequence[dict[str, Any]], **config: Any) -> tuple[RouterConfig, ServedModels]:
    parsed = RouterConfig.parse({"models": entries, **config})
    return parsed, serve_models(parsed, read_models(parsed), TenantGate(parsed), b"incarnation")


def hello_of(served_model: ServedModel, worker_id: str = "d0", **fields: Any) -> membership_pb2.Hello:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "role": membership_pb2.ROLE_DECODE,
        "model": served_model.model_dir.name,
        "model_fingerprint": b"weights",
        "config_fingerprint": served_model.config_fingerprint,
        "block_tokens": 16,
        "block_bytes": 1000,
        "num_blocks": 100,
    }
    return membership_pb2.Hello(**(values | fields))


def join(model: ServedModel, num_blocks: int = 100, queued_tokens: int = 0) -> None:
    worker = model.fleet.joined(hello_of(model, f"{model.name}-d", num_blocks=num_blocks))
    load = membership_pb2.LoadReport(
        available_blocks=num_blocks, num_blocks=num_blocks, queued_prefill_tokens=queued_tokens
    )
    model.fleet.reported(worker, load)


async def choose(config: RouterConfig, models: ServedModels, **request: Any) -> Chosen:
    return await ModelChooser(config, models).choose(pb.GenerateRequest(**request), "", time.monotonic())


def counted(choice: Chosen) -> list[str]:
    return [verdict.option.name for verdict in choice.verdicts if verdict.option.counted]


# ------------------------------------------------------------------ what is configured


def test_one_model_or_several(byte_model: Path) -> None:
    for values in ({}, {"model": byte_model, "models": [{"path": byte_model}]}):
        with pytest.raises(StartError, match="set either model, for one, or models, for several") as caught:
            RouterConfig.parse(values)
        assert caught.value.field == "model"
    (only,) = read_models(RouterConfig(model=byte_model))
    assert only.name == "bytes"


@pytest.mark.parametrize(
    ("entries", "config", "field", "reason"),
    [
        ([{}, {"name": "bytes"}], {}, "models.1.name", "both be called 'bytes'"),
        ([{}, {"copy": True}], {}, "models.1.name", "both be called 'bytes'"),
        ([{}, {"copy": True, "name": "other"}], {}, "models.1.name", "nobody could say which"),
        ([{"name": "auto"}], {}, "models.0.name", "to have their model chosen"),
        ([{}], {"default_model": "x"}, "default_model", "'x' is not among bytes, auto"),
        ([{}], {"model_rules": [{}, {"models": ["bytes", "x"]}]}, "model_rules.1.models", "'x' is not among bytes"),
        ([{"input_price": 1}], {}, "models.0", "set together or not at all"),
        ([{"quality": 1.5}], {}, "models.0.quality", "less than or equal to 1"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(
    byte_model: Path, tmp_path: Path, entries: list[dict[str, Any]], config: dict[str, Any], field: str, reason: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    copy = write_sim_model(tmp_path / "elsewhere" / "bytes", 600, context=1000)
    write_tokenizer(copy, 600)
    paths = [{"path": copy if entry.get("copy") else byte_model} for entry in entries]
    cleaned = [
        path | {key: value for key, value in entry.items() if key != "copy"}
        for path, entry in zip(paths, entries, strict=True)
    ]
    with pytest.raises(StartError) as caught:
        read_models(RouterConfig.parse({"models": cleaned, **config}))
    assert caught.value.field == field
    assert reason in caught.value.reason
    if "both" in reason:
        assert str(paths[0]["path"]) in caught.value.reason
        assert str(paths[1]["path"]) in caught.value.reason


# ------------------------------------------------------------------ who is meant


def test_the_model_that_a_request_means(byte_model: Path, word_model: Path) -> None:
    _, models = served([{"path": byte_model}, {"path": word_model, "name": "large"}])
    named, why = models.asked_for("large")
    assert named is not None
    assert (named.name, why) == ("large", "named by the request")
    assert models.asked_for("auto") == (None, "auto")
    with pytest.raises(UnknownModel, match="'words' is not served here; 'bytes', 'large' are") as caught:
        models.asked_for("words")
    assert caught.value.field == "model"
    with pytest.raises(InvalidRequest, match="several are served: 'bytes', 'large'; or say 'auto'"):
        models.asked_for("")
    for default, expected in (("large", "large"), ("auto", None)):
        _, models = served([{"path": byte_model}, {"path": word_model, "name": "large"}], default_model=default)
        found, why = models.asked_for("")
        assert (found and found.name, why) == (expected, f"none was named, and {default} is the default")


def test_a_worker_joins_the_model_whose_config_it_has(byte_model: Path, word_model: Path, tmp_path: Path) -> None:
    twin = write_sim_model(tmp_path / "twin", 600, context=1000)
    write_tokenizer(twin, 600)
    _, models = served([{"path": byte_model}, {"path": word_model}, {"path": twin, "name": "tuned"}])
    of_bytes, of_words, tuned = models
    assert models.of_worker(hello_of(of_words, model="any name")) is of_words
    assert models.of_worker(hello_of(of_bytes)) is of_bytes
    assert models.of_worker(hello_of(tuned)) is tuned, "by its directory's name"
    assert models.of_worker(hello_of(tuned, model="tuned")) is tuned
    with pytest.raises(Incompatible, match=r"those of 'bytes' and 'tuned', but its name is neither's"):
        models.of_worker(hello_of(of_bytes, model="another"))
    unknown = r"serves 'x', whose config or tokenizer differs from those of all served here: 'bytes', 'words', 'tuned'"
    with pytest.raises(Incompatible, match=unknown):
        models.of_worker(hello_of(of_bytes, model="x", config_fingerprint=b"other"))
    _, models = served([{"path": byte_model}])
    with pytest.raises(Incompatible, match="differs from this router's 'bytes'"):
        models.of_worker(hello_of(of_words))


# ------------------------------------------------------------------ tenants, over all models


def block_demand(num_blocks: int) -> Demand:
    return Demand(num_tokens=4, num_usable_blocks=0, num_total_blocks=num_blocks, block_tokens=16, block_bytes=1000)


async def test_what_a_tenant_may_run_counts_over_all_models(byte_model: Path, word_model: Path) -> None:
    """And its next one starts in the moment in which it may, whichever model it waits for."""
    tenants = {"single": {"max_running": 1}}
    _, models = served([{"path": byte_model}, {"path": word_model}], tenants=tenants)
    for model in models:
        join(model)
    of_bytes, of_words = models
    placed, _ = await of_bytes.dispatcher.place(Claim("single", 0, 0.0), block_demand(1), [])
    waits = asyncio.ensure_future(of_words.dispatcher.place(Claim("single", 0, 0.0), block_demand(1), []))
    other, _ = await of_words.dispatcher.place(Claim("other", 0, 0.0), block_demand(1), [])
    await asyncio.sleep(0)
    assert of_words.dispatcher.num_waiting == 1
    of_bytes.dispatcher.ended(placed)
    assert of_words.dispatcher.num_waiting == 0
    for ends in ((await waits)[0], other):
        of_words.dispatcher.ended(ends)


async def test_lines_are_of_one_model_each(byte_model: Path, word_model: Path) -> None:
    """What waits for one takes no place in the line of the other."""
    _, models = served([{"path": byte_model}, {"path": word_model}], max_queued=1)
    for model in models:
        join(model, num_blocks=10)
    held = [(await model.dispatcher.place(Claim("", 0, 0.0), block_demand(10), []))[0] for model in models]
    line = [asyncio.ensure_future(model.dispatcher.place(Claim("", 0, 0.0), block_demand(10), [])) for model in models]
    await asyncio.sleep(0)
    assert [model.dispatcher.num_waiting for model in models] == [1, 1]
    for model, placed in zip(models, held, strict=True):
        with pytest.raises(Overloaded, match="1 requests wait already"):
            await model.dispatcher.place(Claim("", 0, 0.0), block_demand(10), [])
        model.dispatcher.ended(placed)
    for model, waited in zip(models, line, strict=True):
        model.dispatcher.ended((await waited)[0])


def test_costs_are_counted_by_model() -> None:
    costs = Costs(ModelEntry(path=Path("m"), input_price=2, output_price=10))
    costs.used(1000, 100, finished=True, auto=True)
    costs.used(500, 3, finished=False, auto=False)
    assert (costs.num_requests, costs.num_unfinished, costs.num_auto) == (2, 1, 1)
    assert (costs.input_tokens, costs.output_tokens) == (1500, 103)
    assert costs.price == pytest.approx((1500 * 2 + 103 * 10) / 1e6)
    free = Costs(ModelEntry(path=Path("m")))
    free.used(1000, 100, finished=True, auto=False)
    assert (free.prices, free.price, free.output_tokens) == (None, 0.0, 100)


# ------------------------------------------------------------------ auto


async def test_only_the_tokenizers_that_matter_read_the_prompt(byte_model: Path, word_model: Path) -> None:
    """The same 40 words are 230 tokens of the one and 40 of the other: a price a token says little of a prompt's."""
    cheap_token = {"path": byte_model, "input_price": 1, "output_price": 1}
    config, models = served([cheap_token, {"path": word_model, "input_price": 100, "output_price": 100}])
    for model in models:
        join(model)
    choice = await choose(config, models, text=TEXT)
    assert (choice.model.name, counted(choice)) == ("bytes", ["bytes"])
    assert len(choice.reading.prompt) == 230

    # What costs twice as much a token costs a third: known once the first one has read it.
    config, models = served([cheap_token, {"path": word_model, "input_price": 2, "output_price": 1}])
    for model in models:
        join(model)
    choice = await choose(config, models, text=TEXT)
    assert (choice.model.name, counted(choice)) == ("words", ["bytes", "words"])
    assert len(choice.reading.prompt) == 40
    assert "words" not in choice.reason.split(";")[1]
    assert "bytes (no cheaper)" in choice.reason

    # And what it took last time is remembered.
    for _ in range(40):
        choice = await choose(config, models, text=TEXT)
    assert counted(choice) == ["words"]

    config, models = served(
        [cheap_token, {"path": word_model, "input_price": 2, "output_price": 1}], max_counted_models=1
    )
    for model in models:
        join(model)
    choice = await choose(config, models, text=TEXT)
    assert (choice.model.name, counted(choice)) == ("bytes", ["bytes"])
    assert "words (not looked at: 1 tokenizers have read the prompt, the limit)" in choice.reason


async def test_a_rule_by_length_counts_with_the_first_model(byte_model: Path, word_model: Path) -> None:
    rules = [{"name": "short", "max_prompt_tokens": 100, "models": ["bytes"]}, {"models": ["words"]}]
    entries = [{"path": byte_model}, {"path": word_model}]
    config, models = served(entries, model_rules=rules)
    for model in models:
        join(model)
    short, long = await choose(config, models, text="word1"), await choose(config, models, text=TEXT)
    assert (short.model.name, long.model.name) == ("bytes", "words")
    assert "rule 'short'" in short.reason
    assert "rule '2'" in long.reason
    config, models = served(entries[::-1], model_rules=rules)
    for model in models:
        join(model)
    assert (await choose(config, models, text=TEXT)).model.name == "bytes", "40 words"


async def test_what_no_model_can_serve_says_of_each_why(byte_model: Path, word_model: Path) -> None:
    config, models = served([{"path": byte_model, "quality": 0.3}, {"path": word_model, "tasks": ["code"]}])
    for model in models:
        join(model, num_blocks=40)
    with pytest.raises(InvalidRequest) as caught:
        await choose(config, models, text=TEXT, task="prose", min_quality=0.3, sampling=pb.Sampling(max_tokens=800))
    assert caught.value.field == "model"
    assert "bytes (sampling.max_tokens: prompt of 230 tokens + max_tokens of 800 exceed" in caught.value.message
    assert "words (it has quality 0, below the 0.3 asked)" in caught.value.message
    with pytest.raises(InvalidRequest, match="need 60 KV blocks; the largest pool has 40") as caught:
        await choose(config, models, text=TEXT, task="code", sampling=pb.Sampling(max_tokens=720))
    assert caught.value.field == "sampling.max_tokens", "for both, each in its own words"
    with pytest.raises(InvalidRequest) as caught:
        await choose(config, models, text=TEXT, sampling=pb.Sampling(temperature=-1))
    assert caught.value.message == "must be 0 to 100, not -1.0", "the request's own fault, said once"
    with pytest.raises(InvalidRequest, match="mean different things to bytes, words") as caught:
        await choose(config, models, token_ids=[1, 2])
    assert caught.value.field == "token_ids"
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        await choose(config, models, messages=[pb.ChatMessage(role="user", content="x")])
    assert caught.value.field == "messages"
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
        await models.named("bytes").await_decode_workers(time.monotonic())


async def test_who_waits_for_a_first_worker_hears_of_it_at_once(byte_model: Path) -> None:
    _, models = served([{"path": byte_model}])
    (model,) = models
    waits = [asyncio.ensure_future(model.await_decode_workers(time.monotonic() + 60)) for _ in range(3)]
    model.heard()
    await asyncio.sleep(0)
    assert not any(each.done() for each in waits)
    join(model)
    model.heard()
    await asyncio.gather(*waits)


async def test_what_was_right_when_it_came_waits_for_a_pool_of_its_size(byte_model: Path) -> None:
    """It streams, and the worker that could hold it is gone: the request is not at fault."""
    _, models = served([{"path": byte_model}])
    (model,) = models
    join(model, num_blocks=4)
    prompt, sampling = list(range(100)), pb.Sampling(max_tokens=10, n=1)
    with pytest.raises(InvalidRequest, match="the largest pool has 4"):
        model.needs(prompt, sampling, "", [prompt], False)
    demand, _ = model.needs(prompt, sampling, "", [[*prompt, 7]], False, new=False)
    assert demand.num_total_blocks == 7


async def test_while_workers_are_replaced_the_caches_of_both_versions_are_known(byte_model: Path) -> None:
    _, models = served([{"path": byte_model}])
    (model,) = models
    prompt = list(range(100))
    for name, version, num_held in (("d0", b"old", 2), ("d1", b"new", 5), ("p0", b"new", 3)):
        role = membership_pb2.ROLE_PREFILL if name == "p0" else membership_pb2.ROLE_DECODE
        worker = model.fleet.joined(hello_of(model, name, model_fingerprint=version, role=role))
        model.fleet.reported(worker, membership_pb2.LoadReport(available_blocks=100, num_blocks=100))
        held = b"".join(block_keys(root_key(version, "salt"), prompt, 16)[:num_held])
        events = [membership_pb2.CacheEvent(stored=held)]
        model.fleet.cache_changed(worker, membership_pb2.CacheEvents(snapshot=True, events=events))
    demand, keys = model.needs(prompt, pb.Sampling(max_tokens=10, n=1), "salt", [prompt], False)
    assert model.fleet.hits(keys, demand.other_keys).held.tolist() == [2, 5, 3]
    decision = model.fleet.decide(demand, keys)
    assert decision is not None
    assert (decision.decode_id, decision.hit_blocks) == ("d1", 5)

    lent = replace(decision, lender_id="p0", lender_computes=True)
    model.fleet.placed(lent, demand, keys)
    model.fleet.left(model.fleet.workers[0])
    demand, keys = model.needs(prompt, pb.Sampling(max_tokens=10, n=1), "salt", [prompt], False)
    assert not demand.other_keys, "the old version is gone"
    assert model.fleet.hits(keys).due.tolist() == [5, 6], "and what is being computed of the new one is known"


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


async def test_models_of_one_tokenizer_read_token_ids_alike_and_text_once(byte_model: Path, tmp_path: Path) -> None:
    larger = write_sim_model(tmp_path / "larger", 600, context=3000)
    write_tokenizer(larger, 600)
    config, models = served(
        [{"path": byte_model, "quality": 0.1}, {"path": larger, "quality": 0.9}], max_counted_models=1
    )
    for model in models:
        join(model)
    assert (await choose(config, models, token_ids=[1, 2], min_quality=0.5)).model.name == "larger"
    choice = await choose(config, models, text="x" * 990, sampling=pb.Sampling(max_tokens=20))
    assert (choice.model.name, counted(choice)) == ("larger", ["bytes", "larger"])


async def test_a_key_is_served_by_its_models_only(byte_model: Path, word_model: Path) -> None:
    prices = {"input_price": 9.0, "output_price": 9.0}
    entries = [{"path": byte_model, "name": "cheap"}, {"path": word_model, "name": "dear"} | prices]
    rules = [{"name": "drafts", "tasks": ["draft"], "models": ["cheap"]}]
    config, models = served(entries, default_model="cheap", model_rules=rules)
    for model in models:
        join(model)
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


async def test_what_a_key_may_not_use_it_cannot_find_either(byte_model: Path, word_model: Path) -> None:
    config, models = served([{"path": byte_model, "name": "cheap"}, {"path": word_model, "name": "dear"}])
    intake, principal = Intake(config, models), Principal("k", "t", frozenset({"cheap"}))
    said = []
    for name in ("dear", "no such"):
        with pytest.raises(Forbidden) as refused:
            await intake.check(pb.GenerateRequest(text=TEXT, model=name), None, principal)
        said.append(str(refused.value).replace(name, "?"))
    assert said[0] == said[1]
    ticket = await intake.check(pb.GenerateRequest(text=TEXT, model="cheap"), None, principal)
    assert (ticket.request.tenant, ticket.claim.tenant, ticket.cache_salt) == ("t", "t", "")
