"""Discovery of routers by workers: one small interface with two backends.

    static   the addresses in the worker's configuration
    Redis    every router announces itself there (`redis_discovery.py`), and every worker lists them

A listing is a hint and never a lease: existing connections stay, whatever a listing contains.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass

FORGET_AFTER = 30
"""Consecutive listings without a router, while no stream to it is open, after which it is forgotten."""


@dataclass(frozen=True, slots=True)
class RouterEntry:
    """A router's announcement."""

    router_id: str
    address: str
    incarnation: str
    """Incarnation in hexadecimal."""


class Discovery(ABC):
    """Interface of discovery: `start`, then `announce` and `listings`, then `withdraw` if announced, then `close`."""

    @abstractmethod
    async def start(self) -> None:
        """Start.

        Raises StartError for an invalid setting; an unreachable backend is retried instead.
        """

    @abstractmethod
    def announce(self, router: RouterEntry) -> None:
        """Announce `router` until `withdraw`, whatever happens to the backend.

        Returns at once and raises nothing.
        """

    @abstractmethod
    async def withdraw(self) -> None:
        """Withdraw the announcement, so no worker joins any more.

        Takes a second at most; an unreachable backend forgets the router by itself.
        """

    @abstractmethod
    def listings(self) -> AsyncIterator[frozenset[str]]:
        """Yield the addresses of all routers each time the backend answered.

        Yields nothing while it does not.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything and end `listings`."""


class StaticDiscovery(Discovery):
    """Discovery of the fixed addresses in the configuration."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def start(self) -> None:
        """Do nothing; static discovery cannot fail."""

    def announce(self, router: RouterEntry) -> None:
        """Do nothing; workers have this address in their configuration."""

    async def withdraw(self) -> None:
        """Do nothing; workers notice that the router is gone and keep trying."""

    async def listings(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses

    async def close(self) -> None:
        """Do nothing; no resource is held."""


class Roster:
    """Set of routers to which a worker should have a stream.

    Pure.

    Absence is counted in listings, not in seconds, so an unreachable backend makes no router absent.
    """

    def __init__(self, pinned: Collection[str] = (), forget_after: int = FORGET_AFTER) -> None:
        self._pinned = frozenset(pinned)
        self._forget_after = forget_after
        self._absences: dict[str, int] = {}
        """Number of listings since each address was last listed."""

    @property
    def wanted(self) -> frozenset[str]:
        return self._pinned.union(self._absences)

    def listed(self, addresses: Collection[str], joined: Collection[str]) -> None:
        """Process a listing; `joined` are the addresses with an open stream."""
        for address in addresses:
            self._absences[address] = 0
        for address in set(self._absences).difference(addresses):
            self._absences[address] = 0 if address in joined else self._absences[address] + 1
            if self._absences[address] >= self._forget_after:
                del self._absences[address]
