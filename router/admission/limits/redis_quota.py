"""Quota ledger in Redis, counted for all routers together.

Windows are aligned to multiples of `window_s` of the Redis server's clock, which all routers share. No request waits
for an unreachable Redis: one call at most notices it, within `limit_s`. From then on this router counts alone, from the
last known state, until a background probe succeeds.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from cluster.errors import StartError
from cluster.network.redis_link import RedisAway, RedisFailure, RedisLink, RedisRefused
from cluster.process.tasks import Tasks

log = logging.getLogger(__name__)

LIMIT_S = 0.1
"""Time limit of a call in seconds. Redis answers in less than a millisecond; the rest is for a busy machine."""
PROBE_S = 1.0
MAX_REFUSALS = 100
MAX_COUNTED = 10_000
"""Counts kept for the time without Redis; those of past windows go first."""

# KEYS: tenants' counts, each {number of the window, tokens}. ARGV, for each: window_s, tokens to add, limit. Returns
# for each {1 or 0, tokens counted now, microseconds until the window ends}, or {-1, type of the key}.
_CHARGE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answers = {}
for i, key in ipairs(KEYS) do
  local width = ARGV[3 * i - 2] * 1000000
  local added, limit = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  local window = math.floor(now / width)
  local left = (window + 1) * width - now
  local known = redis.pcall('HMGET', key, 'window', 'tokens')
  if known.err then
    answers[i] = {-1, known.err}
  else
    local tokens = 0
    if known[1] == string.format('%d', window) then tokens = tonumber(known[2]) end
    if tokens + added > limit then
      answers[i] = {0, tokens, left}
    else
      tokens = math.max(0, tokens + added)
      redis.call('HSET', key, 'window', string.format('%d', window), 'tokens', string.format('%d', tokens))
      redis.call('PEXPIRE', key, math.floor(left / 1000) + 1000)
      answers[i] = {1, tokens, left}
    end
  end
end
return answers
"""
_PROBE = "return redis.call('PING')"


MAX_TOGETHER = 256
"""Charges per call. A burst of requests is few calls: one call each would look like a slow Redis."""
MAX_EXTENSIONS = 5
"""Extensions of a call's time limit while this process itself was too slow to read the answer."""


@dataclass(slots=True, eq=False)
class _Charge:
    """A charge in flight."""

    tenant: str
    tokens: int
    limit: int
    window_s: int
    answer: "asyncio.Future[tuple[bool, float] | None]"


@dataclass(slots=True)
class _Count:
    ends_at: float
    """End of the window in seconds since 1970."""
    tokens: int


