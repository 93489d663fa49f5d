"""A worker and routers that will not have it, or are not there, over real gRPC."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc
import pytest

from cluster.discovery.discovery import StaticDiscovery
from cluster.errors import AlreadyExists
from cluster.network.error_status import to_status
from engine.process.front.engine_client import EngineClient
from engine.worker.front import membership as joining
from engine.worker.front.membership import Memberships
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from support.processes import until

LOGGER = "engine.worker.front.membership"


class Refusing(pb_grpc.MembershipServicer):
    """A router that has a worker of that name."""

    def __init__(self) -> None:
        self.asked = 0

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.Welcome]:
        await anext(request_iterator)
        self.asked += 1
        await context.abort_with_status(to_status(AlreadyExists("it is there", "worker_id")))
        yield pb.Welcome()


class Engine:
    """One that says nothing."""

    @contextmanager
    def watching(self, watch: Callable[[object], None]) -> Iterator[None]:
        yield

    def send(self, *messages: object) -> None:
        pass


def joining_at(address: str) -> Memberships:
    engine = cast(EngineClient, Engine())
    return Memberships(pb.Hello(worker_id="w"), engine, [address], StaticDiscovery([address]), lambda: False)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == LOGGER]


async def test_a_worker_that_is_refused_again_and_again_says_so_once_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "RETRY_S", 0.01)
    caplog.set_level(logging.INFO, LOGGER)
    router, server = Refusing(), grpc.aio.server()
    pb_grpc.add_MembershipServicer_to_server(router, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    memberships = joining_at(address)
    memberships.start()

    async def asked_often() -> bool:
        return router.asked > 20

    await until(asked_often, "it has tried often")
    await memberships.leave()
    await server.stop(0)

    async def nothing_left() -> bool:
        return not [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())]

    await until(nothing_left, "what wrote to the routers has ended")
    assert said(caplog) == [("ERROR", f"router {address} could not be joined: worker_id: it is there")]


async def test_a_router_that_is_not_there_is_told_of_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "RETRY_S", 0.01)
    monkeypatch.setattr(joining, "WARN_AFTER_S", 0.1)
    caplog.set_level(logging.INFO, LOGGER)
    memberships = joining_at("127.0.0.1:1")
    memberships.start()

    async def warned() -> bool:
        return any(level == "WARNING" for level, _ in said(caplog))

    await until(warned, "it warns")
    await asyncio.sleep(0.1)  # tries some more
    await memberships.leave()
    (first, *_, last), levels = said(caplog), [level for level, _ in said(caplog)]
    assert first[0] == "INFO", "it may be about to start"
    assert last[1].startswith("router 127.0.0.1:1 could not be joined for 0 s: failed to connect")
    assert levels.count("WARNING") == 1
