"""Sources of servers: all addresses of a host name, or a file that is read again when it changes.

The file has a URL a line, or a YAML list. Failures of all sources are typed here, too.
"""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import Field, field_validator

from cluster.config import Config
from cluster.errors import StartError
from cluster.network.kubernetes import server_url
from router.models.config import Role, ServerEntry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Server:
    """One listed server."""

    url: str
    """scheme://host:port."""
    entry: ServerEntry
    """Entry of the settings that brought it; its role may be another one in `role`."""
    role: str
    draining: bool = False
    """Whether it is about to leave: nothing new may start there."""


class SourceFailed(Exception):
    """Failure of a source for a while, with its reason; what the source listed last stays."""


class Trouble:
    """Failure of one source, logged once for each reason."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._reason = ""

    def has(self, reason: str) -> None:
        """Log `reason`, unless it was the last one."""
        if reason != self._reason:
            log.warning("%s: %s; its last servers stay", self._source, reason)
        self._reason = reason

    def is_over(self) -> None:
        """Log that the source lists servers again, if it did not."""
        if self._reason:
            log.info("%s lists servers again", self._source)
        self._reason = ""


async def polled(
    source: str, look: Callable[[], tuple[Server, ...]], every_s: float
) -> AsyncIterator[tuple[Server, ...]]:
    """Yield what `look`, which may block or raise SourceFailed, finds again and again."""
    trouble = Trouble(source)
    while True:
        try:
            servers = await _beside(look)
        except SourceFailed as error:
            trouble.has(str(error))
        else:
            trouble.is_over()
            yield servers
        await asyncio.sleep(every_s)


async def _beside(look: Callable[[], tuple[Server, ...]]) -> tuple[Server, ...]:
    """Run `look` on a thread of its own, for whose end a process that stops does not wait: resolvers may hang."""
    found: Future[tuple[Server, ...]] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(look())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="stock-servers", daemon=True).start()
    return await asyncio.wrap_future(found)


def servers_at(entry: ServerEntry, scheme: str, addresses: Mapping[str, bool], port: int | None) -> tuple[Server, ...]:
    """Return the servers of an entry at IP addresses; the values tell whether a server drains."""
    return tuple(
        Server(f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}", entry, entry.role, drains)
        for address, drains in sorted(addresses.items())
    )


LOOK_UP_S = 2.0
"""Seconds between two look-ups; resolvers of a cluster answer from memory."""


def resolved(entry: ServerEntry) -> AsyncIterator[tuple[Server, ...]]:
    """Yield the servers at a name's addresses, again and again."""
    return polled(f"DNS name {entry.dns}", lambda: look_up(entry), LOOK_UP_S)


def look_up(entry: ServerEntry) -> tuple[Server, ...]:
    """Return the servers at the addresses that the name has now. Raises SourceFailed."""
    name = urlsplit(entry.dns)
    try:
        found = socket.getaddrinfo(name.hostname, name.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SourceFailed(str(error)) from None
    return servers_at(entry, name.scheme, dict.fromkeys(of_one_family(found), False), name.port)


def of_one_family(found: Iterable[tuple[Any, ...]]) -> set[str]:
    """Return the IPv4 addresses that `getaddrinfo` found, or the IPv6 ones where it found no others.

    A server of a cluster with both families has an address of each, and is one server.
    """
    addresses = {(family, address[0]) for family, _, _, _, address in found}
    families = {family for family, _ in addresses}
    taken = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return {address for family, address in addresses if family == taken}


READ_S = 1.0
"""Seconds between two looks at the file's time and size."""


class Line(Config):
    """One server of a file."""

    url: str = Field(min_length=1)
    """Address of the server, as host:port or a URL."""
    role: Role | None = None
    """Role of the server. Default: that of the entry which names the file."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        return server_url(value)


def read_again(entry: ServerEntry, path: Path) -> AsyncIterator[tuple[Server, ...]]:
    """Yield the servers that the file lists, again and again."""
    return polled(f"file {path}", ServerFile(entry, path).look, READ_S)


class ServerFile:
    """File of servers, which is read when it stands still after a change."""

    def __init__(self, entry: ServerEntry, path: Path) -> None:
        self._entry = entry
        self._path = path
        self._seen: tuple[int, ...] | None = None
        """Inode, time and size at the last look."""
        self._read: tuple[int, ...] | None = None
        """The same of what was read last."""
        self._servers: tuple[Server, ...] = ()

    def look(self) -> tuple[Server, ...]:
        """Return the servers of the file as it was when it last stood still. Raises SourceFailed."""
        try:
            found = os.stat(self._path)
            now = found.st_ino, found.st_mtime_ns, found.st_size
            before, self._seen = self._seen, now
            if now != self._read and (self._read is None or before == now):  # else its writer may be in the middle
                self._servers = servers_in(self._path.read_text(), self._entry)
                self._read = now
        except OSError as error:
            raise SourceFailed(f"cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SourceFailed(f"is not UTF-8: {error}") from None
        return self._servers


def servers_in(text: str, entry: ServerEntry) -> tuple[Server, ...]:
    """Return the servers that a file's text lists, in its order. Raises SourceFailed."""
    lines = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
    if not lines:
        raise SourceFailed("is empty; a list without servers is []")
    found: object = lines
    if lines[0][0] in "-[{":
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SourceFailed(f"is not YAML: {error}") from None
    if not isinstance(found, list):
        raise SourceFailed("holds no list of servers")
    return tuple(_server(number, each, entry) for number, each in enumerate(found, 1))


def _server(number: int, said: object, entry: ServerEntry) -> Server:
    if not isinstance(said, str | dict):
        raise SourceFailed(f"server {number} is {said!r}, and neither a URL nor {{url, role}}")
    try:
        line = Line.parse({"url": said} if isinstance(said, str) else said)
    except StartError as error:
        raise SourceFailed(f"server {number}: {error}") from None
    return Server(line.url, entry, line.role or entry.role)
