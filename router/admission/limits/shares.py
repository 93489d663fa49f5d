"""Bounded use of one resource by many tenants.

Pure.
"""

from collections import Counter

from router.admission.refusals import DEFAULT_RETRY_AFTER_S, queue_full, tenant_queue_full


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
