"""The link between a router and its process of files and batches: retries, keys, quotas, and deaths of either."""

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from batches.lines import LineAnswer, LineRequest
from batches.router_client import RouterClient
from cluster.errors import Overloaded, StartError, Unavailable
from cluster.process.life import Drain
from conftest import ModelFactory
from router.batches.link import (
    BATCHES_SOCKET,
    CALLER,
    HEALTH,
    LINE,
    LINK_FILE,
    ROUTER_SOCKET,
    Link,
    OnBehalf,
    RouterLink,
)
from router.frontend.http.server import OpenAiServer
from router.security.api_keys import entry_for
from support.batch_runs import ENDPOINT, link
from support.batch_site import (
    COMPLETIONS,
    batch_cluster,
    batches_pid,
    begin,
    client_of,
    completion,
    content_of,
    ended,
    jsonl,
    start_router_again,
)
from support.openai_http import call
from support.processes import pause, until
from tandem.local.local_cluster import LocalCluster, start_role, stop_process

LINE_OF_NOBODY = LineRequest(ENDPOINT, b'{"prompt": "x"}', "r-1", "a", "", 9.0)


class ScriptedRouter:
    """A router's socket, which answers as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, "secret"
        self.answer: tuple[int, dict[str, str], bytes] = (200, {}, b"{}")
        self.asked: list[dict[str, str]] = []
        """Headers of the requests."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.server = OpenAiServer(folder / ROUTER_SOCKET, 0, setting="batches_link")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append(headers)
        status, answered, body = self.answer
        if headers["authorization"] != f"Bearer {self.key}":
            status, answered, body = 401, {}, b"{}"
        await self.may_answer.wait()
        raw = [(name.encode(), value.encode()) for name, value in answered.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[ScriptedRouter]:
    link().write(tmp_path)
    scripted = ScriptedRouter(tmp_path)
    await scripted.server.start(scripted)
    yield scripted
    await scripted.server.close()


async def test_only_what_may_succeed_is_tried_again(router: ScriptedRouter) -> None:
    async with RouterClient(RouterLink(router.folder, link())) as client:
        for status in (200, 400, 401, 403, 404, 413, 500, 501, 504):
            router.answer = status, {}, b'{"a": 1}'
            assert await client.answer(LINE_OF_NOBODY) == LineAnswer(status, b'{"a": 1}')
        router.answer = 429, {"retry-after-ms": "1500"}, b"full"
        with pytest.raises(Overloaded) as full:
            await client.answer(LINE_OF_NOBODY)
        assert full.value.retry_after_s == 1.5
        router.answer = 503, {"retry-after-ms": "1000"}, b"no worker"
        with pytest.raises(Unavailable, match="no worker"):
            await client.answer(LINE_OF_NOBODY)
        assert OnBehalf.model_validate_json(router.asked[0][LINE]) == OnBehalf(tenant="a", key="", deadline_s=9.0)
        await router.server.close()
        with pytest.raises(Unavailable, match="no answer"):
            await client.answer(LINE_OF_NOBODY)


async def test_a_router_that_starts_again_has_another_key(router: ScriptedRouter) -> None:
    async with RouterClient(RouterLink(router.folder, link())) as client:
        router.key = "another"
        link().model_copy(update={"key": router.key}).write(router.folder)
        router.may_answer.clear()
        asking = asyncio.gather(*(client.answer(LINE_OF_NOBODY) for _ in range(3)), return_exceptions=True)

        await until(lambda: len(router.asked) == 3, "all three are in flight")
        router.may_answer.set()
        results = await asking
        assert [str(result) for result in results] == ["the router has started again"] * 3, "each that was in flight"
        assert (await client.answer(LINE_OF_NOBODY)).status == 200


async def test_batches_wait_while_the_router_stops(router: ScriptedRouter) -> None:
    drain = Drain()

    async def draining_is(wanted: bool) -> None:
        await until(lambda: drain.draining == wanted, f"draining is {wanted}")
        assert not drain.over

    async with RouterClient(RouterLink(router.folder, link()), look_s=0.02, away_s=0.3) as client:
        client.watch(drain)
        router.answer = 200, {"content-type": "application/json"}, b'{"draining": true}'
        await draining_is(True)
        router.answer = 200, {"content-type": "application/json"}, b'{"draining": false}'
        await draining_is(False)
        router.key = "another"
        (router.folder / LINK_FILE).write_text("{}")
        assert isinstance(await client.failed(), StartError), "a router of another version"


async def test_batches_are_left_to_others_while_the_router_is_gone(router: ScriptedRouter) -> None:
    drain = Drain()

    async with RouterClient(RouterLink(router.folder, link()), look_s=0.02, away_s=0.3) as client:
        await router.server.close()
        client.watch(drain)
        await until(lambda: drain.over, "lines in flight are given up")


async def test_a_link_is_for_its_user_alone_and_names_its_faults(tmp_path: Path) -> None:
    link().write(tmp_path)
    assert stat.S_IMODE((tmp_path / LINK_FILE).stat().st_mode) == 0o600
    (tmp_path / LINK_FILE).write_text("{}")
    with pytest.raises(StartError, match="batches_link"):
        Link.read(tmp_path)


# ------------------------------------------------------------------ a router and its process


def folder_of(cluster: LocalCluster) -> Path:
    """The link's folder, which is the process's first argument."""
    words = Path(f"/proc/{batches_pid(cluster.router)}/cmdline").read_bytes().split(b"\0")
    return Path(os.fsdecode(words[words.index(b"batches") + 1]))


async def over(folder: Path, path: str, headers: dict[str, str], body: bytes | None = None) -> tuple[int, str]:
    """What the link's socket `ROUTER_SOCKET` or `BATCHES_SOCKET` answers."""
    connector = aiohttp.UnixConnector(str(folder))
    async with aiohttp.ClientSession(connector=connector) as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, f"http://x{path}", headers=headers, data=body) as answer:
            return answer.status, await answer.text()


