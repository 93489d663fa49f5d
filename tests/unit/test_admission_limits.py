"""Limits of tenants: buckets, ledgers, and the bounded state behind them."""

import math
from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import Overloaded
from router.admission.config import AdmissionConfig, TenantPolicy
from router.admission.limits.tenant_limits import LocalLedger, RateLimiter, TokenBucket
from router.admission.refusals import Refusal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------------------------------------- buckets

steps = st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 20)), max_size=40)


@given(st.floats(0.1, 10), st.floats(1, 20), steps)
def test_no_window_lets_through_more_than_rate_and_burst(
    rate: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now = TokenBucket(rate, burst), 0.0
    taken: list[tuple[float, float]] = []
    for pause, amount in steps:
        now += pause
        wait_s = bucket.wait_s(amount, now)
        assert math.isinf(wait_s) == (amount > burst)
        if wait_s == 0:
            bucket.take(amount, now)
            taken.append((now, amount))
        elif math.isfinite(wait_s):
            fresh = copy(bucket)
            assert fresh.wait_s(amount, now + wait_s * 1.0001 + 1e-6) == 0, "when it said"
            assert fresh.level(now) <= burst
    for first, (start, _) in enumerate(taken):
        for last in range(first, len(taken)):
            total = sum(amount for _, amount in taken[first : last + 1])
            assert total <= burst + rate * (taken[last][0] - start) + 1e-6


def test_what_is_given_back_does_not_overflow() -> None:
    bucket = TokenBucket(1, 10)
    bucket.take(4, 0)
    bucket.give_back(9, 0)
    assert bucket.level(0) == 10
    assert bucket.full(0)


def test_a_clock_that_steps_back_gives_nothing() -> None:
    bucket = TokenBucket(1, 10)
    bucket.take(10, 100)
    assert bucket.level(50) == 0
    assert bucket.level(101) == 1


# ----------------------------------------------------------------------------------------------- ledger


async def test_a_window_begins_at_multiples_of_its_length() -> None:
    clock = Clock()
    ledger = LocalLedger(clock)
    clock.now = 59.0
    assert await ledger.charge("a", 10, 10, 60) is None
    assert await ledger.charge("a", 1, 10, 60) == pytest.approx(1.0)
    assert await ledger.charge("b", 10, 10, 60) is None, "another tenant"
    clock.now = 60.0
    assert await ledger.charge("a", 11, 10, 60) == pytest.approx(60.0)
    assert await ledger.charge("a", 10, 10, 60) is None


async def test_refunds_stay_within_their_window() -> None:
    clock = Clock()
    ledger = LocalLedger(clock)
    await ledger.charge("a", 10, 10, 60)
    await ledger.refund("a", 4, 60)
    assert await ledger.charge("a", 5, 10, 60) is not None
    assert await ledger.charge("a", 4, 10, 60) is None
    await ledger.refund("a", 100, 60)
    assert await ledger.charge("a", 11, 10, 60) is not None, "never below 0"
    clock.now = 60.0
    await ledger.charge("a", 3, 10, 60)
    clock.now = 120.0
    await ledger.refund("a", 3, 60)
    assert await ledger.charge("a", 11, 10, 60) is not None


async def test_windows_that_are_over_are_forgotten() -> None:
    clock = Clock()
    ledger = LocalLedger(clock)
    for number in range(10_000):
        clock.now = float(number)
        await ledger.charge(f"t{number}", 1, 10, 60)
    assert len(ledger.used) <= 1025


# ---------------------------------------------------------------------------------------------- tenants


def tenants(**config: object) -> RateLimiter:
    return RateLimiter(AdmissionConfig.parse(config))


def test_a_refusal_names_limit_and_tenant_and_when_to_return() -> None:
    limits = tenants(tenants={"a": {"requests_per_s": 2, "burst": 1}, "b": {"tokens_per_minute": 600}})
    limits.arrive("a", 0)
    with pytest.raises(Refusal, match="'a' is at its requests_per_s of 2") as caught:
        limits.arrive("a", 0.25)
    assert (type(caught.value.error), caught.value.error.retry_after_s) == (Overloaded, pytest.approx(0.25))
    limits.arrive("a", 0.5)
    limits.enter("b", 600, 0)
    with pytest.raises(Refusal, match="'b' is at its tokens_per_minute of 600") as caught:
        limits.check("b", 100, 1, 0)
    assert caught.value.error.retry_after_s == pytest.approx(10)  # type: ignore[attr-defined]
    limits.leave("b", 550, 0)
    limits.check("b", 100, 1, 0)
    with pytest.raises(Refusal, match="can never be admitted") as caught:
        limits.check("b", 601, 1, 100)
    assert caught.value.error.permanent  # type: ignore[attr-defined]
    limits.check("nobody in particular", 10**9, 1, 0)


def test_unnamed_tenants_have_the_default_policy_each() -> None:
    limits = tenants(default_tenant={"requests_per_s": 1})
    for name in ("x", "y"):
        limits.arrive(name, 0)
        with pytest.raises(Refusal):
            limits.arrive(name, 0)


def test_fresh_states_are_forgotten_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten names at most: nobody escapes a limit by the state being dropped, and names alone cost nothing."""
    monkeypatch.setattr("router.admission.limits.tenant_limits.MAX_TENANTS", 10)
    limits = tenants(default_tenant={"requests_per_s": 1, "burst": 1})
    for number in range(1000):
        limits.check(f"looks {number}", 1, 1, 0)
    assert len(limits) <= 10
    for number in range(10):
        limits.arrive(f"asks {number}", 0)
        limits.enter(f"asks {number}", 1, 0)
        limits.leave(f"asks {number}", 0, 0)
    assert len(limits) == 10
    with pytest.raises(Refusal, match="10 tenants are served already"):
        limits.check("one more", 1, 1, 0.5)
    for number in range(10):
        with pytest.raises(Refusal, match="requests_per_s"):
            limits.arrive(f"asks {number}", 0.5)
    limits.check("one more", 1, 1, 1.0)


def test_who_is_in_the_router_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.admission.limits.tenant_limits.MAX_TENANTS", 2)
    limits = tenants()
    for name in ("a", "b"):
        limits.check(name, 1, 1, 0)
        limits.enter(name, 1, 0)
    with pytest.raises(Refusal):
        limits.check("c", 1, 1, 0)
    limits.started("a", 1, 0)
    limits.leave("a", 0, 0)
    with pytest.raises(Refusal):
        limits.check("c", 1, 1, 0)
    limits.ended("a", 1)
    limits.check("c", 1, 1, 0)


def test_bad_settings_are_named() -> None:
    from cluster.errors import StartError

    with pytest.raises(StartError, match=r"tenants\.a\.weight"):
        AdmissionConfig.parse({"tenants": {"a": {"weight": 0}}})
    with pytest.raises(StartError, match="max_queued"):
        AdmissionConfig.parse({"max_queued": 0})
    assert AdmissionConfig.parse({"tenants": {"a": {"max_running": 3}}}).policy("a") == TenantPolicy(max_running=3)
