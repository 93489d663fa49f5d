"""Servers that a source lists, and failures of sources."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from router.models.fleet_config import ServerEntry

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
