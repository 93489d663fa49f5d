"""Limits of tenants over all models of a router: rates, concurrency, quotas.

Quota ledgers: tokens per tenant and window of wall-clock time, in memory or shared by several routers.

Bounded use of one resource by many tenants.

Rates and concurrency per tenant, with bounded state.

A token bucket. Pure: the clock is an argument.
"""

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.errors import Overloaded
from cluster.process.tasks import Tasks
from router.admission.config import AdmissionConfig, TenantPolicy
from router.admission.refusals import DEFAULT_RETRY_AFTER_S, Reason, Refusal, over_limit, queue_full, tenant_queue_full

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TokenBucket:
    """Bucket that refills at `rate` per second up to `burst`; full at first."""

    rate: float
    burst: float
    _level: float = -1.0
    _at: float = 0.0

    def __post_init__(self) -> None:
        assert self.rate > 0
        assert self.burst > 0
        self._level = self.burst

    def level(self, now: float) -> float:
        """Return the present level; a clock that steps back changes nothing."""
        if now > self._at:
            self._level = min(self.burst, self._level + (now - self._at) * self.rate)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is there if none is taken; infinite when it never will be."""
        missing = amount - self.level(now)
        if missing <= 1e-9:  # rounding of sums of fractions
            return 0.0
        return missing / self.rate if amount <= self.burst else float("inf")

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, for which `wait_s` must have returned 0."""
        assert self.wait_s(amount, now) == 0
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """Return an amount that was taken."""
        self._level = min(self.burst, self.level(now) + amount)

    def full(self, now: float) -> bool:
        """Return whether the bucket equals a fresh one."""
        return self.level(now) >= self.burst


MAX_TENANTS = 10_000
"""Tenants without settings of their own that are remembered: running, waiting, or with a rate not yet recovered."""
_TRIED = 8
"""States examined for one that can be forgotten, whenever a new one is needed."""


@dataclass(slots=True, eq=False)
class _State:
    policy: TenantPolicy
    requests: TokenBucket | None
    tokens: TokenBucket | None
    num_claims: int = 0
    """Requests in the router."""
    num_running: int = 0
    """Running sequences."""

    @classmethod
    def of(cls, policy: TenantPolicy) -> "_State":
        requests = tokens = None
        if policy.requests_per_s is not None:
            requests = TokenBucket(policy.requests_per_s, policy.burst or max(1, math.floor(policy.requests_per_s)))
        if policy.tokens_per_minute is not None:
            tokens = TokenBucket(policy.tokens_per_minute / 60, policy.tokens_per_minute)
        return cls(policy, requests, tokens)

    def fresh(self, now: float) -> bool:
        """Return whether forgetting the state changes nothing."""
        full = all(bucket is None or bucket.full(now) for bucket in (self.requests, self.tokens))
        return full and not self.num_claims and not self.num_running


