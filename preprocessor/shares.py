"""Bounds of memory that many tenants use."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import Overloaded


class Shares:
    """Bytes in use, bounded for all tenants together.

    Where all are in use, a tenant with less than half of an equal share may still take some, so that none can shut out
    another one.
    """

    def __init__(self, limit: int, what: str) -> None:
        """Create it; `what` names the bytes in messages."""
        self._limit = limit
        self._what = what
        self._used: Counter[str] = Counter()
        self.total = 0

    def check(self, tenant: str) -> None:
        """Raise Overloaded where the tenant may take nothing now."""
        num_tenants = len(self._used) + (tenant not in self._used)
        if self.total >= self._limit and self._used[tenant] >= self._limit // (2 * num_tenants):
            used, limit = self.total >> 20, self._limit >> 20
            raise Overloaded(f"{self._what} take {used} MiB of {limit} MiB; try again later")

    def take(self, tenant: str, amount: int) -> None:
        self._used[tenant] += amount
        self.total += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self._used[tenant] -= amount
        self.total -= amount
        if not self._used[tenant]:
            del self._used[tenant]

    @contextmanager
    def using(self, tenant: str, amount: int) -> Iterator[None]:
        """Take an amount for the block. Raises Overloaded."""
        self.check(tenant)
        self.take(tenant, amount)
        try:
            yield
        finally:
            self.give_back(tenant, amount)
