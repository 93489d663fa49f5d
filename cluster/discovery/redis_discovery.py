"""Discovery through Redis: a sorted set of routers with expiry times by the server's clock.

A router announces itself every second and expires a few seconds after its last announcement. Redis may be killed, hang
or come back empty at any time: all processes go on with what they know, and a second later the set is complete again.
"""

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import asdict

from cluster.discovery.discovery import Discovery, RouterEntry
from cluster.errors import StartError
from cluster.network.redis_link import RedisAway, RedisFailure, RedisLink, RedisRefused
from cluster.process.tasks import Tasks

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between announcements, and between listings."""
EXPIRY_S = 5.0
"""Seconds until a router expires; several announcements may be lost before that."""
LIMIT_S = 1.0
REFUSED_INTERVAL_S = 5.0
"""Seconds between attempts after Redis refused: an operator must act first."""

# ARGV: milliseconds until expiry, and the router's entry; '' only lists. Returns all entries.
_EXCHANGE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if ARGV[2] ~= '' then
  redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""
_WITHDRAW = "return redis.call('ZREM', KEYS[1], ARGV[1])"


class RedisDiscovery(Discovery):
    """Discovery under the key CLUSTER_NAME:routers.

    Used from one event loop; no request ever waits for it.
    """

    def __init__(self, url: str, cluster_name: str, interval_s: float = INTERVAL_S, expiry_s: float = EXPIRY_S) -> None:
        """Prepare the connection.

        Raises StartError for an invalid `redis_url`.
        """
        self._link = RedisLink(url, LIMIT_S)
        self._key = f"{cluster_name}:routers"
        self._interval_s = interval_s
        self._expiry_ms = int(expiry_s * 1e3)
        self._failure = ""
        """Failure that was logged last; empty while Redis answers."""
        self._entry = ""
        self._tasks = Tasks("this router is announced no more")

    async def start(self) -> None:
        try:
            await self._exchange("")
        except RedisRefused as error:
            raise StartError(error.field, error.reason) from None
        except RedisAway as error:
            self._failed(error)

    def announce(self, router: RouterEntry) -> None:
        assert not self._entry
        self._entry = json.dumps(asdict(router), sort_keys=True)
        self._tasks.spawn(self._announce())

    async def withdraw(self) -> None:
        entry, self._entry = self._entry, ""
        if not entry:
            return
        await self._tasks.close()
        try:
            await self._link.run(_WITHDRAW, [self._key], [entry])
        except RedisFailure as error:
            log.info("this router's entry in Redis was not removed and expires by itself: %s", error)

    async def listings(self) -> AsyncIterator[frozenset[str]]:
        while True:
            entries = await self._try_exchange("")
            if entries is not None:
                yield frozenset(router.address for router in entries)
            await self._pause()

    async def close(self) -> None:
        await self._tasks.close()
        with contextlib.suppress(OSError):
            await self._link.close()

    async def _announce(self) -> None:
        while True:
            await self._try_exchange(self._entry)
            await self._pause()

    async def _pause(self) -> None:
        """Sleep with jitter, so that a fleet that lost Redis together does not return together."""
        mean_s = REFUSED_INTERVAL_S if self._failure.startswith("refused") else self._interval_s
        await asyncio.sleep(mean_s * random.uniform(0.8, 1.2))

    async def _try_exchange(self, entry: str) -> list[RouterEntry] | None:
        """Return the entries, or None when Redis did not answer or refused."""
        try:
            entries = await self._exchange(entry)
        except RedisFailure as error:
            self._failed(error)
            return None
        if self._failure:
            log.warning("discovery works again: Redis at %s answers", self._link.where)
            self._failure = ""
        return entries

    async def _exchange(self, entry: str) -> list[RouterEntry]:
        reply: list[str] = await self._link.run(_EXCHANGE, [self._key], [self._expiry_ms, entry])
        return [router for text in reply if (router := _read_entry(text)) is not None]

    def _failed(self, error: RedisFailure) -> None:
        """Log each kind of failure once."""
        kind = "refused" if isinstance(error, RedisRefused) else "away"
        if self._failure != kind:
            log.warning("discovery does not work, the routers known so far are kept: %s", error)
            self._failure = kind


def _read_entry(text: str) -> RouterEntry | None:
    """Return the parsed entry, or None for an entry that no router of this version wrote."""
    try:
        entry = RouterEntry(**json.loads(text))
    except (TypeError, ValueError):
        log.info("ignored an entry in Redis that does not describe a router: %.200s", text)
        return None
    return entry if all(isinstance(value, str) and value for value in asdict(entry).values()) else None
