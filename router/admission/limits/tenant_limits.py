"""Limits of tenants over all models of a router: rates, concurrency, quotas."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from router.admission.config import AdmissionConfig
from router.admission.limits.quota import LocalLedger, QuotaLedger
from router.admission.limits.rate_limiter import RateLimiter
from router.admission.refusals import Reason, Refusal, over_limit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Charge:
    """Amounts charged for a request against its tenant's limits."""

    tenant: str
    num_tokens: int
    quota_window: int | None
    """Quota window in which the request was charged."""


class TenantLimits:
    """Limits that each request passes before it waits in its model's queue."""

    def __init__(
        self,
        config: AdmissionConfig,
        ledger: QuotaLedger | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the limits.

        `clock` is for rates, `wall_clock` for quota windows.
        """
        self.tenants = RateLimiter(config)
        self.num_refused: Counter[str] = Counter()
        """Refusals by reason, since the start."""
        self._config = config
        self._ledger: QuotaLedger = ledger or LocalLedger(wall_clock)
        self._clock = clock
        self._wall_clock = wall_clock
        self._refunds: set[asyncio.Task[None]] = set()

    def arrive(self, tenant: str) -> None:
        """Charge a request before it is read.

        Raises Overloaded naming the limit.
        """
        try:
            self.tenants.arrive(tenant, self._clock())
        except Refusal as refusal:
            self.num_refused[refusal.reason] += 1
            raise refusal.take() from None

    def charge_refused(self, tenant: str, num_tokens: int) -> None:
        """Charge the tokens that were read for a request that was refused before it could enter."""
        self.tenants.charge_refused(tenant, num_tokens, self._clock())

    async def enter(self, tenant: str, num_tokens: int, num_sequences: int = 1) -> Charge:
        """Count a request of at most so many tokens; `leave` must follow. Raises Overloaded naming the limit."""
        try:
            return await self._enter(tenant, num_tokens, num_sequences)
        except Refusal as refusal:
            self.num_refused[refusal.reason] += 1
            raise refusal.take() from None

    async def _enter(self, tenant: str, num_tokens: int, num_sequences: int) -> Charge:
        policy = self._config.policy(tenant)
        limit, window_s = policy.quota_tokens, policy.quota_window_s
        self.tenants.check(tenant, num_tokens, num_sequences, self._clock())
        window = None
        if limit is not None:
            window = int(self._wall_clock() // window_s)
            ends_s = await self._ledger.charge(tenant, num_tokens, limit, window_s)
            if ends_s is not None:
                never = num_tokens > limit
                requested, quota = f"{num_tokens} tokens", f"{limit} per {window_s} s"
                raise over_limit(Reason.QUOTA, tenant, quota, requested, float("inf") if never else ends_s)
        charge = Charge(tenant, num_tokens, window)
        try:
            # Other requests may have entered meanwhile.
            self.tenants.check(tenant, num_tokens, num_sequences, self._clock())
        except Refusal:
            self._refund(charge, num_tokens)
            raise
        self.tenants.enter(tenant, num_tokens, self._clock())
        return charge

    def leave(self, charge: Charge, used_tokens: Callable[[], int]) -> None:
        """Give back what the request did not use.

        `used_tokens` is called only where tokens count.
        """
        unused = max(0, charge.num_tokens - used_tokens()) if self._counts_tokens(charge.tenant) else 0
        self.tenants.leave(charge.tenant, unused, self._clock())
        self._refund(charge, unused)

    def _counts_tokens(self, tenant: str) -> bool:
        policy = self._config.policy(tenant)
        return policy.quota_tokens is not None or policy.tokens_per_minute is not None

    def _refund(self, charge: Charge, unused: int) -> None:
        """Refund in the background, so that the client need not wait; nothing for a window that is over."""
        window_s = self._config.policy(charge.tenant).quota_window_s
        if unused and charge.quota_window == int(self._wall_clock() // window_s):
            task = asyncio.ensure_future(self._ledger.refund(charge.tenant, unused, window_s))
            self._refunds.add(task)
            task.add_done_callback(self._refunded)

    def _refunded(self, task: "asyncio.Task[None]") -> None:
        self._refunds.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a quota's refund failed", exc_info=error)
