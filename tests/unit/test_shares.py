"""Shares of a resource: bounds per tenant and in all, and no tenant that shuts out another one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.limits.tenant_limits import Shares
from router.admission.refusals import Reason, Refusal


def test_one_tenant_cannot_shut_out_another() -> None:
    shares = Shares(limit=8, limit_per_tenant=8)
    for _ in range(8):
        shares.take("mallory")
    with pytest.raises(Refusal) as refused:
        shares.take("mallory")
    assert refused.value.reason == Reason.TENANT_QUEUE_FULL
    shares.take("alice")
    shares.take("alice")  # half of an equal share of two tenants
    with pytest.raises(Refusal) as refused:
        shares.take("alice")
    assert refused.value.reason == Reason.QUEUE_FULL
    assert "10 requests wait already" in str(refused.value.error)
    for _ in range(8):
        shares.give_back("mallory")
    shares.take("alice", 6)
    assert (shares.total, shares.used("alice"), shares.used("mallory")) == (8, 8, 0)


def test_the_limit_of_one_tenant_is_below_that_of_all() -> None:
    shares = Shares(limit=100, limit_per_tenant=25, unit="bytes")
    shares.take("a", 25)
    with pytest.raises(Refusal, match="25 bytes of tenant 'a'"):
        shares.take("a", 1)
    shares.take("b", 25)


TAKES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.booleans()), max_size=80)


@given(TAKES)
def test_sums_and_bounds_hold_after_each_event(events: list[tuple[int, int, bool]]) -> None:
    shares = Shares(limit=30, limit_per_tenant=20)
    held: dict[str, list[int]] = {}
    for number, amount, gives_back in events:
        tenant = str(number)
        if gives_back and held.get(tenant):
            shares.give_back(tenant, held[tenant].pop())
        else:
            before = shares.total
            try:
                shares.take(tenant, amount)
                held.setdefault(tenant, []).append(amount)
            except Refusal:
                assert shares.total == before
                used = sum(held.get(tenant, []))
                others = sum(bool(amounts) for name, amounts in held.items() if name != tenant)
                assert used + amount > 20 or used + amount > 30 // (2 * (others + 1))
        assert shares.total == sum(map(sum, held.values())) <= 45
        for name, amounts in held.items():
            assert shares.used(name) == sum(amounts) <= 20
