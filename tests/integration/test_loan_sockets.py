"""Loans between engines over real sockets: hellos, both directions, ends, silence, drills, TLS and garbage."""

import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.network.tls import Credentials, File, MemberIdentity
from kvcache.items import Item
from loans.network import CUT_OFF, OTHER_VERSION, Blocks, Lent, LoanGiven, LoanTaken, Peer, PlacementMark, Started, Want
from loans.peers import socket_network
from loans.peers.socket_network import NetworkSettings, SocketNetwork
from support.certificates import Authority
from support.ports import free_port

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


engines: list[Engine] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    for engine in engines:
        engine.network.close()
    engines.clear()


def engine(name: str, **options: object) -> Engine:
    engines.append(Engine(name, **options))  # type: ignore[arg-type]
    return engines[-1]


def pair(**options: object) -> tuple[Engine, Engine]:
    return engine("a", **options), engine("b", **options)


def lent(**options: object) -> tuple[Engine, Engine, Any]:
    """Two engines and a loan of the second to the first, which the second has heard of."""
    a, b = pair(**options)
    loan = a.borrow(b.peer, want_of())
    until(lambda: b.wants, a, b)
    return a, b, loan


def test_a_loan_from_want_to_close() -> None:
    a, b = pair()
    source = Peer("c", "10.0.0.1:7", b"c" * 16)
    item = Item(b"i" * 16, 2, 5, b"details", "address", "encoder")
    want = want_of(request_id="client's", first_block=1, priority=-3, adapter=b"x" * 16, items=(item,))
    want = want._replace(mark=PlacementMark("router", 9), source=source, reads_store=True)
    loan = a.borrow(b.peer, want)
    until(lambda: b.wants, a, b)
    got = b.wants[0]
    assert got._replace(token_ids=list(got.token_ids)) == want
    b.given[0].send(STARTED)
    b.given[0].send(BLOCKS)
    until(lambda: len(loan.messages) == 2, a, b)
    assert loan.messages == [STARTED, BLOCKS]
    assert loan.taken.endpoint == b.endpoint
    loan.taken.release(0, 2)
    until(lambda: b.released == [(0, 2)], a, b)
    loan.taken.close()
    until(lambda: b.closed, a, b)
    assert loan.reason is None, "who closes is not told of the end"


def test_one_connection_serves_both_directions() -> None:
    a, b = pair()
    first = a.borrow(b.peer, want_of())
    until(lambda: b.wants, a, b)
    second = b.borrow(a.peer, want_of())
    until(lambda: a.wants, a, b)
    assert len(a.network.connections) == len(b.network.connections) == 1
    a.given[0].refuse("no room")
    b.given[0].send(STARTED)
    until(lambda: first.messages and second.reason, a, b)
    assert second.reason == "no room"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"incarnation": b"before"}, "incarnation: does not match"),
        ({"address": ""}, OTHER_VERSION),
        ({"address": "127.0.0.1:1"}, r"no connection to the lender's engine at 127.0.0.1:1 \(loan_port\)"),
        ({"address": "nowhere"}, "no connection to the lender's engine at nowhere"),
    ],
)
def test_an_engine_that_is_not_there(change: dict[str, object], reason: str) -> None:
    a, b = pair()
    loan = a.borrow(b.peer._replace(**change), want_of())
    until(lambda: loan.reason, a, b)
    assert loan.reason.startswith(reason.replace("\\", "")), loan.reason
    assert not b.wants
    assert not a.network.connections, "the next loan tries again"


def test_another_model_or_version_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = engine("a"), engine("b", model=b"other")
    loan = a.borrow(b.peer, want_of())
    until(lambda: loan.reason, a, b)
    assert loan.reason == "model_fingerprint: weights, layout or dtype differ from the borrower's"
    monkeypatch.setattr(socket_network, "VERSION", 7)
    c = engine("c")
    loan = c.borrow(a.peer, want_of())
    until(lambda: loan.reason, a, c)
    assert loan.reason == "version: this engine speaks version 1 of loans, not 7"
    assert not a.wants
    assert not b.wants


def test_a_process_that_ends_ends_its_loans() -> None:
    a, b = pair()
    taken = a.borrow(b.peer, want_of())
    until(lambda: b.wants, a, b)
    given = b.borrow(a.peer, want_of())
    until(lambda: a.wants, a, b)
    b.network.close()
    b.is_stopped = True
    until(lambda: taken.reason and a.closed, a)
    assert given.reason is not None
    again = a.borrow(b.peer, want_of())
    until(lambda: again.reason, a)
    assert "no connection" in str(again.reason)


def test_a_silent_engine_is_noticed_and_then_given_up() -> None:
    a, b = engine("a", silence_s=0.6), engine("b")
    loan = a.borrow(b.peer, want_of())
    until(lambda: b.wants, a, b)
    b.is_stopped = True
    until(lambda: loan.taken.quiet_s > 0.3, a)
    assert loan.reason is None
    until(lambda: loan.reason, a)
    assert loan.reason == "the peer was silent for 0.6 s"
    b.is_stopped = False
    until(lambda: b.closed, b)


