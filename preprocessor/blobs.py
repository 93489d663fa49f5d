"""Tensors of items in memory, by identifier.

Bounds of memory that many tenants use.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cluster.errors import Overloaded, UnknownBlob


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


class Lease:
    """Blobs of one request, which stay until it is closed."""

    def __init__(self, store: "BlobStore", tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._pinned: list[tuple[bytes, int]] = []

    def add(self, identifier: bytes, blob: bytes) -> None:
        """Keep a blob under its identifier; one that is there already is kept instead."""
        self._store.pin(identifier, blob)
        self._store.shares.take(self._tenant, len(blob))
        self._pinned.append((identifier, len(blob)))

    def close(self) -> None:
        pinned, self._pinned = self._pinned, []
        for identifier, num_bytes in pinned:
            self._store.unpin(identifier)
            self._store.shares.give_back(self._tenant, num_bytes)


class BlobStore:
    """Blobs, of which those that no request needs are dropped where there is no room, the least recently used first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()
        """Blobs by identifier, the least recently used first."""
        self._pins: Counter[bytes] = Counter()
        self.shares = Shares(limit_bytes, "tensors of running requests")
        self.num_bytes = 0

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded where running requests use all memory, and the tenant its part."""
        self.shares.check(tenant)

    def lease(self, tenant: str) -> Lease:
        return Lease(self, tenant)

    def read(self, identifiers: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """Return blobs with their identifiers. Raises UnknownBlob naming the first that is gone."""
        found: list[tuple[bytes, bytes]] = []
        for identifier in identifiers:
            if (blob := self._blobs.get(identifier)) is None:
                raise UnknownBlob(f"no blob {identifier.hex()} is here, or no longer")
            self._blobs.move_to_end(identifier)
            found.append((identifier, blob))
        return found

    def pin(self, identifier: bytes, blob: bytes) -> None:
        if identifier not in self._blobs:
            self._blobs[identifier] = blob
            self.num_bytes += len(blob)
        self._blobs.move_to_end(identifier)
        self._pins[identifier] += 1
        self._make_room()

    def unpin(self, identifier: bytes) -> None:
        self._pins[identifier] -= 1
        if not self._pins[identifier]:
            del self._pins[identifier]
        self._make_room()

    def _make_room(self) -> None:
        if self.num_bytes <= self._limit:
            return
        for identifier in [each for each in self._blobs if each not in self._pins]:
            self.num_bytes -= len(self._blobs.pop(identifier))
            if self.num_bytes <= self._limit:
                return
