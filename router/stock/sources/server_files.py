"""Source of servers: a file with a URL a line, or with a YAML list, which is read again when it changes."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import yaml
from pydantic import Field, field_validator

from cluster.config import Config
from cluster.errors import StartError
from cluster.network.urls import server_url
from router.models.fleet_config import Role, ServerEntry
from router.stock.sources.servers import Server, SourceFailed, polled

EVERY_S = 1.0
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
    return polled(f"file {path}", ServerFile(entry, path).look, EVERY_S)


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
