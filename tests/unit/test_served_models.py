"""Several models of one router: which one a request, a worker or a key means."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Forbidden, Incompatible, InvalidRequest, Overloaded, StartError, UnknownModel
from kvcache.block_keys import block_keys, root_key
from protos import inference_pb2 as pb
from protos import membership_pb2
from router.admission.request import RequestInfo
from router.config import RouterConfig
from router.models.config import Costs, ModelEntry
from router.models.model_files import read_models
from router.placement.demand import Demand
from router.request_path.preprocess import Preprocessor
from router.security.api_keys import Principal
from support.refusals import refusal_of
from support.served_models import TEXT, arrival_of, hello_of, join, served, staffed
from support.sim_directories import write_sim_model, write_tokenizer

# ------------------------------------------------------------------ what is configured


def test_one_model_or_several(byte_model: Path) -> None:
    for values in ({}, {"model": byte_model, "models": [{"path": byte_model}]}):
        with refusal_of("model", StartError, match="set either model, for one, or models, for several"):
            RouterConfig.parse(values)
    (only,) = read_models(RouterConfig(model=byte_model))
    assert only.name == "bytes"


@pytest.mark.parametrize(
    ("entries", "config", "field", "reason"),
    [
        ([{}, {"name": "bytes"}], {}, "models.1.name", "have the same name, 'bytes'"),
        ([{}, {"copy": True}], {}, "models.1.name", "have the same name, 'bytes'"),
        ([{}, {"copy": True, "name": "other"}], {}, "models.1.name", "have equal configs and names"),
        ([{"name": "auto"}], {}, "models.0.name", "is reserved: clients send it"),
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
    assert (named.name, why) == ("large", "named by the request")
    assert models.asked_for("auto") == (None, "auto")
    with refusal_of("model", UnknownModel, match="'words' is not served here; 'bytes', 'large' are"):
        models.asked_for("words")
    with pytest.raises(InvalidRequest, match="several models are served: name one of 'bytes', 'large', or 'auto'"):
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
    with pytest.raises(Incompatible, match=r"match 'bytes' and 'tuned', but its name matches neither"):
        models.of_worker(hello_of(of_bytes, model="another"))
    unknown = r"'x', whose name and config or tokenizer differ from those of all served here: 'bytes', 'words', 'tuned'"
    with pytest.raises(Incompatible, match=unknown):
        models.of_worker(hello_of(of_bytes, model="x", config_fingerprint=b"other"))
    _, models = served([{"path": byte_model}])
    with pytest.raises(Incompatible, match="differ from this router's 'bytes'; a revision of one needs its name"):
        models.of_worker(hello_of(of_words))


# ------------------------------------------------------------------ tenants, over all models


def block_demand(num_blocks: int) -> Demand:
    return Demand(num_tokens=4, num_usable_blocks=0, num_total_blocks=num_blocks, block_tokens=16, block_bytes=1000)


async def test_what_a_tenant_may_run_counts_over_all_models(byte_model: Path, word_model: Path) -> None:
    """And its next one starts in the moment in which it may, whichever model it waits for."""
    tenants = {"single": {"max_running": 1}}
    _, models = staffed([{"path": byte_model}, {"path": word_model}], tenants=tenants)
    of_bytes, of_words = models
    placed, _ = await of_bytes.dispatcher.place(RequestInfo("single", 0, 0.0), block_demand(1), [])
    waits = asyncio.ensure_future(of_words.dispatcher.place(RequestInfo("single", 0, 0.0), block_demand(1), []))
    other, _ = await of_words.dispatcher.place(RequestInfo("other", 0, 0.0), block_demand(1), [])
    await asyncio.sleep(0)
    assert of_words.dispatcher.num_waiting == 1
    of_bytes.dispatcher.ended(placed)
    assert of_words.dispatcher.num_waiting == 0
    for ends in ((await waits)[0], other):
        of_words.dispatcher.ended(ends)


async def test_lines_are_of_one_model_each(byte_model: Path, word_model: Path) -> None:
    """What waits for one takes no place in the line of the other."""
    _, models = staffed([{"path": byte_model}, {"path": word_model}], max_queued=1, num_blocks=10)
    held = [(await model.dispatcher.place(RequestInfo("", 0, 0.0), block_demand(10), []))[0] for model in models]
    line = [
        asyncio.ensure_future(model.dispatcher.place(RequestInfo("", 0, 0.0), block_demand(10), [])) for model in models
    ]
    await asyncio.sleep(0)
    assert [model.dispatcher.num_waiting for model in models] == [1, 1]
    for model, placed in zip(models, held, strict=True):
        with pytest.raises(Overloaded, match="1 requests wait already"):
            await model.dispatcher.place(RequestInfo("", 0, 0.0), block_demand(10), [])
        model.dispatcher.ended(placed)
    for model, waited in zip(models, line, strict=True):
        model.dispatcher.ended((await waited)[0])


def test_costs_are_counted_by_model() -> None:
    costs = Costs(ModelEntry(path=Path("m"), input_price=2, output_price=10))
    costs.used(1000, 100)
    costs.used(500, 3)
    assert costs.num_requests == 2
    assert (costs.input_tokens, costs.output_tokens) == (1500, 103)
    assert (costs.input_price, costs.output_price) == pytest.approx((2e-6, 10e-6))
    free = Costs(ModelEntry(path=Path("m")))
    free.used(1000, 100)
    assert (free.prices, free.input_price, free.output_tokens) == (None, 0.0, 100)


# ------------------------------------------------------------------ workers and keys


async def test_who_waits_for_a_first_worker_hears_of_it_at_once(byte_model: Path) -> None:
    _, models = served([{"path": byte_model}])
    (model,) = models
    waits = [asyncio.ensure_future(model.await_workers("t", time.monotonic() + 60)) for _ in range(3)]
    model.on_worker_report()
    await asyncio.sleep(0)
    assert not any(each.done() for each in waits)
    join(model)
    model.on_worker_report()
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
    assert (decision.decode_id, decision.hit_blocks) == ("d1", 5)

    lent = replace(decision, lender_id="p0", lender_computes=True)
    model.fleet.placed(lent, demand, keys)
    model.fleet.left(model.fleet.workers[0])
    demand, keys = model.needs(prompt, pb.Sampling(max_tokens=10, n=1), "salt", [prompt], False)
    assert not demand.other_keys, "the old version is gone"
    assert model.fleet.hits(keys).due.tolist() == [5, 6], "and what is being computed of the new one is known"


async def test_what_a_key_may_not_use_it_cannot_find_either(byte_model: Path, word_model: Path) -> None:
    config, models = served([{"path": byte_model, "name": "cheap"}, {"path": word_model, "name": "dear"}])
    intake, principal = Preprocessor(config, models), Principal("k", "t", frozenset({"cheap"}))
    said = []
    for name in ("dear", "no such"):
        with pytest.raises(Forbidden) as refused:
            await intake.check(pb.GenerateRequest(text=TEXT, model=name), None, principal, arrival_of(config, "t"))
        said.append(str(refused.value).replace(name, "?"))
    assert said[0] == said[1]
    request = pb.GenerateRequest(text=TEXT, model="cheap")
    prepared = await intake.check(request, None, principal, arrival_of(config, "t"))
    assert (prepared.request.tenant, prepared.info.tenant, prepared.cache_salt) == ("t", "t", "")