def test_an_idle_connection_is_no_silence() -> None:
    a, b, loan = lent(silence_s=0.5)
    loan.taken.close()
    until(lambda: b.closed, a, b)
    began_at = a.network.now
    until(lambda: a.network.now - began_at > 1.0, a, b)
    assert len(a.network.connections) == 1
    again = a.borrow(b.peer, want_of())
    assert again.taken.quiet_s < 0.5
    until(lambda: len(b.wants) == 2, a, b)


def test_a_slow_reader_gets_everything_in_order() -> None:
    """The lender is far ahead: what its peer's socket does not take waits for credit and room."""
    a, b, loan = lent()
    b.given[0].send(STARTED)
    for number in range(2000):
        b.given[0].send(BLOCKS._replace(first=number, block_ids=(number,), fingerprints=bytes(8192)))
        if number % 100 == 0:
            b.turn()
    until(lambda: len(loan.messages) == 2001, a, b)
    assert [message.first for message in loan.messages[1:]] == list(range(2000))  # type: ignore[union-attr]


def test_a_want_that_no_message_holds_ends_its_loan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_network, "MAX_WANT_BYTES", 1000)
    a, b = pair()
    loan = a.borrow(b.peer, want_of(100))
    assert loan.reason is None, "not from within the call"
    until(lambda: loan.reason, a, b)
    assert "are more than a message takes" in str(loan.reason)


def test_engines_connect_ahead() -> None:
    a, b = pair()
    done: list[tuple[str, bytes, str]] = []
    nobody = Peer("nobody", f"127.0.0.1:{free_port()}", b"n" * 16)
    a.network.connect([b.peer, nobody], lambda *each: done.append(each))
    until(lambda: len(done) == 2 and b.met, a, b)
    (_, none, failure), ours = sorted(done, key=lambda each: each[1])
    assert ours == ("b", b.endpoint, "")
    assert none == b""
    assert "no connection" in failure
    assert b.met == [a.endpoint], "it connects to the caller's memory, too"
    loan = a.borrow(b.peer, want_of())
    until(lambda: b.wants, a, b)
    assert len(a.network.connections) == 1
    assert loan.reason is None


def test_a_drill_cuts_off_a_worker() -> None:
    a, b, loan = lent()
    a.network.cut_off("b", 0.5)
    until(lambda: loan.reason and b.closed, a, b)
    again = a.borrow(b.peer, want_of())
    until(lambda: again.reason, a, b)
    assert loan.reason == again.reason == CUT_OFF
    into = b.borrow(a.peer, want_of())
    until(lambda: into.reason, a, b)
    assert into.reason == CUT_OFF, "both directions are cut"
    began_at = a.network.now
    until(lambda: a.network.now - began_at > 0.5, a, b)
    last = a.borrow(b.peer, want_of())
    until(lambda: len(b.wants) == 2, a, b)
    assert last.reason is None


def test_a_drill_delays_messages() -> None:
    a, b = pair()
    a.network.delay(0.3, 60.0)
    began_at = a.network.now
    a.borrow(b.peer, want_of())
    until(lambda: b.wants, a, b)
    assert a.network.now - began_at >= 0.3


@pytest.fixture
def trusts(tmp_path: Path) -> dict[str, MemberIdentity]:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    issued = {"member": ours.issue("member"), "stranger": others.issue("stranger")}
    return {
        name: MemberIdentity(
            Credentials(
                File("tls_cert", each.cert),
                File("tls_key", each.key),
                [File("tls_ca", (ours if name == "member" else others).path)],
            )
        )
        for name, each in issued.items()
    }


def test_members_prove_themselves(trusts: dict[str, MemberIdentity]) -> None:
    a, b, loan = lent(trust=trusts["member"])
    b.given[0].send(BLOCKS._replace(block_ids=tuple(range(40_000)), fingerprints=bytes(16 * 40_000)))
    until(lambda: loan.messages, a, b)
    stranger, plain = engine("s", trust=trusts["stranger"]), engine("p")
    for other in (stranger, plain):
        loans = other.borrow(b.peer, want_of()), b.borrow(other.peer, want_of())
        until(lambda loans=loans: all(each.reason for each in loans), b, other)
    assert len(b.wants) == 1
    assert not stranger.wants
    assert not plain.wants


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n" * 40,
    struct.pack(">IB", 3, 1) + b"\xff\xff\xff",
    struct.pack(">IB", 0, 16),
    struct.pack(">IB", 1 << 30, 1),
    bytes(64),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_ends_its_connection_only(garbage: bytes) -> None:
    a, b, loan = lent()
    host, _, port = b.address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(garbage)
        connection.setblocking(False)
        ended = []

        def read() -> bool:
            try:
                ended.append(not connection.recv(4096))
            except BlockingIOError:
                return False
            except ConnectionError:
                ended.append(True)
            return any(ended)

        until(read, a, b)
    b.given[0].send(STARTED)
    until(lambda: loan.messages, a, b)


def test_a_caller_that_says_nothing_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loans.peers.connection.GREET_S", 0.2)
    b = engine("b")
    host, _, port = b.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        until(lambda: b.network.all_connections, b)
        until(lambda: not b.network.all_connections, b)
