"""Claims by leases in Redis, for routers that share a volume but no kernel."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from batches.claims import Claim, Claims
from batches.storage.file_store import BatchFolder
from cluster.network.redis_link import RedisFailure, RedisLink
from cluster.process.tasks import Tasks

log = logging.getLogger(__name__)
EXPIRY_S = 15.0
"""Seconds after which the lease of a router that died ends."""
HEARTBEAT_S = 3.0
SAFE_SHARE = 0.8
"""Share of the expiry after which a router that could not renew its lease stops to run the batch."""
LIMIT_S = 1.0
"""Time limit of a call in seconds."""
# KEYS: the batch. ARGV: the holder, and milliseconds until expiry. Takes or renews a lease; returns 1, or 0 where
# another one has it. A Redis that comes back empty gives the lease to its holder again.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisClaims(Claims):
    """Claims under the keys CLUSTER_NAME:batch:ID."""

    def __init__(
        self,
        url: str,
        cluster_name: str,
        expiry_s: float = EXPIRY_S,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the connection.

        Raises StartError for an invalid `redis_url`.
        """
        self._link = RedisLink(url, LIMIT_S)
        self._prefix = f"{cluster_name}:batch"
        self._expiry_s = expiry_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._is_away = False

    async def claim(self, batch: BatchFolder) -> Claim | None:
        lease = _Lease(self, f"{self._prefix}:{batch.id}", self._clock())
        try:
            has_it = await self.take(lease)
        except RedisFailure as error:
            if not self._is_away:
                log.warning("no batch can be claimed: %s", error)
            self._is_away = True
            return None
        self._is_away = False
        if not has_it:
            return None
        lease.keep()
        return lease

    async def close(self) -> None:
        await self._link.close()

    async def take(self, lease: "_Lease") -> bool:
        """Take or renew a lease; return whether it is this router's.

        Raises RedisFailure.
        """
        arguments: list[str | int] = [lease.holder, int(self._expiry_s * 1e3)]
        return bool(await self._link.run(_TAKE, [lease.key], arguments))

    async def renew(self, lease: "_Lease") -> None:
        """Renew a lease until it is lost."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            asked_at = self._clock()
            try:
                if not await self.take(lease):
                    log.warning("another router has taken over %s", lease.key)
                    return
                lease.renewed_at = asked_at
            except RedisFailure as error:
                if self._clock() - lease.renewed_at > SAFE_SHARE * self._expiry_s:
                    log.warning("%s is given up: its lease could not be renewed: %s", lease.key, error)
                    return

    async def drop(self, lease: "_Lease") -> None:
        try:
            await self._link.run(_RELEASE, [lease.key], [lease.holder])
        except RedisFailure as error:
            log.info("the lease of %s could not be released and ends by itself: %s", lease.key, error)


class _Lease(Claim):
    def __init__(self, claims: RedisClaims, key: str, now: float) -> None:
        super().__init__()
        self._claims = claims
        self.key = key
        self.holder = secrets.token_hex(16)
        self.renewed_at = now
        """Time before the last call that renewed it."""
        self.keeping = Tasks("a lease is renewed no more")

    def keep(self) -> None:
        """Renew the lease from now on."""
        self.keeping.spawn(self._claims.renew(self)).add_done_callback(lambda _: self.lost.set())

    async def release(self) -> None:
        await self.keeping.close()
        await self._claims.drop(self)
