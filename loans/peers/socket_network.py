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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import DecodeError

from cluster.network.mux import MAX_FRAME_BYTES, Channel, Mux, ProtocolError
from cluster.network.tls import MemberIdentity
from loans.messages import Lent, Peer, Want
from loans.network import CUT_OFF, OTHER_VERSION, GivesLoans, LoanGiven, LoanNetwork, LoanTaken, TakesLoan
from loans.peers.sockets import Connector, PeerSocket, Watcher
from loans.peers.wire import (
    VERSION,
    pack_lent,
    pack_release,
    pack_want,
    unpack_lent,
    unpack_releases,
    unpack_want,
)
from protos import loans_pb2 as pb

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.12
"""Seconds between signs of life on a connection with loans; the loop turns every 0.15 s at least."""
LOOK_EVERY_S = 0.03
"""Seconds between looks at all connections, which a busy loop must not make in each turn."""
BEATS_PER_SILENCE = 5
"""Signs of life per tolerated silence, where HEARTBEAT_S would be too rare."""
IDLE_BEAT_S, IDLE_SILENCE_S = 5.0, 15.0
"""Seconds between signs of life on a connection without loans, and seconds of silence after which it has failed."""
GREET_S = 5.0
"""Seconds that a caller has for its hello."""
STALL_S = 0.25
"""Longest time between two turns, in seconds, that counts as silence of peers."""
MAX_WANT_BYTES = MAX_FRAME_BYTES - (1 << 10)
MAX_CONNECTED_AHEAD = 64
"""Connections beyond which this engine answers no introduction. In a larger fleet most pairs never meet, and each
connection costs both sides memory and descriptors."""
SEND_BYTES = 256 << 10
"""Bytes of frames that are sent at once."""


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Who an engine is, where it listens, and whom it trusts."""

    worker_id: str
    incarnation: bytes
    host: str
    port: int
    advertise_host: str
    silence_s: float
    """Seconds without a sign of life after which a peer with loans has failed."""
    trust: MemberIdentity | None = None


class SocketNetwork(LoanNetwork):
    """Connections by the incarnation of the engine at the other end."""

    def __init__(
        self, settings: NetworkSettings, watcher: Watcher, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._watcher = watcher
        self._clock = clock
        self._connector = Connector(watcher, settings.trust)
        self._gives: GivesLoans
        self._hello = pb.EngineHello(version=VERSION, worker_id=settings.worker_id, incarnation=settings.incarnation)
        self._connections: dict[bytes, _Connection] = {}
        """Connections by which this engine borrows."""
        self._all: dict[_Connection, None] = {}
        """Also those of callers by which only the caller borrows, or that have not said who they are."""
        self._readable: dict[_Connection, None] = {}
        self._dirty: dict[_Connection, None] = {}
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
        self._gives = gives
        self._hello.model_fingerprint, self._hello.endpoint = model_fingerprint, endpoint
        port = self._connector.listen(self._settings.host, self._settings.port, self._accepted)
        return f"{self._settings.advertise_host or self._settings.host}:{port}"

    def open(self, peer: Peer, want: Want, takes: TakesLoan) -> LoanTaken:
        payload = pack_want(want)
        if len(payload) > MAX_WANT_BYTES:
            return self._failed(takes, f"{len(payload)} bytes of tokens and keys are more than a message takes")
        if failure := self._unreachable(peer):
            return self._failed(takes, failure)
        return _Taken(self._to(peer, is_ahead=False), payload, takes)

    def connect(self, peers: Sequence[Peer], on_done: Callable[[str, bytes, str], object]) -> None:
        for peer in peers:
            if failure := self._unreachable(peer):
                self._later(partial(on_done, peer.worker_id, b"", failure))
            else:
                connection = self._to(peer, is_ahead=True)
                connection.when_known(partial(on_done, peer.worker_id))

    def turn(self) -> bool:
        self._tell_time()
        has_news = self._connector.take()
        while self._readable:
            readable, self._readable = self._readable, {}
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
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, {}
        for connection in dirty:
            connection.write()

    def beat(self, is_alive: bool) -> None:
        self._tell_time()
        if self._own_s - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._own_s
        for connection in list(self._all):
            connection.beat(is_alive)

    def cut_off(self, worker_id: str, seconds: float) -> None:
        self._cut_off[worker_id] = self._clock() + seconds
        for connection in self._all:
            if connection.worker_id == worker_id:
                self._later(partial(connection.fail, CUT_OFF))

    def delay(self, delay_s: float, seconds: float) -> None:
        self._delay_s, self._delayed_until = delay_s, self._clock() + seconds

    def close(self) -> None:
        self._connector.close()
        for connection in list(self._all):
            connection.fail("the engine has ended")

    # ------------------------------------------------------------------ its connections

    @property
    def now(self) -> float:
        """Seconds of a clock that stands still while this loop does."""
        return self._own_s

    def _tell_time(self) -> None:
        now = self._clock()
        self._own_s += min(now - self._turned_at, STALL_S)
        self._turned_at = now

    def _later(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self._watcher.wake()

    def _failed(self, takes: TakesLoan, reason: str) -> "LoanTaken":
        taken = _NeverTaken()
        self._later(lambda: None if taken.is_closed else takes.ended(reason))
        return taken

    def _unreachable(self, peer: Peer) -> str:
        if not peer.address:
            return OTHER_VERSION
        return CUT_OFF if self._clock() < self._cut_off.get(peer.worker_id, 0.0) else ""

    def _to(self, peer: Peer, is_ahead: bool) -> "_Connection":
        """Return the connection to a peer, which may have to be made."""
        connection = self._connections.get(peer.incarnation)
        if connection is None or not connection.mux.is_open:  # a loan may be opened while those before it end
            hello = pb.EngineHello(wanted_incarnation=peer.incarnation, is_ahead=is_ahead)
            hello.MergeFrom(self._hello)
            connection = _Connection(self, peer.worker_id, peer.address, hello.SerializeToString())
            self._connections[peer.incarnation] = connection
            self._all[connection] = None
            connection.incarnation = peer.incarnation
            self._connector.connect(peer.address, connection.connected)
        return connection

    def _accepted(self, connected: PeerSocket | None, failure: str) -> None:
        if connected is None:
            log.info("a connection of another engine failed: %s", failure)
            return
        connection = _Connection(self, "", "", None)
        self._all[connection] = None
        connection.connected(connected, "")

    def _greeted(self, connection: "_Connection", payload: bytes) -> None:
        """Take or refuse a caller."""
        hello = _hello_of(payload)
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
        self._connections.setdefault(hello.incarnation, connection)
        if hello.is_ahead and len(self._connections) <= MAX_CONNECTED_AHEAD:
            self._gives.met(hello.endpoint)

    def _ended(self, connection: "_Connection") -> None:
        self._all.pop(connection, None)
        self._readable.pop(connection, None)
        self._dirty.pop(connection, None)
        if self._connections.get(connection.incarnation) is connection:
            del self._connections[connection.incarnation]


class _Connection:
    """One connection, from the wish to make it to its end."""

    def __init__(self, network: SocketNetwork, worker_id: str, address: str, opening: bytes | None) -> None:
        """Create it; `opening` is the hello of the side that calls."""
        self.network = network
        self.worker_id = worker_id
        self.incarnation = b""
        self.endpoint = b""
        self.mux = Mux(opening, self._opened, self._wants_write)
        self.mux.on_opened = lambda payload: network._greeted(self, payload)
        self.mux.on_note = self._on_note
        self._address = address
        self._is_caller = opening is not None
        self._socket: PeerSocket | None = None
        self._waiting: list[Callable[[bytes, str], object]] = []
        """Calls that wait for the peer's endpoint."""
        self._reason = b""
        self.mux.on_end.append(self._keep_reason)
        self._watches_writing = False
        self._heard_at = self._began_at = network.now
        self._sent_at = network.now
        self._was_busy = False
        self._held_until: float | None = None
        """Time until which nothing is sent, in a drill."""

    @property
    def quiet_s(self) -> float:
        return self.network.now - self._heard_at

    def when_known(self, call: Callable[[bytes, str], object]) -> None:
        """Call a function with the peer's endpoint once it is known, or with why it never will be."""
        if self.endpoint:
            self.network._later(partial(call, self.endpoint, ""))
        else:
            self._waiting.append(call)

    def known(self, endpoint: bytes) -> None:
        """Process that the peer has said who it is."""
        log.info("connected to %s", self.worker_id)
        self.endpoint = endpoint
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.network._later(partial(call, endpoint, ""))

    def connected(self, connected: PeerSocket | None, failure: str) -> None:
        """Take the socket, or the reason why there is none."""
        if not self.mux.is_open:  # it was given up meanwhile
            if connected is not None:
                connected.close()
            return
        if connected is None:
            self.fail(f"no connection to the lender's engine at {self._address} (loan_port): {failure}")
            return
        self._socket = connected
        self._heard_at = self._began_at = self.network.now
        self.network._watcher.watch(connected.fileno(), self._on_ready)
        self._wants_write()

    def start_silence(self) -> None:
        """Count the peer's silence from now on: the first loan was opened."""
        if not self._was_busy:
            self._was_busy = True
            self._heard_at = self.network.now

    def read(self) -> None:
        """Process what has arrived."""
        while self._socket is not None:
            try:
                data = self._socket.receive()
            except OSError as error:
                self.fail(f"the connection broke: {error}")
                return
            if data is None:
                return
            if not data:
                self.fail("the connection was closed")
                return
            self._heard_at = self.network.now
            try:
                self.mux.receive(data)
            except ProtocolError as error:
                log.warning("the connection with %s ends: %s", self.worker_id or "a caller", error)
                self.fail(f"protocol error: {error}")
                return
            if not self.mux.is_open:
                self._leave()
                return

    def write(self) -> None:
        """Send what there is, as far as there is room."""
        if self._socket is None or self._is_held():
            return
        try:
            while not self._socket.has_unsent:
                frames, num_bytes = [], 0
                while num_bytes < SEND_BYTES and (frame := self.mux.take()):
                    frames.append(frame)
                    num_bytes += len(frame)
                if not frames:
                    break
                self._sent_at = self.network.now
                self._socket.send(b"".join(frames))
            if self._socket.has_unsent:
                self._socket.send(b"")
            if self._socket.has_unsent is not self._watches_writing:
                self._watches_writing = self._socket.has_unsent
                self.network._watcher.watch_writing(self._socket.fileno(), self._watches_writing)
        except OSError as error:
            self.network._later(partial(self.fail, f"the connection broke: {error}"))

    def beat(self, is_alive: bool) -> None:
        """Send a sign of life if one is due, and give up a silent peer."""
        if self._socket is None:
            return  # the connector gives it up
        settings, now, is_busy = self.network._settings, self.network.now, self.mux.num_channels > 0
        if is_busy:
            self.start_silence()
        self._was_busy = is_busy
        silence_s = settings.silence_s if is_busy else IDLE_SILENCE_S
        if not self.incarnation and now - self._began_at > GREET_S:
            self.fail(f"no hello came within {GREET_S:g} s")
        elif now - self._heard_at >= silence_s:
            self.fail(f"the peer was silent for {silence_s:g} s")
        elif is_alive:
            beat_s = min(HEARTBEAT_S, silence_s / BEATS_PER_SILENCE) if is_busy else IDLE_BEAT_S
            if now - self._sent_at >= beat_s:
                self.mux.beat()

    def fail(self, reason: str) -> None:
        """End the connection and all its loans."""
        if self.mux.is_open:
            self.mux.end(reason.encode())
        self._leave()

    def _leave(self) -> None:
        if self._socket is not None:
            try:
                while not self._socket.has_unsent and (frame := self.mux.take()):
                    self._socket.send(frame)  # the reason, if the peer reads
            except OSError:
                pass  # it is gone
            self.network._watcher.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self.network._ended(self)
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.network._later(partial(call, b"", self._reason.decode(errors="replace")))

    def _keep_reason(self, reason: bytes) -> None:
        self._reason = reason or b"the peer ended the connection"

    def _is_held(self) -> bool:
        """Return whether a drill delays what is sent; it is sent when the delay is over."""
        network, now = self.network, self.network._clock()
        if self._held_until is None:
            if now >= network._delayed_until:
                return False
            self._held_until = now + network._delay_s
            timer = threading.Timer(network._delay_s, network._watcher.wake)
            timer.daemon = True
            timer.start()
        if now < self._held_until:
            network._dirty[self] = None
            return True
        self._held_until = None
        return False

    def _on_ready(self) -> None:
        self.network._readable[self] = None
        if self._socket is not None and self._socket.has_unsent:
            self.network._dirty[self] = None

    def _wants_write(self) -> None:
        self.network._dirty[self] = None

    def _on_note(self, payload: bytes) -> None:
        """Process the answer of the engine that was called."""
        hello = _hello_of(payload)
        if hello.incarnation != self.incarnation:
            raise ProtocolError("another engine answers than was called")
        self.known(hello.endpoint)

    def _opened(self, channel: Channel, payload: bytes) -> None:
        """Process that the peer opens a loan."""
        given, gives = _Given(channel), self.network._gives

        def released(messages: Sequence[bytes]) -> None:
            for release in unpack_releases(messages):
                gives.released(given, *release)

        channel.on_messages = released
        channel.on_end = lambda _: gives.closed(given)
        gives.opened(given, unpack_want(payload))