async def test_the_process_is_killed_in_the_middle_and_no_line_is_lost_or_doubled(
    tmp_path: Path, sim_model: ModelFactory
) -> None:
    num_lines = 120
    model = sim_model(400, speaks=True)
    async with (
        batch_cluster(model, tmp_path / "made", {"batch_concurrency": 8}, sim_step_ms=4) as cluster,
        client_of(cluster.router.http_address) as client,
    ):
        lines = [completion(f"line-{number}", max_tokens=100) for number in range(num_lines)]
        batch = await begin(client, lines)
        before = batches_pid(cluster.router)

        async def is_halfway() -> bool:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            return counts is not None and counts.completed >= num_lines // 3

        await until(is_halfway, "a third is answered")
        os.kill(before, signal.SIGKILL)
        statuses = set[int]()

        async def is_back() -> bool:
            path = f"/v1/batches/{batch.id}"
            status, headers, said = await asyncio.to_thread(call, cluster.router.http_address, path, None)
            statuses.add(status)
            if status == 503:
                assert said["error"]["code"] == "unavailable"
                assert int(headers["retry-after"]) >= 1
            return status == 200

        await until(is_back, "another process is up")
        assert statuses == {200, 503}, "meanwhile calls are refused"
        assert batches_pid(cluster.router) != before
        folder = next((tmp_path / "made").rglob(batch.id))

        await until(lambda: len(list(folder.glob("answers-*"))) == 2, "it goes on where it was")
        done = await ended(client, batch.id)
        assert done.request_counts.model_dump() == {"total": num_lines, "completed": num_lines, "failed": 0}
        outputs = await content_of(client, done.output_file_id)
        assert [line["custom_id"] for line in outputs] == [line["custom_id"] for line in lines]