class RateLimiter:
    """Rates and concurrency of all tenants."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self.states: OrderedDict[str, _State] = OrderedDict()
        """States, most recently used last."""

    def __len__(self) -> int:
        return len(self.states)

    def weight(self, tenant: str) -> float:
        return self._config.policy(tenant).weight

    def arrive(self, tenant: str, now: float) -> None:
        """Charge one request against the tenant's rate.

        Raises Refusal.
        """
        state = self._state(tenant, now)
        if state.requests is not None:
            if wait_s := state.requests.wait_s(1, now):
                limit = f"{state.policy.requests_per_s:g}"
                raise over_limit(Reason.REQUEST_RATE, tenant, limit, "1 request", wait_s)
            state.requests.take(1, now)

    def check(self, tenant: str, num_tokens: int, num_sequences: int, now: float) -> None:
        """Check that a request of so many tokens and sequences may enter.

        Raises Refusal.
        """
        state = self._state(tenant, now)
        policy = state.policy
        if policy.max_running is not None and num_sequences > policy.max_running:
            limit, requested = f"{policy.max_running}", f"{num_sequences} sequences"
            raise over_limit(Reason.MAX_RUNNING, tenant, limit, requested, math.inf)
        if state.tokens is not None and (wait_s := state.tokens.wait_s(num_tokens, now)):
            limit = f"{policy.tokens_per_minute}"
            raise over_limit(Reason.TOKEN_RATE, tenant, limit, f"{num_tokens} tokens", wait_s)

    def charge_refused(self, tenant: str, num_tokens: int, now: float) -> None:
        """Charge tokens that were read for a request that was refused, as far as the tenant has any left."""
        state = self._state(tenant, now)
        if state.tokens is not None:
            state.tokens.take(min(num_tokens, state.tokens.level(now)), now)

    def enter(self, tenant: str, num_tokens: int, now: float) -> None:
        """Count a request that `check` has just accepted; `leave` must follow."""
        state = self._state(tenant, now)
        state.num_claims += 1
        if state.tokens is not None:
            state.tokens.take(num_tokens, now)

    def leave(self, tenant: str, unused_tokens: int, now: float) -> None:
        state = self.states[tenant]
        state.num_claims -= 1
        if state.tokens is not None:
            state.tokens.give_back(unused_tokens, now)

    def may_start(self, tenant: str, num_sequences: int) -> bool:
        """Return whether so many more sequences of the tenant may run."""
        limit = self._config.policy(tenant).max_running
        if limit is None:
            return True
        state = self.states.get(tenant)
        return (state.num_running if state is not None else 0) + num_sequences <= limit

    def started(self, tenant: str, num_sequences: int, now: float) -> None:
        self._state(tenant, now).num_running += num_sequences

    def ended(self, tenant: str, num_sequences: int) -> None:
        self.states[tenant].num_running -= num_sequences

    def _state(self, tenant: str, now: float) -> _State:
        """Return the tenant's state.

        Raises Refusal when too many tenants are remembered.
        """
        if (state := self.states.get(tenant)) is None:
            if len(self.states) >= MAX_TENANTS + len(self._config.tenants):
                self._forget_some(now)
            state = self.states[tenant] = _State.of(self._config.policy(tenant))
        self.states.move_to_end(tenant)
        return state

    def _forget_some(self, now: float) -> None:
        oldest = [tenant for tenant, _ in zip(self.states, range(_TRIED), strict=False)]
        fresh = [tenant for tenant in oldest if self.states[tenant].fresh(now)]
        for tenant in oldest:
            self.states.move_to_end(tenant)  # the next call examines others
        for tenant in fresh:
            del self.states[tenant]
        if not fresh:
            error = Overloaded(
                f"{len(self.states)} tenants are served already, the limit for tenants without an entry in `tenants`",
                retry_after_s=DEFAULT_RETRY_AFTER_S,
            )
            raise Refusal(Reason.TOO_MANY_TENANTS, error)


class QuotaLedger(Protocol):
    """Ledger with aligned windows, which begin at wall-clock multiples of `window_s` since the epoch.

    An implementation that cannot reach its store decides locally; it raises nothing.
    """

    async def charge(self, tenant: str, tokens: int, limit: int, window_s: int) -> float | None:
        """Count `tokens` and return None; beyond `limit` count nothing and return the seconds until the window ends."""

    async def refund(self, tenant: str, tokens: int, window_s: int) -> None:
        """Subtract `tokens` charged in the present window, not below 0."""


@dataclass(slots=True)
class LocalLedger:
    """Ledger of one router, in memory."""

    clock: Callable[[], float] = time.time
    used: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Window number and tokens, by tenant and window_s."""
    _sweep_above: int = 1024

    async def charge(self, tenant: str, tokens: int, limit: int, window_s: int) -> float | None:
        now = self.clock()
        window = int(now // window_s)
        used = self._total(tenant, window, window_s) + tokens
        if used > limit:
            return (window + 1) * window_s - now
        self.used[tenant, window_s] = window, used
        self._sweep(now)
        return None

    async def refund(self, tenant: str, tokens: int, window_s: int) -> None:
        window = int(self.clock() // window_s)
        if used := self._total(tenant, window, window_s):
            self.used[tenant, window_s] = window, max(0, used - tokens)

    def _total(self, tenant: str, window: int, window_s: int) -> int:
        of_window, used = self.used.get((tenant, window_s), (window, 0))
        return used if of_window == window else 0

    def _sweep(self, now: float) -> None:
        """Drop windows that are over.

        Amortised: the bound doubles with the remaining number.
        """
        if len(self.used) > self._sweep_above:
            self.used = {key: used for key, used in self.used.items() if used[0] == now // key[1] and used[1]}
            self._sweep_above = max(1024, 2 * len(self.used))


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
        self._refunds = Tasks("a quota's refund failed")

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
            self._refunds.spawn(self._ledger.refund(charge.tenant, unused, window_s))

    async def close(self) -> None:
        """Finish the refunds."""
        await self._refunds.join()


class Shares:
    """Amounts of one resource in use, bounded for each tenant and for all together.

    No tenant can shut out another one: where the resource is used up, a tenant that has less than half of an equal
    share may still take some. So all together use at most 1.5 times the limit.

    Where tenants are what clients say they are, one client can be many tenants; each of them still gets little.
    """

    def __init__(self, limit: int, limit_per_tenant: int, unit: str = "requests") -> None:
        assert limit_per_tenant > 0
        assert limit > 0
        self.limit = limit
        self.limit_per_tenant = limit_per_tenant
        self._unit = unit
        self._used: Counter[str] = Counter()
        self.total = 0
        """Amount in use by all tenants."""

    def used(self, tenant: str) -> int:
        return self._used[tenant]

    def take(self, tenant: str, amount: int = 1) -> None:
        """Take an amount; `give_back` must follow.

        Raises Refusal, and then nothing was taken.
        """
        after = self._used[tenant] + amount
        if after > self.limit_per_tenant:
            raise tenant_queue_full(tenant, self._used[tenant], DEFAULT_RETRY_AFTER_S, self._unit)
        if self.total + amount > self.limit and after > self._least_share(tenant):
            raise queue_full(self.total, DEFAULT_RETRY_AFTER_S, self._unit)
        self._used[tenant] = after
        self.total += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """Return an amount that was taken."""
        self._used[tenant] -= amount
        self.total -= amount
        assert self._used[tenant] >= 0, "more was given back than taken"
        if not self._used[tenant]:
            del self._used[tenant]

    def _least_share(self, tenant: str) -> int:
        """Return the amount that the tenant may have although the resource is used up."""
        num_tenants = len(self._used) + (tenant not in self._used)
        return self.limit // (2 * num_tenants)
