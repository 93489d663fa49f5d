"""Who joins which model, held against one another: the Membership service without a network."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cluster.errors import Unavailable
from cluster.network.rpc import PROTOCOL
from engine.model.model_dir import ModelDir
from protos import membership_pb2 as pb
from router.admission.limits.tenant_limits import TenantLimits
from router.config import RouterConfig
from router.decode_client.decode_streams import DecodeStreams, Inbox
from router.membership import members
from router.membership.membership_service import MembershipService
from router.models.model_files import read_models
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.placement.fleet.fleet import PART_KEYS
from router.placement.fleet.worker_records import WorkerRecord
from router.runtime import serve_models
from support.sim_directories import write_sim_model
from support.virtual_loop import settle
from worker.runtime import file_parts


class Aborted(Exception):
    """What a client would see."""


class Context:
    """Of a call: only its end matters here."""

    async def abort_with_status(self, status: Any) -> None:
        raise Aborted(f"{status.code.name}: {status.details}")


class Member:
    """A worker's call, and its events."""

    inboxes: ClassVar[dict[bytes, Inbox]] = {}
    """Inboxes of connected workers, by the key of the membership."""

    def __init__(self, service: MembershipService, of: ModelRuntime, incarnation: bytes, **hello: Any) -> None:
        self.says: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        values: dict[str, Any] = {
            "worker_id": "w",
            "address": f"{of.name}:1",
            "stream_address": f"{of.name}:2",
            "incarnation": incarnation,
            "role": pb.ROLE_DECODE,
            "model_fingerprint": b"weights",
            "config_fingerprint": of.config_fingerprint,
            "block_tokens": 16,
            "num_blocks": 10,
            "block_bytes": 100,
        }
        self.says.put_nowait(pb.WorkerMessage(hello=pb.Hello(protocol=PROTOCOL, **(values | hello))))
        self.stream = service.Join(self._messages(), Context())

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        while True:
            yield await self.says.get()

    async def welcomed(self) -> None:
        answer = await anext(self.stream)
        assert answer.HasField("welcome")
        self.key = answer.welcome.stream_key

    def tells(self, event: pb.WorkerMessage) -> None:
        """Send an event over the connection."""
        self.inboxes[self.key].put(event)

    async def reports(self) -> "asyncio.Future[Any]":
        """And goes on listening."""
        listens = asyncio.ensure_future(anext(self.stream))
        await settle()
        self.tells(pb.WorkerMessage(load=pb.LoadReport(available_blocks=10, num_blocks=10)))
        await settle()
        return listens


async def joined(member: Member) -> "tuple[Member, asyncio.Future[Any]]":
    """A member that was welcomed, reports and listens."""
    await member.welcomed()
    return member, await member.reports()


