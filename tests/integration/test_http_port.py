"""What browsers, proxies and scrapers ask of the HTTP port: preflights, compressed bodies, /ping and /metrics."""

import asyncio
import gzip
import http.client
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster.errors import StartError
from router.config import RouterConfig
from router.security.api_keys import entry_for
from support.batch_site import CHATS, COMPLETIONS, with_chats
from support.openai_http import RawConnection, http_cluster
from tandem.local.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = "https://chat.example.com"
CLIENT, OPERATOR = {"authorization": "Bearer tk-client"}, {"authorization": "Bearer tk-operator"}
ASKING: dict[str, Any] = {"model": "simulated", "max_tokens": 4, "temperature": 0}
CHAT = json.dumps(ASKING | {"messages": [{"role": "user", "content": "word1 word2"}]}).encode()
POSTED = {
    CHATS: CHAT,
    "/v1/messages": CHAT,
    COMPLETIONS: json.dumps(ASKING | {"prompt": "word1"}).encode(),
    "/v1/responses": json.dumps({"model": "simulated", "input": "word1", "max_output_tokens": 4}).encode(),
    "/tokenize": json.dumps({"prompt": "word1"}).encode(),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    sim_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("port")
    keys = folder / "keys.yaml"
    keys.write_text(
        entry_for("tk-client", "client", "a", [], None) + entry_for("tk-operator", "op", "", [], None, operator=True)
    )
    router = {"api_keys_file": keys, "internal_port": 0, "batches_folder": folder / "batches", "max_body_mib": 1}
    router |= {"cors_origins": (PAGE,), "metrics_on_http_port": True}
    async with http_cluster(with_chats(sim_model(400, speaks=True)), 1, router, engine="sim") as started:
        yield started


async def ask(
    cluster: LocalCluster, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body); header names have underscores here."""

    def asked() -> tuple[int, dict[str, str], bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(http.client.HTTPConnection(cluster.router.http_address, timeout=60)) as connection:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    return await asyncio.to_thread(asked)


ALLOWED = "authorization,content-type,x-stainless-lang"


async def preflight(cluster: LocalCluster, path: str, origin: str) -> tuple[int, dict[str, str], bytes]:
    wanted = {"access_control_request_method": "POST", "access_control_request_headers": ALLOWED}
    return await ask(cluster, "OPTIONS", path, origin=origin, **wanted)


@pytest.mark.parametrize("path", [*POSTED, "/v1/files", "/v1/models"])
async def test_a_preflight_needs_no_key_and_allows_the_clients_headers(cluster: LocalCluster, path: str) -> None:
    status, headers, _ = await preflight(cluster, path, PAGE)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert headers["access-control-allow-headers"] == ALLOWED
    assert "POST" in headers["access-control-allow-methods"]
    status, headers, _ = await preflight(cluster, path, "https://other.example.com")
    assert status == 400
    assert "access-control-allow-origin" not in headers


async def test_answers_streams_and_errors_say_which_page_may_read_them(cluster: LocalCluster) -> None:
    stream = json.dumps(json.loads(CHAT) | {"stream": True}).encode()
    wrong = json.dumps(json.loads(CHAT) | {"temperature": -1}).encode()
    for status, body, headers in (
        (200, CHAT, CLIENT),
        (200, stream, CLIENT),
        (400, wrong, CLIENT),
        (400, b"no JSON", CLIENT),
        (401, CHAT, {}),
        (404, CHAT.replace(b"simulated", b"another"), CLIENT),
    ):
        got, seen, content = await ask(cluster, "POST", CHATS, body, origin=PAGE, **headers)
        assert (got, seen.get("access-control-allow-origin")) == (status, PAGE)
        assert got == 401 or "x-request-id" in seen["access-control-expose-headers"]
        if body is stream:
            assert content.endswith(b"data: [DONE]\n\n")
    got, seen, _ = await ask(cluster, "POST", CHATS, CHAT, origin="https://other.example.com", **CLIENT)
    assert got == 200
    assert "access-control-allow-origin" not in seen, "the browser does not show it to the page"


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "https://a b", ""])
async def test_what_is_no_origin_is_refused_at_the_start(sim_model: Callable[..., Path], origin: str) -> None:
    with pytest.raises(StartError, match="not an origin") as caught:
        RouterConfig.parse({"model": sim_model(400), "cors_origins": [origin]})
    assert caught.value.field.startswith("cors_origins")


@pytest.mark.parametrize("path", POSTED)
async def test_a_compressed_body_is_read_like_another(cluster: LocalCluster, path: str) -> None:
    whole = POSTED[path]
    for encoding, body in (("identity", whole), ("gzip", gzip.compress(whole)), ("deflate", zlib.compress(whole))):
        got = await ask(cluster, "POST", path, body, content_encoding=encoding, **CLIENT)
        assert got[0] == 200, got
    for status, encoding, body in (
        (415, "br", whole),
        (400, "gzip", whole),
        (413, "gzip", gzip.compress(bytes(64 << 20))),
    ):
        got = await ask(cluster, "POST", path, body, content_encoding=encoding, **CLIENT)
        assert got[0] == status, got
        said = json.loads(got[2])["error"]
        if status != 413:
            assert "content-encoding" in said["message"]


async def test_an_upload_has_no_encoding_and_a_batch_may(cluster: LocalCluster) -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--x--\r\n'
    kind = {"content_type": "multipart/form-data; boundary=x"} | CLIENT
    got = await ask(cluster, "POST", "/v1/files", gzip.compress(form), content_encoding="gzip", **kind)
    assert (got[0], json.loads(got[2])["error"]["param"]) == (415, "content-encoding")
    asked = gzip.compress(b'{"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}')
    got = await ask(cluster, "POST", "/v1/batches", asked, content_encoding="gzip", **CLIENT)
    assert (got[0], json.loads(got[2])["error"]["param"]) == (400, "input_file_id"), (
        "it was read: no such file is known"
    )


async def test_ping_is_open_and_metrics_are_the_operators(cluster: LocalCluster) -> None:
    assert (await ask(cluster, "GET", "/ping"))[0] == 200
    assert (await ask(cluster, "GET", "/metrics"))[0] == 401
    assert (await ask(cluster, "GET", "/metrics", **CLIENT))[0] == 403
    status, headers, content = await ask(cluster, "GET", "/metrics", **OPERATOR)
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b"tandem_time_to_first_token_seconds_count" in content


async def test_without_settings_there_is_no_cors_and_no_metrics(sim_model: Callable[..., Path]) -> None:
    async with http_cluster(sim_model(400, speaks=True), engine="sim") as plain:
        assert (await preflight(plain, COMPLETIONS, PAGE))[0] == 405
        _, headers, _ = await ask(plain, "GET", "/health", origin=PAGE)
        assert "access-control-allow-origin" not in headers
        status, _, content = await ask(plain, "GET", "/metrics")
        assert status == 404
        assert "metrics_on_http_port" in json.loads(content)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(cluster: LocalCluster, stream: bool) -> None:
    body = json.dumps(ASKING | {"prompt": "word1", "stream": stream}).encode()
    lines = ["POST /v1/completions HTTP/1.0", f"content-length: {len(body)}", "authorization: Bearer tk-client"]

    def exchanged() -> tuple[bytes, bytes]:
        with closing(RawConnection(cluster.router.http_address)) as connection:
            connection.send("\r\n".join([*lines, "", ""]).encode() + body)
            received = b""
            while part := connection.read(1 << 16):
                received += part
        head, _, rest = received.partition(b"\r\n\r\n")
        return head, rest

    head, rest = await asyncio.to_thread(exchanged)
    assert b"200 OK" in head
    assert b"transfer-encoding" not in head
    if stream:
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"data: [DONE]\n\n")
    else:
        assert len(json.loads(rest)["choices"]) == 1
        assert f"content-length: {len(rest)}".encode() in head


async def test_a_text_is_tokenised_with_and_without_special_tokens(cluster: LocalCluster) -> None:
    for wanted, status in ((True, 200), (False, 200), (3, 400)):
        body = json.dumps({"prompt": "word1", "add_special_tokens": wanted}).encode()
        got, _, answer = await ask(cluster, "POST", "/tokenize", body, **CLIENT)
        assert got == status, answer
    chat = {"messages": [{"role": "user", "content": "word1"}], "add_special_tokens": True}
    got, _, answer = await ask(cluster, "POST", "/tokenize", json.dumps(chat).encode(), **CLIENT)
    assert (got, json.loads(answer)["error"]["param"]) == (400, "add_special_tokens")