class RedisLedger:
    """Ledger used from one event loop.

    `charge` and `refund` raise nothing when Redis is unreachable or refuses.
    """

    def __init__(
        self, url: str, cluster_name: str, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.time
    ) -> None:
        """Prepare the connection.

        Raises StartError for an invalid `redis_url`.

        `clock` returns seconds since 1970, used without Redis.
        """
        self._link = RedisLink(url, limit_s * (1 + MAX_EXTENSIONS))
        self._limit_s = limit_s
        self._waiting: list[_Charge] = []
        """Charges not sent yet."""
        self._tasks = Tasks("tenants' tokens could not be counted")
        self._is_sending = False
        self._prefix = f"{cluster_name}:quota"
        self._clock = clock
        self._counts: dict[tuple[str, int], _Count] = {}
        self._is_probing = False
        """Whether Redis is unreachable."""
        self._refusals: set[str] = set()
        """Refusals already logged."""

    async def start(self) -> None:
        """Start.

        Raises StartError for a wrong setting; an unreachable Redis is retried.
        """
        try:
            await self._link.run(_PROBE, [], [])
        except RedisRefused as error:
            raise StartError(error.field, error.reason) from None
        except RedisAway as error:
            self._lost(error)

    async def charge(self, tenant: str, tokens: int, limit: int, window_s: int) -> float | None:
        """Count `tokens` and return None; beyond `limit` count nothing and return the seconds until the window ends."""
        answer = await self._ask(tenant, tokens, limit, window_s)
        if answer is None:
            return self._charge_alone(tenant, tokens, limit, window_s)
        taken, left_s = answer
        return None if taken else left_s

    async def refund(self, tenant: str, tokens: int, window_s: int) -> None:
        """Refund a charge if its window is not over; in the next window at most what was charged in it."""
        if await self._ask(tenant, -tokens, NO_LIMIT, window_s) is None:
            self._charge_alone(tenant, -tokens, NO_LIMIT, window_s)

    async def close(self) -> None:
        await self._tasks.close()
        await self._link.close()

    async def _ask(self, tenant: str, tokens: int, limit: int, window_s: int) -> tuple[bool, float] | None:
        """Return whether the tokens were counted, and the seconds until the window ends; None without Redis."""
        if self._is_probing:
            return None
        charge = _Charge(tenant, tokens, limit, window_s, asyncio.get_running_loop().create_future())
        self._waiting.append(charge)
        if not self._is_sending:  # a context of no request, since it sends other requests' charges too
            self._is_sending = True
            self._tasks.spawn(self._send(), context=Context())
        return await charge.answer

    async def _send(self) -> None:
        """Send one call at a time, with all charges collected during the one before."""
        batch: list[_Charge] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_TOGETHER], self._waiting[MAX_TOGETHER:]
                try:
                    answers = await self._call(batch)
                except RedisRefused as error:  # at once, so that no request waits; an operator must act
                    self._refused(error)
                except RedisFailure as error:
                    self._lost(error)
                    batch, self._waiting = [*batch, *self._waiting], []
                else:
                    for charge, answer in zip(batch, answers, strict=True):
                        self._answered(charge, answer)
                _leave(batch)
        finally:
            self._is_sending = False
            _leave([*batch, *self._waiting])
            self._waiting = []

    async def _call(self, batch: Sequence[_Charge]) -> Sequence[Any]:
        """Run the script.

        Raises RedisFailure. A process too busy to read the answer extends the time limit.
        """
        keys = [f"{self._prefix}:{charge.window_s}:{charge.tenant}" for charge in batch]
        arguments = [figure for charge in batch for figure in (charge.window_s, charge.tokens, charge.limit)]
        async with Tasks() as tasks:
            call = tasks.spawn(self._link.run(_CHARGE, keys, arguments))
            for _ in range(1 + MAX_EXTENSIONS):
                began_at = time.monotonic()
                await asyncio.wait([call], timeout=self._limit_s)
                if call.done():
                    answers: Sequence[Any] = call.result()
                    return answers
                if time.monotonic() - began_at < 1.2 * self._limit_s:
                    break
            raise RedisAway(f"Redis at {self._link.where}: no answer within {self._limit_s:g} s")

    def _answered(self, charge: _Charge, answer: Sequence[Any]) -> None:
        taken, *rest = answer
        if taken == -1:
            key = f"{self._prefix}:{charge.window_s}:{charge.tenant}"
            self._refused(RedisRefused("cluster_name", f"in Redis at {self._link.where}, {key!r} is: {rest[0]}"))
            return
        total, left_us = rest
        left_s = left_us / 1e6
        self._keep(charge.tenant, charge.window_s, _Count(self._clock() + left_s, total))
        if not charge.answer.done():
            charge.answer.set_result((bool(taken), left_s))
        elif taken and charge.tokens > 0:  # the caller is gone
            unheard = asyncio.get_running_loop().create_future()
            self._waiting.append(_Charge(charge.tenant, -charge.tokens, NO_LIMIT, charge.window_s, unheard))

    def _refused(self, error: RedisRefused) -> None:
        if str(error) not in self._refusals and len(self._refusals) < MAX_REFUSALS:
            self._refusals.add(str(error))
            log.error("this router counts tenants' tokens alone: %s", error)

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
        if not self._is_probing:
            log.warning("this router counts tenants' tokens alone until Redis is back: %s", error)
            # a context of no request, though a request noticed the failure
            self._is_probing = True
            self._tasks.spawn(self._probe(), context=Context())

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                await self._link.run(_PROBE, [], [])
            except RedisFailure:
                continue  # logged when it began
            log.warning("tenants' tokens are counted in Redis at %s again", self._link.where)
            self._is_probing = False
            return


def _leave(batch: Sequence[_Charge]) -> None:
    """Answer charges without a result as without Redis."""
    for charge in batch:
        if not charge.answer.done():
            charge.answer.set_result(None)


NO_LIMIT = 2**53
"""Largest count; Lua's numbers are exact below it."""
