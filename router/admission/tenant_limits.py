"""What tenants are limited to, over all models that a router serves: rates, concurrency, quotas."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from router.admission.config import AdmissionConfig
from router.admission.quota import LocalLedger, QuotaLedger
from router.admission.rate_limiter import RateLimiter
from router.admission.refusals import Reason, Refusal, over_limit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request was counted with against its tenant's limits."""

    tenant: str
    num_tokens: int
    quota_window: int | None
    """In which it was charged to a quota."""


class TenantLimits:
    """Each request goes through it before it waits for a place in the line of its model."""

    def __init__(
        self,
        config: AdmissionConfig,
        ledger: QuotaLedger | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is that of the rates; `wall_clock` that of the quotas' windows."""
        self.tenants = RateLimiter(config)
        self.num_refused: Counter[str] = Counter()
        """By reason, for ever."""
        self._config = config
        self._ledger: QuotaLedger = ledger or LocalLedger(wall_clock)
        self._clock = clock
        self._wall_clock = wall_clock
        self._refunds: set[asyncio.Task[None]] = set()

    async def enter(self, tenant: str, num_tokens: int) -> Charge:
        """Count a request of at most so many tokens; `leave` must follow. Raises Overloaded naming the limit."""
        try:
            return await self._enter(tenant, num_tokens)
        except Refusal as refusal:
            self.num_refused[refusal.reason] += 1
            raise refusal.error from None

    async def _enter(self, tenant: str, num_tokens: int) -> Charge:
        policy = self._config.policy(tenant)
        limit, window_s = policy.quota_tokens, policy.quota_window_s
        self.tenants.check(tenant, num_tokens, self._clock())
        window = None
        if limit is not None:
            window = int(self._wall_clock() // window_s)
            ends_s = await self._ledger.charge(tenant, num_tokens, limit, window_s)
            if ends_s is not None:
                never = num_tokens > limit
                asked, said = f"{num_tokens} tokens", f"{limit} per {window_s} s"
                raise over_limit(Reason.QUOTA, tenant, said, asked, float("inf") if never else ends_s)
        charge = Charge(tenant, num_tokens, window)
        try:
            self.tenants.check(tenant, num_tokens, self._clock())  # others may have entered meanwhile
        except Refusal:
            self._refund(charge, num_tokens)
            raise
        self.tenants.enter(tenant, num_tokens, self._clock())
        return charge

    def leave(self, charge: Charge, used_tokens: Callable[[], int]) -> None:
        """The request is over; what it did not use is given back. `used_tokens` is asked only where tokens count."""
        unused = max(0, charge.num_tokens - used_tokens()) if self._counts_tokens(charge.tenant) else 0
        self.tenants.leave(charge.tenant, unused, self._clock())
        self._refund(charge, unused)

    def _counts_tokens(self, tenant: str) -> bool:
        policy = self._config.policy(tenant)
        return policy.quota_tokens is not None or policy.tokens_per_minute is not None

    def _refund(self, charge: Charge, unused: int) -> None:
        """Behind the request's back: its client need not wait for it. Nothing for a window that is over."""
        window_s = self._config.policy(charge.tenant).quota_window_s
        if unused and charge.quota_window == int(self._wall_clock() // window_s):
            task = asyncio.ensure_future(self._ledger.refund(charge.tenant, unused, window_s))
            self._refunds.add(task)
            task.add_done_callback(self._refunded)

    def _refunded(self, task: "asyncio.Task[None]") -> None:
        self._refunds.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a quota's refund failed", exc_info=error)
