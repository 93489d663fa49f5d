"""Networks of engines over real sockets, each driven as an engine's loop drives it, and ends of loans that record."""

import os
import selectors
import time
from collections.abc import Callable
from typing import Any

from cluster.network.tls import MemberIdentity
from loans.network import Blocks, Lent, LoanGiven, LoanTaken, Peer, Started, Want
from loans.peers.socket_network import NetworkSettings, SocketNetwork

MODEL = b"m" * 16
WAIT_S = 20.0
"""Seconds after which a wait has failed; no test is as slow on any machine."""


class Loop:
    """The loop of one engine."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._event, selectors.EVENT_READ, lambda: os.eventfd_read(self._event))

    def watch(self, descriptor: int, on_readable: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, on_readable)

    def watch_writing(self, descriptor: int, is_wanted: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_wanted else 0)
        self._selector.modify(descriptor, events, self._selector.get_key(descriptor).data)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()


class Taker:
    """The borrower of one loan."""

    def __init__(self) -> None:
        self.messages: list[Lent] = []
        self.reason: str | None = None
        self.taken: LoanTaken

    def lent(self, message: Lent) -> None:
        assert self.reason is None, "a message came after the end"
        self.messages.append(message)

    def ended(self, reason: str) -> None:
        assert self.reason is None, "the loan ended twice"
        self.reason = reason


class Engine:
    """One engine's network, which lends what it is asked for."""

    def __init__(
        self, name: str, trust: MemberIdentity | None = None, silence_s: float = 1e6, model: bytes = MODEL
    ) -> None:
        self.loop = Loop()
        self.incarnation = name.encode() * 4
        self.endpoint = b"memory of " + name.encode()
        settings = NetworkSettings(
            name, self.incarnation, "127.0.0.1", 0, "localhost" if trust else "", silence_s, trust
        )
        self.network = SocketNetwork(settings, self.loop)
        self.wants: list[Want] = []
        self.given: list[LoanGiven] = []
        self.released: list[tuple[int, int]] = []
        self.closed: list[LoanGiven] = []
        self.met: list[bytes] = []
        self.address = self.network.start(_Gives(self), model, self.endpoint)
        self.peer = Peer(name, self.address, self.incarnation)
        self.is_stopped = False

    def borrow(self, peer: Peer, want: Want) -> Taker:
        taker = Taker()
        taker.taken = self.network.open(peer, want, taker)
        return taker

    def turn(self) -> None:
        if not self.is_stopped:
            self.loop.wait(0.005)
            self.network.turn()
            self.network.beat(is_alive=True)
            self.network.flush()


class _Gives:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def opened(self, loan: LoanGiven, want: Want) -> None:
        self._engine.wants.append(want)
        self._engine.given.append(loan)

    def released(self, loan: LoanGiven, first: int, count: int) -> None:
        assert loan in self._engine.given
        self._engine.released.append((first, count))

    def closed(self, loan: LoanGiven) -> None:
        assert loan not in self._engine.closed, "a loan was closed twice"
        self._engine.closed.append(loan)

    def met(self, endpoint: bytes) -> None:
        self._engine.met.append(endpoint)


def until(condition: Callable[[], Any], *engines: Engine) -> None:
    """Turn all engines until something is true."""
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at, "it does not become true"
        for engine in engines:
            engine.turn()


def want_of(num_blocks: int = 3, **fields: Any) -> Want:
    keys = [number.to_bytes(16, "big") for number in range(num_blocks)]
    return Want("r", keys, 0, may_compute=True, token_ids=list(range(4 * num_blocks)), root=b"r")._replace(**fields)


STARTED = Started(3, 1, 0.5)
BLOCKS = Blocks(0, (7, 8), b"f" * 32, fetched=True)
