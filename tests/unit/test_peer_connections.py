"""Connections between two engines, over pipes in memory instead of sockets: who beats, who ends, and who is cut off."""

from collections.abc import Callable
from typing import Any

from loans.network import CUT_OFF, Lent, LoanGiven, LoanTaken, Peer, Want
from loans.peers.socket_network import NetworkSettings, SocketNetwork
from loans.peers.sockets import Connector

WANT = Want("r", [b"k" * 16], 0, True, [1, 2, 3, 4], b"root")
SILENCE_S = 2.0


class Pipe:
    """One end of a connection, as `PeerSocket`."""

    has_unsent = False

    def __init__(self) -> None:
        self.other: Pipe
        self.arrived = b""
        self.is_open = True
        self.on_readable: Callable[[], object] = lambda: None

    def fileno(self) -> int:
        return id(self)

    def receive(self) -> bytes | None:
        data, self.arrived = self.arrived, b""
        return data or (None if self.other.is_open else b"")

    def send(self, data: bytes) -> None:
        self.other.arrived += data
        self.other.on_readable()

    def close(self) -> None:
        self.is_open = False
        self.other.on_readable()


def pipe() -> tuple[Pipe, Pipe]:
    one, other = Pipe(), Pipe()
    one.other, other.other = other, one
    return one, other


class Calls(Connector):
    """Calls that reach nobody before their site says so."""

    def __init__(self, site: "Site") -> None:
        self._site = site
        self.accepted: Any = None

    def listen(self, host: str, port: int, on_connected: Any) -> int:
        self.accepted = on_connected
        return port

    def connect(self, address: str, on_connected: Any) -> None:
        self._site.calls.append((address, on_connected))

    def take(self) -> bool:
        return False

    def close(self) -> None: ...


class Engine:
    """An engine's network, its loop, and what it is told."""

    def __init__(self, site: "Site", name: str) -> None:
        self._site = site
        self.told: list[Any] = []
        self.given: list[LoanGiven] = []
        settings = NetworkSettings(name, name.encode(), "nowhere", 0, "", SILENCE_S)
        self.connector = Calls(site)
        self.network = SocketNetwork(settings, self, lambda: site.now, self.connector)
        self.network.start(self, b"model", b"memory of " + name.encode())
        self.peer = Peer(name, name, name.encode())

    def borrow(self, peer: Peer) -> LoanTaken:
        return self.network.open(peer, WANT, self)

    def watch(self, descriptor: int, on_readable: Callable[[], object]) -> None:
        self._site.pipes[descriptor].on_readable = on_readable
        on_readable()

    def watch_writing(self, descriptor: int, is_wanted: bool) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...

    def wake(self) -> None: ...

    def lent(self, message: Lent) -> None:
        self.told.append(message)

    def ended(self, reason: str) -> None:
        self.told.append(reason)

    def opened(self, loan: LoanGiven, want: Want) -> None:
        self.given.append(loan)

    def released(self, loan: LoanGiven, first: int, count: int) -> None:
        self.told.append((first, count))

    def closed(self, loan: LoanGiven) -> None:
        self.told.append("closed")

    def met(self, endpoint: bytes) -> None:
        self.told.append(endpoint)


class Site:
    """Two engines. A call reaches the other one when `connect` says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[str, Any]] = []
        self.pipes: dict[int, Pipe] = {}
        self.one, self.two = Engine(self, "one"), Engine(self, "two")

    def connect(self) -> None:
        """All calls reach whom they are for."""
        calls, self.calls = self.calls, []
        for address, on_connected in calls:
            near, far = pipe()
            self.pipes[near.fileno()], self.pipes[far.fileno()] = near, far
            on_connected(near, "")
            (self.one if address == "one" else self.two).connector.accepted(far, "")

    def turn(self) -> None:
        for _ in range(6):
            for engine in (self.one, self.two):
                engine.network.turn()
                engine.network.flush()

    def live(self, seconds: float) -> None:
        """Both loops turn for so long."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for engine in (self.one, self.two):
                engine.network.beat(is_alive=True)
            self.turn()


def crossed() -> tuple[Site, LoanTaken, LoanTaken]:
    """Both call each other at once, so that each borrows over a connection of its own."""
    site = Site()
    first, second = site.one.borrow(site.two.peer), site.two.borrow(site.one.peer)
    site.connect()
    site.turn()
    assert len(site.one.given) == len(site.two.given) == 1
    return site, first, second


def test_engines_that_call_each_other_at_once_hear_of_each_other_for_as_long_as_they_lend() -> None:
    site, first, second = crossed()
    site.live(4 * SILENCE_S)
    assert site.one.told == site.two.told == []
    assert max(first.quiet_s, second.quiet_s) < 0.3


def test_a_cut_breaks_all_connections_with_a_worker() -> None:
    site, _, _ = crossed()
    site.one.network.cut_off("two", 5.0)
    site.turn()
    assert sorted(site.one.told) == sorted(site.two.told) == sorted([CUT_OFF, "closed"])


def test_the_end_of_an_engine_ends_all_of_its_connections() -> None:
    site, _, _ = crossed()
    site.one.network.close()
    site.turn()
    assert sorted(site.two.told) == ["closed", "the engine has ended"]


def test_a_loan_that_is_opened_while_others_end_is_not_of_the_connection_that_ends() -> None:
    site = Site()
    site.one.borrow(site.two.peer)
    site.connect()
    site.turn()
    reasons: list[str] = []

    class Again:
        def lent(self, message: Lent) -> None: ...

        def ended(self, reason: str) -> None:
            reasons.append(reason)
            if len(reasons) == 1:
                site.one.network.open(site.two.peer, WANT, self)

    site.one.network.open(site.two.peer, WANT, Again())
    site.turn()
    site.two.network.close()
    site.turn()
    assert len(site.calls) == 1, "it is asked for over a connection of its own"
    site.calls.pop()[1](None, "refused")
    site.turn()
    assert len(reasons) == 2
    assert reasons[1].endswith("refused")
