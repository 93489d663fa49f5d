"""HTTP calls to the servers of lenders, on a thread of their own.

A lender computes a prompt because its own server is asked to: `POST /v1/completions` with token ids and one token of
output. So its own admission, authentication and abort apply, and a closed connection cancels the work.

References to a lender, as they stand in `kv_transfer_params` of answers and requests.

The keys are those of NixlConnector, so proxies made for it pass them on. A reference names a process and no blocks:
a borrower asks that process for the blocks of its own prompt, by their names.
"""

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from cluster.errors import StartError
from loans.network import Peer
from tandem_connector.settings import EXTRA

log = logging.getLogger(__name__)


ASKS_FOR_REFERENCE = {"do_remote_decode": True, "do_remote_prefill": False}
PREFIX = "tandem-"
INCARNATION_BYTES = 16


class Reference(NamedTuple):
    """A lender's engine."""

    peer: Peer
    rank: int
    """Its data-parallel rank within its server."""


def write_reference(peer: Peer, rank: int, request_id: str, tensor_parallel: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` of an answer."""
    host, _, port = peer.address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{PREFIX}{peer.incarnation.hex()}-{rank}",
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": int(port),
        "remote_block_ids": [],
        "tp_size": tensor_parallel,
    }


def read_reference(params: Mapping[str, Any]) -> Reference:
    """Undo `write_reference`. Raises ValueError with the name of the key at fault."""
    engine, host, port = (params.get(key) for key in ("remote_engine_id", "remote_host", "remote_port"))
    if not isinstance(engine, str) or not engine.startswith(PREFIX):
        raise ValueError(f"kv_transfer_params.remote_engine_id: is no engine with TandemConnector: {engine!r:.80}")
    incarnation, _, rank = engine.removeprefix(PREFIX).partition("-")
    try:
        identity, number = bytes.fromhex(incarnation), int(rank)
    except ValueError:
        identity, number = b"", -1
    if len(identity) != INCARNATION_BYTES or number < 0:
        raise ValueError(f"kv_transfer_params.remote_engine_id: is no engine with TandemConnector: {engine!r:.80}")
    if not isinstance(host, str) or not 0 < len(host) < 256:
        raise ValueError(f"kv_transfer_params.remote_host: must be a host name or an address, not {host!r:.80}")
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"kv_transfer_params.remote_port: must be a port from 1 to 65535, not {port!r:.80}")
    return Reference(Peer(f"{host}:{port}", f"{host}:{port}", identity), number)


PATH = "/v1/completions"
RANK_HEADER = "X-data-parallel-rank"
"""Header by which vLLM's server takes a data-parallel rank."""
PROBE_S = 10.0
"""Seconds for the first answer of a server."""
KEEP_S = 2.0
"""Seconds for which an idle connection is kept; vLLM's server closes it after 5."""
MAX_ERROR = 200
"""Characters of a server's error that are repeated."""

Deliver = Callable[[Callable[[], object]], None]
"""Function that has a call made by the thread of loans. From any thread."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that a lender shall compute."""

    token_ids: list[int]
    model: str = ""
    """Name of the adapter; empty for the server's own model."""
    cache_salt: str = ""
    priority: int = 0
    rank: int = 0
    """Data-parallel rank of the lender that computes it."""


class Servers:
    """Calls to servers; every answer comes by `deliver`."""

    def __init__(self, api_key: str, ca_file: Path | None, deliver: Deliver) -> None:
        """Create it. Raises StartError for authorities that cannot be read."""
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._deliver = deliver
        try:
            self._ssl = ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise StartError(f"{EXTRA}.lender_ca_file", f"{ca_file} has no certificate: {error}") from None
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="tandem-servers", daemon=True)
        self._thread.start()

    def addresses(self, url: str, on_done: Callable[[list[str]], object]) -> None:
        """Look up the URLs of all servers behind the name in a URL; none where the name is unknown."""
        self._begin(self._addresses(url, on_done))

    def probe(self, url: str, on_done: Callable[[Reference | None, str], object]) -> None:
        """Ask a server who it is: `on_done` gets its reference, or why there is none."""
        self._begin(self._probe(url, on_done))

    def post(self, url: str, prompt: Prompt, on_done: Callable[[str], object]) -> "Future[None]":
        """Have a server compute a prompt; `on_done` gets why it did not, or nothing. Cancel the future to cancel."""
        return self._begin(self._post(url, prompt, on_done))

    def close(self) -> None:
        """Cancel all calls and end the thread."""

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others)
            if self._session is not None:
                await self._session.close()
            self._loop.stop()

        self._begin(end())
        self._thread.join(timeout=5)

    def _begin(self, call: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    async def _addresses(self, url: str, on_done: Callable[[list[str]], object]) -> None:
        parts = urlsplit(url)
        urls = [url]
        if parts.scheme == "http":  # a certificate is of a name, so https servers keep theirs
            try:
                found = await self._loop.getaddrinfo(parts.hostname, parts.port, type=1)
            except OSError as error:
                log.warning("the lender %s is not found: %s", url, error)
                found = []
            hosts = dict.fromkeys(str(each[4][0]) for each in found)
            netlocs = [f"[{host}]:{parts.port}" if ":" in host else f"{host}:{parts.port}" for host in hosts]
            urls = [urlunsplit((parts.scheme, netloc, "", "", "")) for netloc in netlocs]
        self._deliver(lambda: on_done(urls))

    async def _probe(self, url: str, on_done: Callable[[Reference | None, str], object]) -> None:
        reference, failure = None, ""
        try:
            async with asyncio.timeout(PROBE_S):
                answer = await self._ask(url, {"prompt": [0], "max_tokens": 1}, {})
            reference = read_reference(answer.get("kv_transfer_params") or {})
        except ValueError as error:
            failure = f"{url} is no server with TandemConnector: {error}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = f"{url}: {_text_of(error)}"
        self._deliver(lambda: on_done(reference, failure))

    async def _post(self, url: str, prompt: Prompt, on_done: Callable[[str], object]) -> None:
        body: dict[str, Any] = {"prompt": prompt.token_ids, "max_tokens": 1}
        if prompt.model:
            body["model"] = prompt.model
        if prompt.cache_salt:
            body["cache_salt"] = prompt.cache_salt
        if prompt.priority:
            body["priority"] = prompt.priority
        failure = ""
        try:
            await self._ask(url, body, {RANK_HEADER: str(prompt.rank)} if prompt.rank else {})
        except (aiohttp.ClientError, OSError, ValueError) as error:
            failure = f"{url}: {_text_of(error)}"
        self._deliver(lambda: on_done(failure))

    async def _ask(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Return a server's answer. Raises ValueError, OSError or aiohttp's errors."""
        if self._session is None:
            limits = aiohttp.TCPConnector(limit=0, ssl=self._ssl, keepalive_timeout=KEEP_S)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=3.0)
            self._session = aiohttp.ClientSession(connector=limits, timeout=timeout, trust_env=False)
        message = {**body, "temperature": 0, "kv_transfer_params": ASKS_FOR_REFERENCE}
        async with self._session.post(url + PATH, json=message, headers={**self._headers, **headers}) as answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {(await answer.text())[:MAX_ERROR]}")
            found = await answer.json()
        if not isinstance(found, dict):
            raise ValueError("its answer is no JSON object")
        return found


def _text_of(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):  # its own text has names of aiohttp's arguments
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    return str(error) or type(error).__name__
