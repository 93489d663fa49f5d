"""URLs of pictures, from a real HTTP server that does what servers should not do."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from cluster.errors import InvalidRequest
from cluster.network.rpc import channel
from conftest import ModelFactory
from preprocessor.config import PreprocessorConfig
from preprocessor.fetching import Fetcher, is_public
from preprocessor.runtime import start_preprocessor
from support.media_files import picture
from support.preprocessors import Caller, request_of

VOCAB = 400
PROMPT = [1, VOCAB - 1]
MAX_MIB = 1
GOOD = picture(4)


class PictureServer:
    """HTTP server on all addresses of this host."""

    def __init__(self) -> None:
        self.port = 0
        self.served: list[str] = []
        """Paths that were asked for, with the host."""

    def at(self, path: str, host: str = "localhost") -> str:
        return f"http://{host}:{self.port}/{path}"

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "0.0.0.0", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        self.served.append(f"{request.host.partition(':')[0]}/{path}")
        if path == "good":
            return web.Response(body=GOOD)
        if path.startswith("hops"):
            left = int(path.removeprefix("hops"))
            raise web.HTTPFound(f"/hops{left - 1}" if left else "/good")
        if path.startswith("to/"):
            raise web.HTTPTemporaryRedirect(self.at("good", path.removeprefix("to/")))
        if path == "file":
            raise web.HTTPFound("file:///etc/passwd")
        if path == "nowhere":
            return web.Response(status=302)
        if path == "gzip":
            return web.Response(body=gzip.compress(GOOD), headers={"Content-Encoding": "gzip"})
        if path == "announced":
            return web.Response(body=bytes((MAX_MIB << 20) + 1))
        if path == "absent":
            raise web.HTTPNotFound
        if path == "silent":
            await asyncio.sleep(60)
        response = web.StreamResponse()
        await response.prepare(request)
        if path == "empty":
            return response
        if path == "slow":
            for byte in GOOD:
                await response.write(bytes([byte]))
                await asyncio.sleep(0.2)
        if path == "cut":
            await response.write(b"x" * 100)
            request.transport.abort()
            return response
        while path == "endless":
            await response.write(bytes(64 << 10))
        return response


@pytest_asyncio.fixture
async def server() -> AsyncIterator[PictureServer]:
    pictures = PictureServer()
    runner = await pictures.start()
    yield pictures
    await runner.cleanup()


@asynccontextmanager
async def caller_of(model: Path, hosts: tuple[str, ...], may_connect: Any) -> AsyncIterator[Caller]:
    config = PreprocessorConfig.parse(
        {"engine": "sim", "model": model, "port": 0, "processes": 1, "max_item_mib": MAX_MIB, "allowed_hosts": hosts}
    )
    fetcher = Fetcher(config.allowed_hosts, MAX_MIB << 20, 1.5, may_connect)
    running = await start_preprocessor(config, fetcher)
    try:
        async with channel(running.addresses.grpc) as link:
            yield Caller(link)
    finally:
        await running.stop()


async def test_pictures_are_fetched_from_allowed_hosts(
    sim_model: ModelFactory, server: PictureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # a fetch by way of it would fail
    hosts = ("localhost", "127.0.0.3")
    async with caller_of(sim_model(VOCAB), hosts, lambda address: address == "127.0.0.1") as caller:
        whole = await caller.process(request_of(PROMPT, GOOD))
        for path in ("good", "hops0", "hops2", "to/localhost"):
            assert await caller.process(request_of(PROMPT, server.at(path))) == whole
        for path, reason in (
            ("hops3", "more than 3 times"),
            ("to/127.0.0.2", "not fetched here"),  # no allowed host
            ("to/127.0.0.3", "not public"),  # an allowed host with an address that must not be connected to
            ("file", "begins with 'file'"),
            ("nowhere", "more than 3 times"),
            ("absent", "status 404"),
            ("empty", "is empty"),
            ("gzip", "compressed"),
            ("announced", "more than 1 MiB"),
            ("endless", "more than 1 MiB"),
            ("slow", "within 1.5 s"),
            ("silent", "within 1.5 s"),
            ("cut", "cannot be fetched"),
        ):
            with pytest.raises(InvalidRequest, match=reason) as refusal:
                await caller.process(request_of([VOCAB - 1, VOCAB - 1], GOOD, server.at(path)))
            assert refusal.value.field == "media[1]", path
        assert "127.0.0.3/good" not in server.served
        assert await caller.process(request_of(PROMPT, server.at("good"))) == whole


async def test_slow_servers_hold_up_no_other_tenant(sim_model: ModelFactory, server: PictureServer) -> None:
    async with caller_of(sim_model(VOCAB), ("localhost",), lambda address: address == "127.0.0.1") as caller:
        slow = [
            asyncio.ensure_future(caller.process(request_of(PROMPT, server.at("silent"), tenant="slow")))
            for _ in range(40)
        ]
        await asyncio.sleep(0)
        assert (await caller.process(request_of(PROMPT, server.at("good"), tenant="quick"))).items
        assert not any(each.done() for each in slow[16:])
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_addresses_of_this_host_are_not_connected_to(sim_model: ModelFactory, server: PictureServer) -> None:
    hosts = ("localhost", "127.0.0.1")
    async with caller_of(sim_model(VOCAB), hosts, is_public) as caller:
        for host in hosts:
            with pytest.raises(InvalidRequest, match="not public"):
                await caller.process(request_of(PROMPT, server.at("good", host)))
        assert not server.served