async def test_the_key_is_the_links_alone(tmp_path: Path, sim_model: ModelFactory) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(entry_for("tk-alice", "alice", "a", [], None))
    router = {"api_keys_file": keys, "internal_port": 0}
    body = json.dumps(completion("x")["body"]).encode()
    async with batch_cluster(sim_model(400, speaks=True), tmp_path / "made", router) as cluster:
        folder = folder_of(cluster)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        key = {"authorization": f"Bearer {Link.read(folder).key}"}
        line = {LINE: OnBehalf(tenant="a", key="alice", deadline_s=9.0).header(), "x-request-id": "r"}
        caller = {CALLER: OnBehalf(tenant="a", key="alice", operator=True).header()}
        # From outside the key is no key, and the link's headers say nothing.
        for path in ("/v1/models", "/v1/files", HEALTH.replace("health", "v1/usage")):
            status, _, _ = await asyncio.to_thread(call, cluster.router.http_address, path, None, key | caller)
            assert status == 401
        status, _, said = await asyncio.to_thread(
            call, cluster.router.http_address, COMPLETIONS, json.loads(body), key | line
        )
        assert (status, said["error"]["code"]) == (401, "invalid_api_key")
        alice = {"authorization": "Bearer tk-alice"}
        files = await asyncio.to_thread(call, cluster.router.http_address, "/v1/files", None, alice | caller)
        assert (files[0], files[2]["data"]) == (200, [])
        # The sockets take the key, and no other one.
        for other in (alice, {"authorization": "Bearer x"}, {}):
            assert (await over(folder / ROUTER_SOCKET, COMPLETIONS, other | line, body))[0] == 401
            assert (await over(folder / ROUTER_SOCKET, HEALTH, other))[0] == 401
            assert (await over(folder / BATCHES_SOCKET, "/v1/files", other | caller))[0] == 401
        assert (await over(folder / ROUTER_SOCKET, COMPLETIONS, key | line, body))[0] == 200
        assert (await over(folder / ROUTER_SOCKET, HEALTH, key)) == (200, '{"draining": false}')
        assert (await over(folder / ROUTER_SOCKET, "/v1/models", key | line))[0] == 404
        assert (await over(folder / BATCHES_SOCKET, "/v1/files", key | caller))[0] == 200
    assert not folder.exists()


async def test_each_line_counts_once_against_its_tenant(tmp_path: Path, sim_model: ModelFactory) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        entry_for("tk-alice", "alice", "a", [], None) + entry_for("tk-op", "op", "", [], None, operator=True)
    )
    router = {"api_keys_file": keys, "internal_port": 0, "usage_ledger": tmp_path / "usage"}
    async with (
        batch_cluster(sim_model(400, speaks=True), tmp_path / "made", router) as cluster,
        client_of(cluster.router.http_address, "tk-alice") as client,
    ):
        done = await ended(client, (await begin(client, [completion(f"{number}") for number in range(30)])).id)
        outputs = await content_of(client, done.output_file_id)
        operator = {"authorization": "Bearer tk-op"}
        _, _, usage = await asyncio.to_thread(call, cluster.router.http_address, "/v1/usage", None, operator)
        (total,) = usage["data"]
        assert (total["tenant"], total["requests"]) == ("a", 30)
        used = [line["response"]["body"]["usage"] for line in outputs]
        assert total["output_tokens"] == sum(each["completion_tokens"] for each in used)


async def test_a_stopping_router_finishes_the_lines_in_flight_and_none_runs_twice(
    tmp_path: Path, sim_model: ModelFactory
) -> None:
    num_lines = 60
    router = {"batch_concurrency": 8, "drain_s": 60.0, "usage_ledger": tmp_path / "usage"}
    async with batch_cluster(sim_model(400, speaks=True), tmp_path / "made", router, sim_step_ms=4) as cluster:
        async with client_of(cluster.router.http_address) as client:
            lines = [completion(f"line-{number}", max_tokens=100) for number in range(num_lines)]
            batch = await begin(client, lines)

            async def has_begun() -> bool:
                counts = (await client.batches.retrieve(batch.id)).request_counts
                return counts is not None and counts.completed >= 8

            await until(has_begun, "some are answered")
        cluster.router.process.send_signal(signal.SIGTERM)
        assert await cluster.router.process.wait() == 0
        folder = next((tmp_path / "made").rglob(batch.id))
        logged = b"".join(log.read_bytes() for log in folder.glob("answers-*")).count(b"\n")
        assert 8 <= logged < num_lines, "it stopped in the middle"
        await start_router_again(cluster)
        async with client_of(cluster.router.http_address) as client:
            done = await ended(client, batch.id)
            assert done.request_counts.completed == num_lines
            _, _, usage = await asyncio.to_thread(call, cluster.router.http_address, "/v1/usage", None)
            assert [total["requests"] for total in usage["data"]] == [num_lines], "what was in flight was kept"


