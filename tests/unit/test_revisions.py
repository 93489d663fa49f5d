"""Revisions of a model under one name: which files and which workers a request gets, and what a stream keeps."""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Incompatible, InvalidRequest, RevisionGone, Unavailable
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from protos import membership_pb2
from router.admission.request import RequestInfo
from router.models.model_runtime import MAX_REVISIONS, ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.placement.demand import Demand
from router.placement.fleet.worker_records import WorkerRecord
from router.request_path.preprocess import Preprocessor
from router.request_path.stream_state import StreamState
from router.security.api_keys import Principal
from support.served_models import arrival_of, hello_of, served
from support.sim_directories import write_sim_model, write_tokenizer
from worker.runtime import file_parts

OLD, NEW = b"o" * 16, b"n" * 16
ANYBODY = Principal("", None)
LOAD = membership_pb2.LoadReport(available_blocks=100, num_blocks=100)


def join(model: ModelRuntime, worker_id: str, revision: bytes, **fields: Any) -> WorkerRecord:
    worker = model.fleet.joined(hello_of(model, worker_id, revision=revision, **fields))
    model.fleet.reported(worker, LOAD)
    model.on_worker_report()
    return worker


async def messages_of(path: Path, **changes: Any) -> AsyncIterator[membership_pb2.WorkerMessage]:
    async for part in file_parts(ModelDir.open(path)):
        for name, value in changes.items():
            setattr(part, name, value)
        yield membership_pb2.WorkerMessage(file=part)


async def learn(model: ModelRuntime, path: Path) -> bytes:
    """Have a worker send the files of a directory; return their fingerprint."""
    fingerprint = ModelDir.open(path).config_fingerprint()
    await model.receive(membership_pb2.Hello(worker_id="w", config_fingerprint=fingerprint), messages_of(path))
    return fingerprint


def one_model(path: Path) -> tuple[ModelRuntimes, ModelRuntime]:
    _, models = served([{"path": path}])
    return models, next(iter(models))


@pytest.fixture
def larger(tmp_path: Path) -> Path:
    """Another revision of `bytes`, with a larger vocabulary."""
    path = write_sim_model(tmp_path / "larger", 700, context=2000)
    write_tokenizer(path, 700)
    return path


# ------------------------------------------------------------------ files that workers bring


