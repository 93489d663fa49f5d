"""HTTP calls to one stock server."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from cluster.errors import StartError, Unavailable
from router.models.config import FleetConfig
from router.stock.completions import Call, error_of

CONNECT_S = 3.0
"""Seconds for a connection, while the request could run elsewhere."""
COMPLETIONS = "/v1/completions"
DATA, END = b"data: ", b"\n\n"
MAX_ERROR_CHARS = 500


@dataclass(slots=True)
class EventReader:
    """Reader of server-sent events, which arrive in pieces of any size."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are whole now."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(END)
        return [each[len(DATA) :] for each in whole if each.startswith(DATA)]


@dataclass(slots=True)
class ServerAccess:
    """HTTP session for all servers of a fleet, with their API key and authorities."""

    session: aiohttp.ClientSession
    headers: Mapping[str, str]
    tls: ssl.SSLContext | bool = True

    @classmethod
    def of(cls, config: FleetConfig) -> "ServerAccess":
        """Open the session, within a running loop. Raises StartError for files that cannot be read."""
        key = _read(config.api_key_file, "api_key_file").strip()
        tls: ssl.SSLContext | bool = True
        if config.ca_file is not None:
            try:
                tls = ssl.create_default_context(cadata=_read(config.ca_file, "ca_file"))
            except ssl.SSLError as error:
                raise StartError("fleet.ca_file", f"{config.ca_file} has no certificates: {error}") from None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return cls(session, {"Authorization": f"Bearer {key}"} if key else {}, tls)

    async def close(self) -> None:
        await self.session.close()


def _read(path: Path | None, key: str) -> str:
    if path is None:
        return ""
    try:
        return path.read_text()
    except OSError as error:
        raise StartError(f"fleet.{key}", f"cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class ServerApi:
    """Calls to one server. Its name in errors is its host and port."""

    url: str
    access: ServerAccess
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", urlsplit(self.url).netloc)

    async def get(self, path: str, timeout_s: float) -> tuple[int, str]:
        """Return status and text. Raises Unavailable."""
        return await self._ask("GET", path, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[int, str]:
        """Return status and text. Raises Unavailable."""
        return await self._ask("POST", path, timeout_s, data=msgspec.json.encode(body))

    async def _ask(self, method: str, path: str, timeout_s: float, **body: Any) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        headers = {"Content-Type": "application/json", **self.access.headers}
        try:
            async with self.access.session.request(
                method, self.url + path, headers=headers, ssl=self.access.tls, timeout=timeout, **body
            ) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeError) as error:
            raise self.unavailable(error) from None

    async def complete(self, call: Call, request_id: str) -> aiohttp.ClientResponse:
        """Return the open answer to a completion. Raises ServiceError for a server that refuses it."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, **self.access.headers}
        body = msgspec.json.encode(call.body)
        try:
            answer = await self.access.session.post(
                self.url + COMPLETIONS, data=body, headers=headers, ssl=self.access.tls
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unavailable(error) from None
        if answer.status == 200:
            return answer
        try:
            message = (await answer.text(errors="replace"))[:MAX_ERROR_CHARS]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unavailable(error) from None
        finally:
            answer.close()
        raise error_of(answer.status, _message_of(message), self.name)

    def unavailable(self, error: Exception) -> Unavailable:
        """Return the error of a call that failed below HTTP."""
        if isinstance(error, aiohttp.ClientConnectorError) and error.strerror:
            return Unavailable(f"server {self.name} takes no connection: {error.strerror}")
        return Unavailable(f"server {self.name}: {str(error) or type(error).__name__}")


def _message_of(text: str) -> str:
    """Return the message in an error's body, in OpenAI's form or as it is."""
    try:
        body = msgspec.json.decode(text)
        return str(body["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return text