async def test_the_process_may_be_somebody_elses(tmp_path: Path, sim_model: ModelFactory) -> None:
    """A container of the router's pod: it may start before the router, and it outlives one."""
    folder = tmp_path / "link"
    folder.mkdir(mode=0o700)
    command = [sys.executable, "-m", "batches", str(folder)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    router = {"batches_link": folder, "batch_concurrency": 8}
    try:
        async with batch_cluster(sim_model(400, speaks=True), tmp_path / "made", router, sim_step_ms=4) as cluster:
            client = client_of(cluster.router.http_address, max_retries=9)
            async with client:
                lines = [completion(f"line-{number}", max_tokens=40) for number in range(100)]
                batch = await begin(client, lines)

                async def is_halfway() -> bool:
                    counts = (await client.batches.retrieve(batch.id)).request_counts
                    return counts is not None and counts.completed >= 30

                await until(is_halfway, "a third is answered")
                before = Link.read(folder).key
                ports = {"port": int(cluster.router.address.rsplit(":", 1)[1])}
                ports["http_port"] = int(cluster.router.http_address.rsplit(":", 1)[1])
                config = cluster.topology.router.model_copy(update=ports | {"drain_s": 0.0})
                cluster.router.process.send_signal(signal.SIGKILL)
                await cluster.router.process.wait()
                cluster.router = await start_role("router", "router", config)
                assert Link.read(folder).key != before
                done = await ended(client, batch.id)
                assert done.request_counts.completed == 100
                outputs = await content_of(client, done.output_file_id)
                assert [line["custom_id"] for line in outputs] == [line["custom_id"] for line in lines]
        assert process.returncode is None
    finally:
        await stop_process(process)
    assert process.returncode == 0


async def test_a_folder_that_cannot_be_used_stops_the_routers_start(tmp_path: Path, sim_model: ModelFactory) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartError, match=r"router: batches_folder: cannot be used: .*/file/made"):
        async with batch_cluster(sim_model(400, speaks=True), tmp_path / "file" / "made"):
            pass
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StartError, match=r"router: batches_link: .*/open must be for its user alone"):
        async with batch_cluster(sim_model(400), tmp_path / "made", {"batches_link": tmp_path / "open"}):
            pass
    with pytest.raises(StartError, match=r"router: batches_link: .*107 bytes"):
        async with batch_cluster(sim_model(400), tmp_path / "made", {"batches_link": tmp_path / ("x" * 100)}):
            pass


async def test_a_large_file_passes_through_while_others_are_refused_in_time(
    tmp_path: Path, sim_model: ModelFactory
) -> None:
    async with (
        batch_cluster(sim_model(400, speaks=True), tmp_path / "made", {"max_file_mib": 40}) as cluster,
        client_of(cluster.router.http_address) as client,
    ):
        content = jsonl([completion(f"line-{number}", user="x" * 1000) for number in range(25_000)])
        assert len(content) > 20 << 20
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert file.bytes == len(content)
        assert (await client.files.content(file.id)).content == content
        # One that declares too much is refused before it is sent.
        host, port = cluster.router.http_address.split(":")
        head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: {50 << 20}\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(head.encode() + b"content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n")
            answer = await asyncio.to_thread(raw.recv, 4096)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer.lower()
        # A process that hangs is no reason for the router to hang.
        await pause(batches_pid(cluster.router))
        status, _, _ = await asyncio.to_thread(call, cluster.router.http_address, "/v1/models", None)
        assert status == 200
        os.kill(batches_pid(cluster.router), signal.SIGCONT)
        assert (await client.files.retrieve(file.id)).bytes == len(content)