async def test_a_worker_with_the_name_and_other_files_joins_and_brings_them(byte_model: Path, larger: Path) -> None:
    models, model = one_model(byte_model)
    hello = hello_of(model, revision=NEW, config_fingerprint=ModelDir.open(larger).config_fingerprint())
    assert models.of_worker(hello) is model
    assert not model.knows(hello.config_fingerprint)
    fingerprint = await learn(model, larger)
    assert model.knows(fingerprint)
    bound = model.bound(fingerprint)
    assert (bound.name, bound.model_dir.vocab_size, bound.model_dir.max_context_tokens) == ("bytes", 700, 2000)
    assert model.model_dir.vocab_size == 600, "those of the router stay"
    with pytest.raises(Incompatible, match="differ from this router's"):
        models.of_worker(hello_of(model, model="other", revision=NEW, config_fingerprint=b"?"))
    with pytest.raises(Incompatible, match="differ from this router's"):
        models.of_worker(hello_of(model, config_fingerprint=b"?"))  # an earlier version cannot send its files
    folder = bound.model_dir.path
    await model.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": "../config.json"}, r"file.name: '../config.json' is no path below"),
        ({"name": "/etc/passwd"}, r"is no path below the model's directory"),
        ({"content": b"{"}, r"its files cannot be read here"),
        ({"is_last": False}, r"the worker left before it had sent"),
    ],
)
async def test_files_that_are_none_are_refused_and_leave_nothing(
    byte_model: Path, larger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, error: str
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    _, model = one_model(byte_model)
    hello = membership_pb2.Hello(worker_id="w", config_fingerprint=ModelDir.open(larger).config_fingerprint())
    with pytest.raises((InvalidRequest, Incompatible, Unavailable), match=error):
        await model.receive(hello, messages_of(larger, **changes))
    assert not model.knows(hello.config_fingerprint)
    assert not list(scratch.iterdir())


async def test_files_are_bounded(byte_model: Path, larger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.models.model_files.MAX_MIB", 0)
    _, models = served([{"path": byte_model}])
    with pytest.raises(InvalidRequest, match="a model has at most 64 files of 0 MiB together"):
        await learn(next(iter(models)), larger)


async def test_files_that_no_worker_has_make_room_for_newer_ones(byte_model: Path, tmp_path: Path) -> None:
    _, model = one_model(byte_model)
    fingerprints = []
    for number in range(MAX_REVISIONS + 1):
        path = write_sim_model(tmp_path / f"{number}", 600 + number, context=2000)
        fingerprints.append(await learn(model, path))
        if number == 0:
            join(model, "d0", NEW, config_fingerprint=fingerprints[0])
    assert [model.knows(each) for each in fingerprints] == [True, False, False, True, True]
    assert model.knows(model.config_fingerprint), "its own"
    await model.close()


# ------------------------------------------------------------------ new requests


async def test_new_requests_are_spread_by_the_workers_of_each_revision(byte_model: Path, larger: Path) -> None:
    _, model = one_model(byte_model)
    other = await learn(model, larger)
    assert model.for_request("r") is model, "without a worker nothing is decided"
    join(model, "d0", OLD)
    join(model, "d1", OLD)
    (bound,) = {model.for_request(f"{number}") for number in range(50)}
    assert bound.is_bound
    assert bound.files is model.files
    join(model, "d2", NEW, config_fingerprint=other)
    counts = Counter(model.for_request(f"{number}").config_fingerprint for number in range(3000))
    assert counts[other] == pytest.approx(1000, abs=100)
    assert len({model.for_request(f"{number}", "one session") for number in range(50)}) == 1
    model.fleet.drains(model.fleet.workers[0])
    counts = Counter(model.for_request(f"{number}").config_fingerprint for number in range(3000))
    assert counts[other] == pytest.approx(1500, abs=120), "workers that drain get none"
    for worker in model.fleet.workers[:2]:
        model.fleet.drains(worker)
    assert {model.for_request(f"{number}").config_fingerprint for number in range(50)} == {other}
    await model.close()


async def test_a_canary_with_other_files_gets_its_share(byte_model: Path, larger: Path) -> None:
    _, model = one_model(byte_model)
    other = await learn(model, larger)
    join(model, "d0", OLD)
    join(model, "d1", NEW, config_fingerprint=other, traffic_share=0.1)
    counts = Counter(model.for_request(f"{number}").config_fingerprint for number in range(3000))
    assert counts[other] == pytest.approx(300, abs=70)
    await model.close()


def adapters(fingerprint: bytes) -> dict[str, Any]:
    return {"adapters": [membership_pb2.Adapter(name="legal", fingerprint=fingerprint)]}


async def test_adapters_of_one_name_are_spread_alike(byte_model: Path) -> None:
    models, model = one_model(byte_model)
    old = join(model, "d0", OLD, **adapters(OLD))
    join(model, "d1", OLD, **adapters(OLD))
    join(model, "d2", OLD, **adapters(NEW))
    join(model, "d3", OLD)
    legal, _ = models.asked_for("legal")
    assert legal is not None
    bound = [legal.for_request(f"{number}") for number in range(3000)]
    assert Counter(each.adapter for each in bound)[NEW] == pytest.approx(1000, abs=100)
    assert {each.name for each in bound} == {"legal"}
    newer = next(each for each in bound if each.adapter == NEW)
    assert [worker.worker_id for worker in newer.workers()] == ["d2"]
    for worker_id in ("d0", "d1"):
        worker = model.fleet.worker(worker_id)
        assert worker is not None
        model.fleet.drains(worker)
    assert {legal.for_request(f"{number}").adapter for number in range(50)} == {NEW}
    model.fleet.left(old)


async def test_a_request_that_waits_goes_to_the_revision_that_is_left(byte_model: Path, larger: Path) -> None:
    """Its prompt is read again, and it keeps its id, its place in time and its deadline."""
    config, models = served([{"path": byte_model}])
    (model,) = models
    other = await learn(model, larger)
    old = join(model, "d0", OLD)
    intake, request = Preprocessor(config, models), pb.GenerateRequest(text="word1 word299")
    with arrival(config) as arrived:
        prepared = await intake.check(request, 30.0, ANYBODY, arrived)
        demand, keys = await intake.needs(prepared, StreamState(1))
        assert demand.files == model.config_fingerprint.hex()
        held, _ = await model.dispatcher.place(RequestInfo("", 0, 0.0), all_blocks(), [])
        waiting = asyncio.ensure_future(model.dispatcher.place(prepared.info, demand, keys))
        await asyncio.sleep(0)
        assert model.dispatcher.num_waiting == 1
        join(model, "d1", NEW, config_fingerprint=other)
        model.dispatcher.kick()
        assert model.dispatcher.num_waiting == 1, "the other one cannot read its tokens"
        model.fleet.drains(old)
        model.dispatcher.kick()
        with pytest.raises(RevisionGone):
            await waiting
        with pytest.raises(RevisionGone):
            await intake.needs(prepared, StreamState(1))
        renewed = await intake.renewed(prepared, ANYBODY, arrived)
    assert renewed.model.config_fingerprint == other
    assert (renewed.request_id, renewed.info) == (prepared.request_id, prepared.info)
    assert (renewed.arrived_at, renewed.deadline) == (prepared.arrived_at, prepared.deadline)
    demand, _ = await intake.needs(renewed, StreamState(1))
    assert demand.files == other.hex()
    model.dispatcher.ended(held)
    await model.close()


async def test_a_first_worker_may_have_other_files_than_the_router(byte_model: Path, larger: Path) -> None:
    config, models = served([{"path": byte_model}])
    (model,) = models
    other = await learn(model, larger)
    intake = Preprocessor(config, models)
    with arrival(config) as arrived:
        prepared = await intake.check(pb.GenerateRequest(text="word1"), 30.0, ANYBODY, arrived)
        assert not prepared.model.is_bound
        waiting = asyncio.ensure_future(intake.needs(prepared, StreamState(1)))
        await asyncio.sleep(0)
        join(model, "d0", NEW, config_fingerprint=other)
        with pytest.raises(RevisionGone):
            await waiting
    await model.close()


# ------------------------------------------------------------------ streams


def arrival(config: Any) -> Any:
    return _Arrival(config)


class _Arrival:
    """A request that is being read, until the block ends."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __enter__(self) -> Any:
        self._arrival = arrival_of(self._config)
        return self._arrival

    def __exit__(self, *_: object) -> None:
        self._arrival.queued()


def all_blocks() -> Demand:
    return Demand(num_tokens=4, num_usable_blocks=0, num_total_blocks=100, block_tokens=16, block_bytes=1000)


@pytest.mark.parametrize("continues", [False, True])
async def test_a_stream_goes_on_only_at_its_revision(byte_model: Path, continues: bool) -> None:
    """Unless the router's operator lets it, and the tokens mean the same."""
    settings = {"continue_on_other_revisions": continues, "no_worker_grace_s": 0.01}
    config, models = served([{"path": byte_model}], **settings)
    (model,) = models
    old, _ = join(model, "d0", OLD), join(model, "d1", NEW)
    intake = Preprocessor(config, models)
    with arrival(config) as arrived:
        prepared = await intake.check(pb.GenerateRequest(text="word1"), 30.0, ANYBODY, arrived)
    emitted = StreamState(1)
    demand, keys = await intake.needs(prepared, emitted)
    assert demand.revision == "", "before the first token any weights may serve it"
    emitted.add(pb.GenerateResponse(token_ids=[5], text="x").SerializeToString())
    prepared.revision, prepared.info.num_placed, prepared.info.streaming = OLD, 1, True
    demand, keys = await intake.needs(prepared, emitted)
    assert demand.revision == OLD.hex()
    placed, decision = await model.dispatcher.place(prepared.info, demand, keys)
    assert decision.decode_id == "d0"
    model.dispatcher.ended(placed)
    model.fleet.left(old)
    if continues:
        demand, keys = await intake.needs(prepared, emitted)
        _, decision = await model.dispatcher.place(prepared.info, demand, keys)
        assert decision.decode_id == "d1"
        return
    with pytest.raises(RevisionGone, match="no worker has the revision of the model with which it began"):
        await intake.needs(prepared, emitted)
    with pytest.raises(RevisionGone):
        await model.dispatcher.place(prepared.info, demand, keys)


async def test_a_worker_that_does_not_tell_its_revision_may_have_any(byte_model: Path) -> None:
    """While a cluster of an earlier version is upgraded, no stream ends."""
    _, model = one_model(byte_model)
    join(model, "d0", b"")
    join(model, "d1", OLD)
    begun = model.for_request("r").at(OLD)
    assert [worker.worker_id for worker in begun.decode_workers()] == ["d0", "d1"]
    prompt = list(range(40))
    demand, keys = begun.needs(prompt, pb.Sampling(max_tokens=5, n=1), "", [prompt], False)
    rows = model.fleet.snapshot.able_for(demand, model.fleet.snapshot.starts_for(demand))
    assert rows.tolist() == [True, True]
    assert model.fleet.decide(demand, keys) is not None


# ------------------------------------------------------------------ fingerprints


def test_a_revision_is_weights_config_and_tokenizer(tmp_path: Path) -> None:
    path = write_sim_model(tmp_path / "m", 600)
    write_tokenizer(path, 600)
    first = ModelDir.open(path).revision(b"weights")
    assert ModelDir.open(path).revision(b"others") != first
    shutil.copytree(path, tmp_path / "copy")
    assert ModelDir.open(tmp_path / "copy").revision(b"weights") == first
    write_tokenizer(tmp_path / "copy", 599)
    assert ModelDir.open(tmp_path / "copy").revision(b"weights") != first


async def test_files_come_in_parts_and_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.PART_BYTES", 1000)
    path = write_sim_model(tmp_path / "m", 600)
    write_tokenizer(path, 600)
    (path / "model.safetensors").write_bytes(b"w" * 5000)
    (path / "model.safetensors.index.json").write_text("{}")
    (path / "empty.txt").write_text("")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{}")
    found: dict[str, bytes] = {}
    parts = [part async for part in file_parts(ModelDir.open(path))]
    for part in parts:
        found[part.name] = found.get(part.name, b"") + part.content
    assert max(len(part.content) for part in parts) == 1000
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "empty.txt", "1_Pooling/config.json"}
    assert found == {name: (path / name).read_bytes() for name in names}
