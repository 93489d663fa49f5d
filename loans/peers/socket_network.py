"""The network of an engine's process: one connection to each other engine, for the loans of both directions.

    caller                                  listener
    OPEN  EngineHello(wanted incarnation) ─▶  checks version, incarnation, model
    Want … (a channel for each loan)      ─▶
                                          ◀─  NOTE EngineHello, or END with why not
                                          ◀─  Started, Blocks …

The loop sends a sign of life on each connection that has loans, so a peer learns that the engine hangs, not only that
its process lives. Silence counts only while this loop turns: a process that stood still knows nothing of its peers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.network.mux import MAX_FRAME_BYTES
from cluster.network.tls import MemberIdentity
from loans.network import CUT_OFF, OTHER_VERSION, GivesLoans, LoanNetwork, LoanTaken, Peer, TakesLoan, Want
from loans.peers.connection import VERSION, PeerConnection, Taken, hello_of, pack_want
from loans.peers.sockets import Connector, PeerSocket, Watcher
from protos import loans_pb2 as pb

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.03
"""Seconds between looks at all connections, which a busy loop must not make in each turn."""
STALL_S = 0.25
"""Longest time between two turns, in seconds, that counts as silence of peers."""
MAX_WANT_BYTES = MAX_FRAME_BYTES - (1 << 10)
MAX_CONNECTED_AHEAD = 64
"""Connections beyond which this engine answers no introduction. In a larger fleet most pairs never meet, and each
connection costs both sides memory and descriptors."""


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Identity of an engine, the address at which it listens, and its trust."""

    worker_id: str
    incarnation: bytes
    host: str
    port: int
    advertise_host: str
    silence_s: float
    """Seconds without a sign of life after which a peer with loans has failed."""
    trust: MemberIdentity | None = None
    secret: bytes = b""
    """Secret that peers must know; empty for none."""


