"""HTTP calls to the servers of lenders, on a thread of their own.

A lender computes a prompt because its own server is asked to: `POST /v1/completions` with token ids and one token of
output. So its own admission, authentication and abort apply, and a closed connection cancels the work.
"""

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from cluster.errors import StartError
from tandem_connector.references import ASKS_FOR_REFERENCE, Reference, read_reference
from tandem_connector.settings import EXTRA

log = logging.getLogger(__name__)

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
            await asyncio.gather(*others, return_exceptions=True)
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
