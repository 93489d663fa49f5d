"""Sources of stock servers as they are: a file, the system's resolver, and an API server of Kubernetes over HTTPS."""

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from router.models.config import FleetConfig
from router.stock.sources import kubernetes, servers
from router.stock.sources.listings import listings
from router.stock.sources.servers import Server
from support.certificates import Authority
from support.processes import until
from support.watch_api import WatchApi, endpoint_slice, pod

READY, LEAVING = {"ready": True}, {"ready": False, "serving": True, "terminating": True}
SERVICE = {"service": {"name": "vllm", "port": 8000}}


class Followed:
    """An async context manager: what a fleet's sources list."""

    def __init__(self, *servers: dict[str, Any], **values: Any) -> None:
        self._config = FleetConfig.parse({"servers": servers, **values})
        self.history: list[dict[str, tuple[str, bool]]] = []
        """Role and draining by host and port."""

    async def __aenter__(self) -> "Followed":
        self._task = asyncio.ensure_future(self._follow())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert not self._task.done(), "it never ends"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        async for listed in listings(self._config):
            self.history.append({_host(server): (server.role, server.draining) for server in listed})

    async def lists(self, *hosts: str, draining: tuple[str, ...] = ()) -> None:
        """Wait until exactly these servers are listed."""
        expected = {host: host in draining for host in (*hosts, *draining)}

        async def listed() -> bool:
            now = self.history[-1] if self.history else {}
            return {host: drains for host, (_, drains) in now.items()} == expected

        await until(listed, f"{expected} is listed")