class SocketNetwork(LoanNetwork):
    """Connections by the incarnation of the engine at the other end."""

    def __init__(
        self,
        settings: NetworkSettings,
        watcher: Watcher,
        clock: Callable[[], float] = time.monotonic,
        connector: Connector | None = None,
    ) -> None:
        """Create it; `connector` replaces the one of sockets."""
        self._settings = settings
        self.silence_s = settings.silence_s
        self.watcher = watcher
        self._clock = clock
        self._connector = connector or Connector(watcher, settings.trust, settings.secret)
        self.gives: GivesLoans
        self._hello = pb.EngineHello(version=VERSION, worker_id=settings.worker_id, incarnation=settings.incarnation)
        self.connections: dict[bytes, PeerConnection] = {}
        """Connections by which this engine borrows."""
        self.all_connections: dict[PeerConnection, None] = {}
        """All connections: also those by which only the caller borrows, and those of callers without a hello yet."""
        self.readable: dict[PeerConnection, None] = {}
        self.dirty: dict[PeerConnection, None] = {}
        """Connections with something to send."""
        self._calls: list[Callable[[], object]] = []
        """Calls for the next turn."""
        self._turned_at = clock()
        self._own_s = 0.0
        self._looked_at = -LOOK_EVERY_S
        self._cut_off: dict[str, float] = {}
        """Until when workers are cut off in a drill."""
        self._delay_s, self._delayed_until = 0.0, 0.0

    # ------------------------------------------------------------------ the engine's calls

    def start(self, gives: GivesLoans, model_fingerprint: bytes, endpoint: bytes) -> str:
        self.gives = gives
        self._hello.model_fingerprint, self._hello.endpoint = model_fingerprint, endpoint
        port = self._connector.listen(self._settings.host, self._settings.port, self._accepted)
        return f"{self._settings.advertise_host or self._settings.host}:{port}"

    def open(self, peer: Peer, want: Want, takes: TakesLoan) -> LoanTaken:
        payload = pack_want(want)
        if len(payload) > MAX_WANT_BYTES:
            return self._failed(takes, f"{len(payload)} bytes of tokens and keys are more than a message takes")
        if failure := self._unreachable(peer):
            return self._failed(takes, failure)
        return Taken(self._to(peer, is_ahead=False), payload, takes)

    def connect(self, peers: Sequence[Peer], on_done: Callable[[str, bytes, str], object]) -> None:
        for peer in peers:
            if failure := self._unreachable(peer):
                self.later(partial(on_done, peer.worker_id, b"", failure))
            else:
                connection = self._to(peer, is_ahead=True)
                connection.when_known(partial(on_done, peer.worker_id))

    def turn(self) -> bool:
        self._tell_time()
        has_news = self._connector.take()
        while self.readable:
            readable, self.readable = self.readable, {}
            for connection in readable:
                connection.read()
            has_news = True
        while self._calls:
            calls, self._calls = self._calls, []
            for call in calls:
                call()
            has_news = True
        return has_news

    def flush(self) -> None:
        if not self.dirty:
            return
        dirty, self.dirty = self.dirty, {}
        for connection in dirty:
            connection.write()

    def beat(self, is_alive: bool) -> None:
        self._tell_time()
        if self._own_s - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._own_s
        for connection in list(self.all_connections):
            connection.beat(is_alive)

    def cut_off(self, worker_id: str, seconds: float) -> None:
        self._cut_off[worker_id] = self._clock() + seconds
        for connection in self.all_connections:
            if connection.worker_id == worker_id:
                self.later(partial(connection.fail, CUT_OFF))

    def delay(self, delay_s: float, seconds: float) -> None:
        self._delay_s, self._delayed_until = delay_s, self._clock() + seconds

    def close(self) -> None:
        self._connector.close()
        for connection in list(self.all_connections):
            connection.fail("the engine has ended")

    # ------------------------------------------------------------------ its connections

    @property
    def now(self) -> float:
        """Seconds of a clock that stands still while this loop does."""
        return self._own_s

    @property
    def delay_s(self) -> float:
        return self._delay_s if self._clock() < self._delayed_until else 0.0

    def _tell_time(self) -> None:
        now = self._clock()
        self._own_s += min(now - self._turned_at, STALL_S)
        self._turned_at = now

    def later(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self.watcher.wake()

    def _failed(self, takes: TakesLoan, reason: str) -> "LoanTaken":
        taken = _NeverTaken()
        self.later(lambda: None if taken.is_closed else takes.ended(reason))
        return taken

    def _unreachable(self, peer: Peer) -> str:
        if not peer.address:
            return OTHER_VERSION
        return CUT_OFF if self._clock() < self._cut_off.get(peer.worker_id, 0.0) else ""

    def _to(self, peer: Peer, is_ahead: bool) -> "PeerConnection":
        """Return the connection to a peer, which may have to be made."""
        connection = self.connections.get(peer.incarnation)
        if connection is None or not connection.mux.is_open:  # a loan may be opened while those before it end
            hello = pb.EngineHello(wanted_incarnation=peer.incarnation, is_ahead=is_ahead)
            hello.MergeFrom(self._hello)
            connection = PeerConnection(self, peer.worker_id, peer.address, hello.SerializeToString())
            self.connections[peer.incarnation] = connection
            self.all_connections[connection] = None
            connection.incarnation = peer.incarnation
            self._connector.connect(peer.address, connection.connected)
        return connection

    def _accepted(self, connected: PeerSocket | None, failure: str) -> None:
        if connected is None:
            log.info("a connection of another engine failed: %s", failure)
            return
        connection = PeerConnection(self, "", "", None)
        self.all_connections[connection] = None
        connection.connected(connected, "")

    def greeted(self, connection: "PeerConnection", payload: bytes) -> None:
        """Take or refuse a caller."""
        hello = hello_of(payload)
        own, refusal = self._hello, ""
        if hello.version != own.version:
            refusal = f"version: this engine speaks version {own.version} of loans, not {hello.version}"
        elif hello.wanted_incarnation != own.incarnation:
            refusal = "incarnation: does not match: another worker process listens at this address now"
        elif hello.model_fingerprint != own.model_fingerprint:
            refusal = "model_fingerprint: weights, layout or dtype differ from the borrower's"
        elif self._clock() < self._cut_off.get(hello.worker_id, 0.0):
            refusal = CUT_OFF
        if refusal:
            connection.fail(refusal)
            return
        connection.worker_id, connection.incarnation = hello.worker_id, hello.incarnation
        connection.mux.note(own.SerializeToString())
        connection.known(hello.endpoint)
        # Where both called each other, each uses its own connection for what it borrows.
        self.connections.setdefault(hello.incarnation, connection)
        if hello.is_ahead and len(self.connections) <= MAX_CONNECTED_AHEAD:
            self.gives.met(hello.endpoint)

    def ended(self, connection: "PeerConnection") -> None:
        self.all_connections.pop(connection, None)
        self.readable.pop(connection, None)
        self.dirty.pop(connection, None)
        if self.connections.get(connection.incarnation) is connection:
            del self.connections[connection.incarnation]


class _NeverTaken(LoanTaken):
    """A loan that could not even be asked for."""

    is_closed = False
    endpoint = b""
    quiet_s = 0.0

    def release(self, first: int, count: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.is_closed = True
