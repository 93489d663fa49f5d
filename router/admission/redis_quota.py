"""Tenants' tokens, counted in Redis for all routers together.

Tokens are counted by windows aligned to multiples of `window_s` of the Redis server's clock, which all routers share.
No request waits for a Redis that is away: one call at most finds that out, within `limit_s`, and from then on this
router counts alone, from what it saw last, until a probe in the background says that Redis is back.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

from cluster.errors import StartError
from cluster.redis_link import RedisAway, RedisFailure, RedisLink, RedisRefused

log = logging.getLogger(__name__)

LIMIT_S = 0.1
"""A Redis that serves answers in less than a millisecond; the rest is for a busy machine."""
PROBE_S = 1.0
MAX_REFUSALS = 100
MAX_COUNTED = 10_000
"""Counts kept for the time without Redis; those of windows that are over go first."""

# KEYS: a tenant's count, {number of the window, tokens}. ARGV: window_s, tokens to add, limit.
# Answers {1 or 0, tokens counted now, microseconds until the window ends}.
_CHARGE = """
local time = redis.call('TIME')
local width = ARGV[1] * 1000000
local now = time[1] * 1000000 + time[2]
local window = math.floor(now / width)
local left = (window + 1) * width - now
local known = redis.call('HMGET', KEYS[1], 'window', 'tokens')
local tokens = 0
if known[1] == string.format('%d', window) then tokens = tonumber(known[2]) end
if tokens + ARGV[2] > tonumber(ARGV[3]) then return {0, tokens, left} end
tokens = math.max(0, tokens + ARGV[2])
redis.call('HSET', KEYS[1], 'window', string.format('%d', window), 'tokens', string.format('%d', tokens))
redis.call('PEXPIRE', KEYS[1], math.floor(left / 1000) + 1000)
return {1, tokens, left}
"""
_PROBE = "return redis.call('PING')"


@dataclass(slots=True)
class _Count:
    ends_at: float
    """Seconds since 1970."""
    tokens: int


class RedisLedger:
    """Used from one event loop. `charge` and `refund` raise nothing for a Redis that is away or refuses."""

    def __init__(
        self, url: str, cluster_name: str, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises StartError for a `redis_url` that is none. `clock` gives seconds since 1970, used without Redis."""
        self._link = RedisLink(url, limit_s)
        self._prefix = f"{cluster_name}:quota"
        self._clock = clock
        self._counts: dict[tuple[str, int], _Count] = {}
        self._probing: asyncio.Task[None] | None = None
        """While Redis is away."""
        self._refusals: set[str] = set()
        """Logged already."""

    async def start(self) -> None:
        """Raises StartError where a setting is at fault; that nobody answers is none."""
        try:
            await self._link.run(_PROBE, [], [])
        except RedisRefused as error:
            raise StartError(error.field, error.reason) from None
        except RedisAway as error:
            self._lost(error)

    async def charge(self, tenant: str, tokens: int, limit: int, window_s: int) -> float | None:
        """Count `tokens` in the current window and return None; or, where that would make more than `limit`, count
        nothing and return the seconds until the window ends."""
        answer = await self._ask(tenant, tokens, limit, window_s)
        if answer is None:
            return self._charge_alone(tenant, tokens, limit, window_s)
        taken, left_s = answer
        return None if taken else left_s

    async def refund(self, tenant: str, tokens: int, window_s: int) -> None:
        """Take back what was charged, if its window is not over; of the next one, no more than was charged in it."""
        if await self._ask(tenant, -tokens, NO_LIMIT, window_s) is None:
            self._charge_alone(tenant, -tokens, NO_LIMIT, window_s)

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self._link.close()

    async def _ask(self, tenant: str, tokens: int, limit: int, window_s: int) -> tuple[bool, float] | None:
        """Whether it was counted, and seconds until the window ends; None without Redis."""
        if self._probing is not None:
            return None
        try:
            key = f"{self._prefix}:{window_s}:{tenant}"
            taken, total, left_us = await self._link.run(_CHARGE, [key], [window_s, tokens, limit])
        except RedisRefused as error:  # at once, so that no request waits; somebody must mend it
            if str(error) not in self._refusals and len(self._refusals) < MAX_REFUSALS:
                self._refusals.add(str(error))
                log.error("this router counts alone: %s", error)
            return None
        except RedisFailure as error:
            self._lost(error)
            return None
        left_s = left_us / 1e6
        self._keep(tenant, window_s, _Count(self._clock() + left_s, total))
        return bool(taken), left_s

    # ------------------------------------------------------------------ without Redis

    def _charge_alone(self, tenant: str, tokens: int, limit: int, window_s: int) -> float | None:
        now = self._clock()
        count = self._counts.get((tenant, window_s))
        if count is None or now >= count.ends_at:
            count = _Count((math.floor(now / window_s) + 1) * window_s, 0)
        if count.tokens + tokens > limit:
            return count.ends_at - now
        count.tokens = max(0, count.tokens + tokens)
        self._keep(tenant, window_s, count)
        return None

    def _keep(self, tenant: str, window_s: int, count: _Count) -> None:
        if len(self._counts) >= MAX_COUNTED and (tenant, window_s) not in self._counts:
            now = self._clock()
            self._counts = {key: kept for key, kept in self._counts.items() if kept.ends_at > now}
            while len(self._counts) >= MAX_COUNTED:
                del self._counts[next(iter(self._counts))]
        self._counts[tenant, window_s] = count

    def _lost(self, error: RedisFailure) -> None:
        if self._probing is None:
            log.warning("this router counts tenants' tokens alone until Redis is back: %s", error)
            # Of no request, though one found it out.
            self._probing = asyncio.get_running_loop().create_task(self._probe(), context=Context())

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                await self._link.run(_PROBE, [], [])
            except RedisFailure:
                continue  # said when it began
            log.warning("tenants' tokens are counted in Redis at %s again", self._link.where)
            self._probing = None
            return


NO_LIMIT = 2**53
"""More than is ever counted; Lua's numbers are exact below it."""