@pytest.fixture(autouse=True)
def _inboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are connected to by nothing but their inboxes."""

    def connect(streams: DecodeStreams, worker: WorkerRecord, inbox: Inbox) -> None:
        Member.inboxes[worker.stream_key] = inbox

    monkeypatch.setattr(Member, "inboxes", {})
    monkeypatch.setattr(DecodeStreams, "open", connect)


@pytest.fixture
def models(tmp_path: Path) -> ModelRuntimes:
    paths = [write_sim_model(tmp_path / name, size) for name, size in (("a", 600), ("b", 700))]
    config = RouterConfig.parse({"models": [{"path": path} for path in paths]})
    return serve_models(config, read_models(config), TenantLimits(config), b"incarnation")


@pytest.fixture
def service(models: ModelRuntimes) -> MembershipService:
    return MembershipService(models, "router", b"incarnation", 10.0)


def ids(models: ModelRuntimes) -> list[list[str]]:
    return [[worker.worker_id for worker in model.decode_workers()] for model in models]


async def test_a_worker_is_one_of_its_models_only(models: ModelRuntimes, service: MembershipService) -> None:
    _, of_b = models
    _, listens = await joined(Member(service, of_b, b"1"))
    assert ids(models) == [[], ["w"]]
    listens.cancel()
    await asyncio.wait([listens])
    assert ids(models) == [[], []]


async def test_an_id_means_one_worker_whatever_it_serves(
    models: ModelRuntimes, service: MembershipService, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a, of_b = models
    first, listens = await joined(Member(service, of_a, b"1"))
    second = Member(service, of_b, b"2")
    with pytest.raises(Aborted, match="ALREADY_EXISTS: worker_id: 'w' is in use by the worker at a:1"):
        await second.welcomed()
    assert ids(models) == [["w"], []]

    monkeypatch.setattr(members, "ALIVE_S", -1.0)  # nobody is taken to have spoken lately
    _, listens_too = await joined(Member(service, of_b, b"2"))
    assert ids(models) == [[], ["w"]]
    first.tells(pb.WorkerMessage(load=pb.LoadReport()))
    with pytest.raises(Aborted, match="another stream of 'w' has replaced this one"):
        await listens
    assert ids(models) == [[], ["w"]], "the end of the old stream takes nothing from the new one"
    listens_too.cancel()
    await asyncio.wait([listens_too])


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (
            {"config_fingerprint": b"other", "model": "c"},
            r"FAILED_PRECONDITION.*serves 'c', whose name and config .*: 'a', 'b'",
        ),
        ({"stream_address": ""}, "FAILED_PRECONDITION: stream_port: is null at worker w"),  # of the version before
    ],
)
async def test_a_worker_that_cannot_serve_here_is_told_why(
    models: ModelRuntimes, service: MembershipService, hello: dict[str, Any], said: str
) -> None:
    with pytest.raises(Aborted, match=said):
        await Member(service, next(iter(models)), b"1", **hello).welcomed()
    assert ids(models) == [[], []]


async def test_a_worker_that_cannot_be_reached_or_sends_events_on_its_call_is_told_so(
    models: ModelRuntimes, service: MembershipService
) -> None:
    of_a, _ = models
    member, listens = await joined(Member(service, of_a, b"1"))
    Member.inboxes[member.key].end(Unavailable("no connection to worker w at a:2 (stream_port): refused"))
    with pytest.raises(Aborted, match=r"UNAVAILABLE: no connection to worker w at a:2 \(stream_port\)"):
        await listens
    assert ids(models) == [[], []]

    member, listens = await joined(Member(service, of_a, b"1"))
    member.says.put_nowait(pb.WorkerMessage(load=pb.LoadReport()))
    with pytest.raises(Aborted, match="INVALID_ARGUMENT: load: comes after the Welcome"):
        await listens
    assert ids(models) == [[], []]


async def test_a_worker_that_leaves_or_falls_silent_is_forgotten(models: ModelRuntimes) -> None:
    lost: list[str] = []
    service = MembershipService(models, "router", b"incarnation", 10.0, lost.append)
    of_a, _ = models
    _, listens = await joined(Member(service, of_a, b"1"))
    await asyncio.sleep(9.0)
    assert ids(models) == [["w"], []]
    await asyncio.sleep(1.1)
    assert listens.done()
    assert isinstance(listens.exception(), StopAsyncIteration)
    assert ids(models) == [[], []]
    assert lost == ["a"]


async def test_who_can_exchange_blocks_with_nobody_is_told_of(
    models: ModelRuntimes, service: MembershipService, caplog: pytest.LogCaptureFixture
) -> None:
    of_a, _ = models
    kinds = {
        "first": {},
        "as the first": {},
        "others": {"block_tokens": 7, "model_fingerprint": b"blocks"},
        "weights": {"model_fingerprint": b"other"},
        "as weights": {"model_fingerprint": b"other"},
    }
    expected = {
        "others": "its blocks are 7 tokens in 100 bytes, not 16 tokens in 100 bytes",
        "weights": "its weights or dtypes differ",
    }
    members = []
    for worker_id, hello in kinds.items():
        caplog.clear()
        members.append(Member(service, of_a, b"1", worker_id=worker_id, address=worker_id, model="a", **hello))
        await members[-1].welcomed()
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        if worker_id in expected:
            assert said == [f"{worker_id} exchanges no KV with first, nor with any other of a: {expected[worker_id]}"]
        else:
            assert not said


async def test_a_large_cache_holds_up_nobody(models: ModelRuntimes, service: MembershipService) -> None:
    """And who leaves in the middle of it holds nothing."""
    model, _ = models
    member, listens = await joined(Member(service, model, b"1"))
    keys = [number.to_bytes(16, "big") for number in range(10 * PART_KEYS)]
    half = len(keys) // 2
    events = [pb.CacheEvent(stored=b"".join(part)) for part in (keys[:half], keys[half:])]
    cache = pb.CacheEvents(snapshot=True, sequence=7, events=events)
    (worker,) = model.fleet.workers
    seen: list[int] = []

    async def follow(until: int) -> None:
        """What others see between two turns of theirs."""
        member.tells(pb.WorkerMessage(cache=cache))
        seen.clear()
        while until not in seen:
            await asyncio.sleep(0)
            seen.append(worker.num_cached)
            assert len(seen) < 100

    await follow(len(keys))
    assert {PART_KEYS * part for part in range(1, 11)} <= set(seen)
    assert model.fleet.index.match(keys) == {"w": len(keys)}
    await follow(3 * PART_KEYS)
    listens.cancel()
    await asyncio.wait([listens])
    for _ in range(5):
        await asyncio.sleep(0)
    assert model.fleet.index.keys_of("w") == frozenset()
    assert model.fleet.index.match(keys[:1]) == {}


async def test_of_workers_with_other_files_that_join_at_once_one_sends_them(
    models: ModelRuntimes, service: MembershipService, tmp_path: Path
) -> None:
    of_a, _ = models
    (tmp_path / "new").mkdir()
    path = write_sim_model(tmp_path / "new" / "a", 650)
    config = ModelDir.open(path).config_fingerprint()
    hello: dict[str, Any] = {"config_fingerprint": config, "model": "a", "revision": b"n" * 16}
    first, second = (Member(service, of_a, b"1", worker_id=name, address=name, **hello) for name in ("v", "w"))
    assert (await anext(first.stream)).HasField("files_wanted")
    welcomes = asyncio.ensure_future(second.welcomed())
    await asyncio.sleep(0)
    assert not welcomes.done()
    async for part in file_parts(ModelDir.open(path)):
        first.says.put_nowait(pb.WorkerMessage(file=part))
    await first.welcomed()
    await welcomes
    assert [worker.worker_id for worker in of_a.fleet.workers] == ["v", "w"]
    assert of_a.bound(config).model_dir.vocab_size == 650
    await of_a.close()


async def test_a_worker_that_sends_something_else_does_not_join_and_stops_no_other(
    models: ModelRuntimes, service: MembershipService, tmp_path: Path
) -> None:
    of_a, _ = models
    (tmp_path / "new").mkdir()
    config = ModelDir.open(write_sim_model(tmp_path / "new" / "a", 650)).config_fingerprint()
    for message in (pb.WorkerMessage(load=pb.LoadReport()), pb.WorkerMessage(file=pb.ModelFilePart(name="/x"))):
        member = Member(service, of_a, b"1", config_fingerprint=config, model="a", revision=b"n" * 16)
        assert (await anext(member.stream)).HasField("files_wanted")
        member.says.put_nowait(message)
        with pytest.raises(Aborted, match="INVALID_ARGUMENT: file"):
            await member.welcomed()
    own = Member(service, of_a, b"1")
    await own.welcomed()
    assert [worker.worker_id for worker in of_a.fleet.workers] == ["w"]
