"""How workers find the routers: one small interface, two backends.

    static   the addresses in the worker's configuration
    Redis    every router announces itself there (`redis_discovery.py`), and every worker asks who did

What discovery says is a hint and never a lease: who is connected stays connected, whatever it says or does not say.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass

FORGET_AFTER = 30
"""Listings in a row without a router, and without a stream to it, after which nobody tries to reach it any more."""


@dataclass(frozen=True, slots=True)
class RouterEntry:
    """A router as it announces itself."""

    router_id: str
    address: str
    incarnation: str
    """In hexadecimal."""


class Discovery(ABC):
    """Life: `start`, then `announce` and `listings` at will, then `withdraw` where announced, then `close`."""

    @abstractmethod
    async def start(self) -> None:
        """Raises StartError where a setting is at fault. That nobody answers is none: it is tried again."""

    @abstractmethod
    def announce(self, router: RouterEntry) -> None:
        """From now on, until `withdraw`, whatever happens to the backend. Returns at once; raises nothing."""

    @abstractmethod
    async def withdraw(self) -> None:
        """No worker shall join any more. Takes a second at most; a backend that cannot be told forgets by itself."""

    @abstractmethod
    def listings(self) -> AsyncIterator[frozenset[str]]:
        """Addresses of all routers, each time they were asked for and told. While nobody answers, nothing comes."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything; nothing comes of `listings` any more."""


class StaticDiscovery(Discovery):
    """The addresses in the configuration, for good."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def start(self) -> None:
        """Nothing can fail."""

    def announce(self, router: RouterEntry) -> None:
        """Whoever needs it has it in its configuration."""

    async def withdraw(self) -> None:
        """As above: workers see that the router is gone, and try again."""

    async def listings(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses

    async def close(self) -> None:
        """Nothing is held."""


class Roster:
    """Which routers a worker should have a stream to. Pure, and without a clock: it counts listings, so that no time
    in which nobody could be asked makes anybody absent."""

    def __init__(self, pinned: Collection[str] = (), forget_after: int = FORGET_AFTER) -> None:
        self._pinned = frozenset(pinned)
        self._forget_after = forget_after
        self._absences: dict[str, int] = {}
        """By address: listings since it was last listed."""

    @property
    def wanted(self) -> frozenset[str]:
        return self._pinned.union(self._absences)

    def listed(self, addresses: Collection[str], joined: Collection[str]) -> None:
        """A listing has come; `joined` are those to which a stream is alive."""
        for address in addresses:
            self._absences[address] = 0
        for address in set(self._absences).difference(addresses):
            self._absences[address] = 0 if address in joined else self._absences[address] + 1
            if self._absences[address] >= self._forget_after:
                del self._absences[address]
