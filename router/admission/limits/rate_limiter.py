"""Rates and concurrency per tenant, with bounded state.

Pure.

A token bucket. Pure: the clock is an argument.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from cluster.errors import Overloaded
from router.admission.config import AdmissionConfig, TenantPolicy
from router.admission.refusals import DEFAULT_RETRY_AFTER_S, Reason, Refusal, over_limit


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
        self._states: OrderedDict[str, _State] = OrderedDict()
        """States, most recently used last."""

    def __len__(self) -> int:
        return len(self._states)

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
        state = self._states[tenant]
        state.num_claims -= 1
        if state.tokens is not None:
            state.tokens.give_back(unused_tokens, now)

    def may_start(self, tenant: str, num_sequences: int) -> bool:
        """Return whether so many more sequences of the tenant may run."""
        limit = self._config.policy(tenant).max_running
        if limit is None:
            return True
        state = self._states.get(tenant)
        return (state.num_running if state is not None else 0) + num_sequences <= limit

    def started(self, tenant: str, num_sequences: int, now: float) -> None:
        self._state(tenant, now).num_running += num_sequences

    def ended(self, tenant: str, num_sequences: int) -> None:
        self._states[tenant].num_running -= num_sequences

    def _state(self, tenant: str, now: float) -> _State:
        """Return the tenant's state.

        Raises Refusal when too many tenants are remembered.
        """
        if (state := self._states.get(tenant)) is None:
            if len(self._states) >= MAX_TENANTS + len(self._config.tenants):
                self._forget_some(now)
            state = self._states[tenant] = _State.of(self._config.policy(tenant))
        self._states.move_to_end(tenant)
        return state

    def _forget_some(self, now: float) -> None:
        oldest = [tenant for tenant, _ in zip(self._states, range(_TRIED), strict=False)]
        fresh = [tenant for tenant in oldest if self._states[tenant].fresh(now)]
        for tenant in oldest:
            self._states.move_to_end(tenant)  # the next call examines others
        for tenant in fresh:
            del self._states[tenant]
        if not fresh:
            error = Overloaded(
                f"{len(self._states)} tenants are served already, the limit for tenants without an entry in `tenants`",
                retry_after_s=DEFAULT_RETRY_AFTER_S,
            )
            raise Refusal(Reason.TOO_MANY_TENANTS, error)
