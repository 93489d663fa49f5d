"""A worker and routers that will not have it, or are not there, over real gRPC."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc
import pytest

from cluster.discovery.discovery import StaticDiscovery
from cluster.errors import AlreadyExists, Incompatible, ServiceError
from cluster.network.error_status import to_status
from engine.process.front.engine_client import EngineClient
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from support.processes import until
from worker.front import membership as joining
from worker.front.membership import Memberships, RouterStreams

LOGGER = "worker.front.membership"


class Refusing(pb_grpc.MembershipServicer):
    """A router that refuses a worker; by default it has one of that name."""

    def __init__(self, error: ServiceError | None = None) -> None:
        self.asked = 0
        self.error: ServiceError | None = error or AlreadyExists("it is there", "worker_id")
        """None: it takes the worker."""

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.RouterMessage]:
        await anext(request_iterator)
        self.asked += 1
        if self.error is not None:
            await context.abort_with_status(to_status(self.error))
        yield pb.RouterMessage(welcome=pb.Welcome(router_id=f"{id(self)}"))
        await asyncio.Event().wait()


class Engine:
    """One that says nothing."""

    @contextmanager
    def watching(self, watch: Callable[[object], None]) -> Iterator[None]:
        yield

    def send(self, *messages: object) -> None:
        pass


def joining_at(*addresses: str) -> Memberships:
    engine = cast(EngineClient, Engine())
    discovery = StaticDiscovery(addresses)
    return Memberships(pb.Hello(worker_id="w"), engine, addresses, discovery, lambda: False, RouterStreams())


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

    await until(lambda: router.asked > 20, "it has tried often")
    await memberships.leave()
    await server.stop(0)

    await until(
        lambda: not [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())],
        "what wrote to the routers has ended",
    )
    assert said(caplog) == [("ERROR", f"router {address} could not be joined: worker_id: it is there")]


async def test_a_router_that_is_not_there_is_told_of_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "RETRY_S", 0.01)
    monkeypatch.setattr(joining, "WARN_AFTER_S", 0.1)
    caplog.set_level(logging.INFO, LOGGER)
    memberships = joining_at("127.0.0.1:1")
    memberships.start()

    await until(lambda: any(level == "WARNING" for level, _ in said(caplog)), "it warns")
    await asyncio.sleep(0.1)  # tries some more
    await memberships.leave()
    (first, *_, last), levels = said(caplog), [level for level, _ in said(caplog)]
    assert first[0] == "INFO", "it may be about to start"
    assert last[1].startswith("router 127.0.0.1:1 could not be joined for 0 s: failed to connect")
    assert levels.count("WARNING") == 1


async def test_no_single_router_ends_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses is tried again; only when all refuse for good, the worker says why."""
    monkeypatch.setattr(joining, "RETRY_S", 0.01)
    monkeypatch.setattr(joining, "REFUSED_RETRY_S", 0.01)
    addresses: list[str] = []
    refusing, having = Refusing(Incompatible("other files", "model")), Refusing(Incompatible("other files", "model"))
    having.error = None
    servers = []
    for router in (refusing, having):
        server = grpc.aio.server()
        pb_grpc.add_MembershipServicer_to_server(router, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    memberships = joining_at(*addresses)
    memberships.start()
    failing = asyncio.ensure_future(memberships.failed())

    await until(
        lambda: refusing.asked > 20 and memberships.num_joined == 1,
        "one router has it and the other has refused it often",
    )
    assert not failing.done()
    having.error = Incompatible("other files", "model")
    await servers[1].stop(0)
    server = grpc.aio.server()
    pb_grpc.add_MembershipServicer_to_server(having, server)
    server.add_insecure_port(addresses[1])
    await server.start()
    assert isinstance(await asyncio.wait_for(failing, 20), Incompatible)
    await memberships.leave()
    await asyncio.gather(servers[0].stop(0), server.stop(0))