class _Given(LoanGiven):
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, message: Lent) -> None:
        for part in pack_lent(message):
            self._channel.send(part)

    def refuse(self, reason: str) -> None:
        self._channel.end(reason.encode())


class _Taken(LoanTaken):
    def __init__(self, connection: _Connection, payload: bytes, takes: TakesLoan) -> None:
        self._connection = connection
        self._channel = channel = connection.mux.open(payload)
        connection.start_silence()

        def lent(messages: Sequence[bytes]) -> None:
            for message in messages:
                takes.lent(unpack_lent(message))

        channel.on_messages = lent
        channel.on_end = lambda reason: takes.ended(reason.decode(errors="replace") or "the lender ended the loan")

    @property
    def endpoint(self) -> bytes:
        return self._connection.endpoint

    @property
    def quiet_s(self) -> float:
        return self._connection.quiet_s

    def release(self, first: int, count: int) -> None:
        self._channel.send(pack_release(first, count))

    def close(self) -> None:
        self._channel.cancel()


class _NeverTaken(LoanTaken):
    """A loan that could not even be asked for."""

    is_closed = False
    endpoint = b""
    quiet_s = 0.0

    def release(self, first: int, count: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.is_closed = True


def _hello_of(payload: bytes) -> pb.EngineHello:
    try:
        return pb.EngineHello.FromString(payload)
    except DecodeError as error:
        raise ProtocolError(f"a hello is not valid: {error}") from error
