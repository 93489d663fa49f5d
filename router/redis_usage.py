"""The usage ledger of all routers of a cluster: a Redis stream, and its sums by day."""

import json
import logging
from collections import deque
from datetime import date

from cluster.errors import Unavailable
from cluster.network.redis_link import RedisFailure, RedisLink
from router.usage import NUMBERS, UsageEntry, UsageLedger, UsageTotal, first_day, today

log = logging.getLogger(__name__)
LIMIT_S = 1.0
"""Time limit of a call in seconds."""
MAX_UNWRITTEN = 10_000
"""Entries that wait for a Redis that cannot be reached."""
# KEYS: stream, the day's sums, the entry's mark. ARGV: entry as JSON, field of the sums, seconds to keep sums and mark,
# and the numbers to add. Adds an entry once: a call whose answer was lost is made again.
_ADD = """
if not redis.call('SET', KEYS[3], 1, 'NX', 'EX', 3600) then return 0 end
redis.call('XADD', KEYS[1], '*', 'entry', ARGV[1])
for i = 4, #ARGV do
  redis.call('HINCRBY', KEYS[2], ARGV[2] .. ':' .. i - 4, ARGV[i])
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""
_SUMS = """
local all = {}
for i, key in ipairs(KEYS) do all[i] = redis.call('HGETALL', key) end
return all
"""


class RedisUsage(UsageLedger):
    """Ledger under CLUSTER_NAME:usage."""

    def __init__(self, url: str, cluster_name: str, kept_days: int) -> None:
        """Prepare the connection.

        Raises StartError for an invalid `redis_url`.
        """
        self._link = RedisLink(url, LIMIT_S)
        self._prefix = f"{cluster_name}:usage"
        self._kept_s = (kept_days + 1) * 86_400
        self._unwritten: deque[UsageEntry] = deque()

    async def add(self, entry: UsageEntry) -> None:
        if len(self._unwritten) >= MAX_UNWRITTEN:
            lost = self._unwritten.popleft().to_line().decode().rstrip()
            log.error("usage is not in the ledger, too many entries wait for Redis: %s", lost)
        self._unwritten.append(entry)
        while self._unwritten:
            oldest = self._unwritten[0]
            try:
                await self.write(oldest)
            except RedisFailure as error:
                log.warning("%d entries of usage wait for Redis: %s", len(self._unwritten), error)
                return
            if self._unwritten and self._unwritten[0] is oldest:
                self._unwritten.popleft()

    async def write(self, entry: UsageEntry) -> None:
        """Write an entry, which counts once however often it is written. Raises RedisFailure."""
        line = entry.to_line().decode().rstrip()
        mark = f"{self._prefix}:seen:{entry.request_id}:{entry.at!r}"
        keys = [self._prefix, f"{self._prefix}:{entry.day}", mark]
        numbers = (1, entry.input_tokens, entry.cached_tokens, entry.output_tokens, entry.reasoning_tokens)
        field = json.dumps([entry.tenant, entry.model])
        await self._link.run(_ADD, keys, [line, field, self._kept_s, *numbers])

    async def since(self, num_days: int) -> list[UsageTotal]:
        last = today()
        first = date.fromisoformat(first_day(last, num_days)).toordinal()
        days = [date.fromordinal(day).isoformat() for day in range(first, date.fromisoformat(last).toordinal() + 1)]
        try:
            answers = await self._link.run(_SUMS, [f"{self._prefix}:{day}" for day in days], [])
        except RedisFailure as error:
            raise Unavailable(f"usage cannot be read: {error}") from error
        return [total for day, flat in zip(days, answers, strict=True) for total in _totals_of(day, flat)]

    async def close(self) -> None:
        if self._unwritten:
            lines = "\n".join(entry.to_line().decode().rstrip() for entry in self._unwritten)
            log.error("%d entries of usage are not in the ledger:\n%s", len(self._unwritten), lines)
        await self._link.close()


def _totals_of(day: str, flat: list[str]) -> list[UsageTotal]:
    sums: dict[str, dict[str, int]] = {}
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        name, _, number = field.rpartition(":")
        sums.setdefault(name, {})[NUMBERS[int(number)]] = int(value)
    totals = []
    for name, numbers in sorted(sums.items()):
        tenant, model = json.loads(name)
        totals.append(UsageTotal(day, tenant, model, *(numbers.get(number, 0) for number in NUMBERS)))
    return totals