def _host(server: Server) -> str:
    return server.url.partition("://")[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, pause in ((servers, "LOOK_UP_S"), (servers, "READ_S"), (kubernetes, "PAUSE_S")):
        monkeypatch.setattr(module, pause, 0.02)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[WatchApi]:
    async with WatchApi(tmp_path) as api:
        yield api


def said(caplog: pytest.LogCaptureFixture, text: str) -> Callable[[], Any]:
    """Return a condition: a record of the log has the text."""

    return lambda: any(text in record.getMessage() for record in caplog.records)


async def test_a_file_is_followed_while_it_is_missing_broken_and_rewritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "servers.yaml"
    async with Followed({"file": str(path), "role": "decode"}, {"url": "z:1"}, {"url": "a:1"}) as followed:
        await until(said(caplog, "cannot be read: No such file"), "its absence is logged")
        await followed.lists("z:1", "a:1")
        path.with_name("new").write_text("- url: a:1\n  role: prefill\n- b:2\n")
        path.with_name("new").rename(path)
        await followed.lists("a:1", "b:2", "z:1")
        assert followed.history[-1] == {"a:1": ("prefill", False), "b:2": ("decode", False), "z:1": ("both", False)}
        path.write_text("- url: a:1\n  role: pre")
        await until(said(caplog, "server 1: role"), "its error is logged")
        path.with_name("new").write_text("c:3\n")
        path.with_name("new").rename(path)
        await followed.lists("c:3", "z:1", "a:1")
        path.write_text("[]")
        await followed.lists("z:1", "a:1")
    assert len(followed.history) == 4, "one list for each change"
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2, "one warning for each reason"


async def test_names_are_resolved_by_the_system_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, addresses = socket.getaddrinfo, ["10.0.0.1"]

    def getaddrinfo(host: str | None, port: int | None, **options: Any) -> Any:
        if host != "vllm.test":
            return real(host, port, **options)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with Followed({"dns": "localhost:8000"}, {"dns": "vllm.test:9000"}) as followed:
        await followed.lists("127.0.0.1:8000", "10.0.0.1:9000")
        addresses.append("10.0.0.2")
        await followed.lists("127.0.0.1:8000", "10.0.0.1:9000", "10.0.0.2:9000")
        addresses.clear()
        await until(said(caplog, "Name or service not known; its last servers stay"), "the failure is logged")
        addresses.append("10.0.0.3")
        await followed.lists("127.0.0.1:8000", "10.0.0.3:9000")
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


async def test_a_look_that_hangs_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, may_end = threading.Event(), threading.Event()

    def getaddrinfo(*_: object, **__: object) -> Any:
        entered.set()
        may_end.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with Followed({"dns": "vllm.test:9000"}, {"url": "z:1"}) as followed:
        await followed.lists("z:1")
        await asyncio.to_thread(entered.wait)
    (thread,) = [each for each in threading.enumerate() if each.name == "stock-servers"]
    assert thread.daemon
    may_end.set()
    await asyncio.to_thread(thread.join)


async def test_a_service_and_pods_are_watched(api: WatchApi) -> None:
    await api.put("endpointslices", endpoint_slice("vllm-a", "vllm", {"10.0.0.1": READY}))
    await api.put("endpointslices", endpoint_slice("other", "other", {"10.0.0.9": READY}))
    pods = {"pods": {"selector": "app=vllm,tier=chat", "namespace": "else", "port": 9000}, "role": "prefill"}
    async with Followed(SERVICE | {"role": "decode"}, pods, kubernetes=api.settings) as followed:
        await followed.lists("10.0.0.1:8000")
        await api.put("endpointslices", endpoint_slice("vllm-b", "vllm", {"10.0.0.2": READY}))
        await followed.lists("10.0.0.1:8000", "10.0.0.2:8000")
        await api.put("endpointslices", endpoint_slice("vllm-a", "vllm", {"10.0.0.1": LEAVING}))
        await followed.lists("10.0.0.2:8000", draining=("10.0.0.1:8000",))
        await api.delete("endpointslices", "vllm-a")
        await followed.lists("10.0.0.2:8000")
        await api.put("pods", pod("new", app="vllm", tier="chat"), "else")
        await api.put("pods", pod("here", "10.1.0.8", app="vllm", tier="chat"))
        await api.put("pods", pod("of-others", "10.1.0.9", app="vllm", tier="code"), "else")
        await api.put("pods", pod("new", "10.1.0.1", app="vllm", tier="chat"), "else")
        await followed.lists("10.0.0.2:8000", "10.1.0.1:9000")
        await api.put("pods", pod("new", "10.1.0.1", leaving=True, app="vllm", tier="chat"), "else")
        await followed.lists("10.0.0.2:8000", draining=("10.1.0.1:9000",))
    assert {role for role, _ in followed.history[-1].values()} == {"decode", "prefill"}
    watches = [query for _, query in api.calls if "watch" in query]
    assert all(query["allowWatchBookmarks"] == "true" and int(query["timeoutSeconds"]) > 0 for query in watches)
    lists = [(path, query["labelSelector"]) for path, query in api.calls if "watch" not in query]
    assert lists == [
        ("/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices", "kubernetes.io/service-name=vllm"),
        ("/api/v1/namespaces/else/pods", "app=vllm,tier=chat"),
    ], "each is listed once"


async def test_a_watch_that_breaks_goes_on_from_where_it_was(api: WatchApi) -> None:
    async with Followed(SERVICE, {"url": "z:1"}, kubernetes=api.settings) as followed:
        for number in range(5):
            await watching(api)
            api.cut()
            await api.put("endpointslices", endpoint_slice(f"vllm-{number}", "vllm", {f"10.0.0.{number}": READY}))
            await followed.lists("z:1", *(f"10.0.0.{each}:8000" for each in range(number + 1)))
    assert len([query for _, query in api.calls if "watch" not in query]) == 1, "nothing is listed again"


async def watching(api: WatchApi) -> None:
    await until(lambda: api.num_watches == 1, "a watch is open")


@pytest.mark.parametrize("when", ["between watches", "within a watch"])
async def test_what_was_forgotten_is_listed_again(api: WatchApi, when: str, caplog: pytest.LogCaptureFixture) -> None:
    await api.put("endpointslices", endpoint_slice("vllm-a", "vllm", {"10.0.0.1": READY}))
    async with Followed(SERVICE, kubernetes=api.settings) as followed:
        await followed.lists("10.0.0.1:8000")
        await watching(api)
        if when == "between watches":
            await api.leave()
        await api.delete("endpointslices", "vllm-a")
        if when == "between watches":
            await api.put("endpointslices", endpoint_slice("vllm-b", "vllm", {"10.0.0.2": READY}))
            api.expire()
            await api.listen(api.port)
        else:
            api.expire()
            await api.put("endpointslices", endpoint_slice("vllm-b", "vllm", {"10.0.0.2": READY}))
        await followed.lists("10.0.0.2:8000")
    assert not [record for record in caplog.records if "410" in record.getMessage()], "it is no failure"


async def test_a_bookmark_saves_a_list(api: WatchApi) -> None:
    api.bookmark = True

    async def goes_on_from_the_newest_version() -> bool:
        if api.calls and api.calls[-1][1].get("resourceVersion") == str(api.version):
            return True
        api.cut()
        return False

    async with Followed(SERVICE, {"url": "z:1"}, kubernetes=api.settings) as followed:
        await watching(api)
        await api.put("pods", pod("a", "10.0.0.1"))  # of what this watch does not see
        await until(goes_on_from_the_newest_version, "a bookmark told the version")
        api.expire()
        api.cut()
        await api.put("endpointslices", endpoint_slice("vllm-a", "vllm", {"10.0.0.2": READY}))
        await followed.lists("z:1", "10.0.0.2:8000")
    assert len([query for _, query in api.calls if "watch" not in query]) == 1


async def test_a_token_rotates_and_is_read_again(api: WatchApi, caplog: pytest.LogCaptureFixture) -> None:
    await api.put("endpointslices", endpoint_slice("vllm-a", "vllm", {"10.0.0.1": READY}))
    async with Followed(SERVICE, kubernetes=api.settings) as followed:
        await followed.lists("10.0.0.1:8000")
        await watching(api)
        api.token = "second"  # the account's file is late
        api.cut()
        await until(said(caplog, "Kubernetes answers 401: Unauthorized; its last servers stay"), "it is logged")
        await api.put("endpointslices", endpoint_slice("vllm-a", "vllm", {"10.0.0.2": READY}))
        api.rotate_token("second")
        await followed.lists("10.0.0.2:8000")
    assert api.num_refused > 0
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


async def test_an_api_server_that_is_away_or_silent_or_fails_keeps_the_last_list(
    api: WatchApi, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "SILENCE_S", 0.2)
    await api.put("endpointslices", endpoint_slice("vllm-a", "vllm", {"10.0.0.1": READY}))
    async with Followed(SERVICE, kubernetes=api.settings) as followed:
        await followed.lists("10.0.0.1:8000")
        num_calls = len(api.calls)

        await until(lambda: len(api.calls) > num_calls + 2, "a watch that is silent is given up")
        await api.leave()
        await until(said(caplog, "Cannot connect to host"), "its absence is logged")
        api.failing = 2
        await api.listen(api.port)
        await until(said(caplog, "Kubernetes answers 500: etcd is away"), "its failure is logged")
        await api.put("endpointslices", endpoint_slice("vllm-a", "vllm", {"10.0.0.2": READY}))
        await followed.lists("10.0.0.2:8000")
    assert len(followed.history) == 2


async def test_a_server_of_another_authority_gets_no_token(
    api: WatchApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ca.crt").write_bytes(Authority(tmp_path, "another").path.read_bytes())
    async with Followed(SERVICE, {"url": "z:1"}, kubernetes=api.settings) as followed:
        await until(said(caplog, "certificate verify failed"), "it is logged")
        await followed.lists("z:1")
    assert (api.calls, api.num_refused) == ([], 0)
