"""One connection to another engine: its multiplexer, its signs of life, and the loans of both directions.

Messages of loans as bytes of `protos/loans.proto`.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError

from cluster.network.mux import Channel, Mux, ProtocolError
from kvcache.block_keys import KEY_BYTES, BlockKey, pack_tokens, unpack_tokens
from kvcache.item_messages import item_messages, read_items
from loans.network import (
    Blocks,
    GivesLoans,
    Lent,
    LoanGiven,
    LoanTaken,
    Peer,
    PlacementMark,
    Release,
    Started,
    TakesLoan,
    Want,
)
from loans.peers.sockets import PeerSocket, Watcher
from protos import loans_pb2 as pb

log = logging.getLogger(__name__)


VERSION = 1
"""Version of the messages between engines. Routers pair engines of one version only."""
MAX_FINGERPRINT_BYTES = 4 << 20
"""Bytes of fingerprints in one message; a longer announcement is several messages."""


def holder_of(peer: Peer) -> pb.Holder:
    return pb.Holder(worker_id=peer.worker_id, loan_address=peer.address, incarnation=peer.incarnation)


def peer_of(holder: pb.Holder) -> Peer:
    """Undo `holder_of`."""
    return Peer(holder.worker_id, holder.loan_address, holder.incarnation)


def pack_keys(keys: Iterable[BlockKey]) -> bytes:
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Undo `pack_keys`. Raises ValueError."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of keys of {KEY_BYTES}")
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def pack_want(want: Want) -> bytes:
    message = pb.Want(
        request_id=want.request_id,
        keys=pack_keys(want.keys),
        first_block=want.first_block,
        may_compute=want.may_compute,
        token_ids=pack_tokens(want.token_ids),
        root=want.root,
        adapter=want.adapter,
        priority=want.priority,
        router_id=want.mark.router_id,
        placement_sequence=want.mark.sequence,
        source=None if want.source is None else holder_of(want.source),
        reads_store=want.reads_store,
        items=item_messages(want.items),
        only_counts=want.only_counts,
    )
    return message.SerializeToString()


def unpack_want(payload: bytes) -> Want:
    """Undo `pack_want`. Raises ProtocolError."""
    try:
        message = pb.Want.FromString(payload)
        keys, token_ids = unpack_keys(message.keys), unpack_tokens(message.token_ids)
    except (DecodeError, ValueError) as error:
        raise ProtocolError(f"a want is not valid: {error}") from error
    return Want(
        message.request_id,
        keys,
        message.first_block,
        message.may_compute,
        token_ids,
        message.root,
        message.priority,
        message.adapter,
        PlacementMark(message.router_id, message.placement_sequence),
        peer_of(message.source) if message.HasField("source") else None,
        message.reads_store,
        read_items(message.items),
        message.only_counts,
    )


def pack_lent(message: Lent) -> Iterator[bytes]:
    """Yield a lender's message, in parts below the size limit."""
    if isinstance(message, Started):
        yield pb.Lent(started=pb.Started(**message._asdict())).SerializeToString()
        return
    first, block_ids, fingerprints, fetched = message
    width = len(fingerprints) // len(block_ids)
    step = max(1, MAX_FINGERPRINT_BYTES // width) if width else len(block_ids)
    for at in range(0, len(block_ids), step):
        part = fingerprints[at * width : (at + step) * width]
        blocks = pb.Blocks(first=first + at, block_ids=block_ids[at : at + step], fingerprints=part, fetched=fetched)
        yield pb.Lent(blocks=blocks).SerializeToString()


def unpack_lent(payload: bytes) -> Lent:
    """Undo `pack_lent` for one part. Raises ProtocolError."""
    try:
        message = pb.Lent.FromString(payload)
    except DecodeError as error:
        raise ProtocolError(f"a lender's message is not valid: {error}") from error
    match message.WhichOneof("message"):
        case "started":
            started = message.started
            return Started(started.end_block, started.cached_end_block, started.queued_ms, started.num_waiting)
        case "blocks":
            blocks = message.blocks
            return Blocks(blocks.first, tuple(blocks.block_ids), blocks.fingerprints, blocks.fetched)
    raise ProtocolError("a lender's message is empty")


def pack_release(first: int, count: int) -> bytes:
    return pb.Release(first=first, count=count).SerializeToString()


def unpack_releases(payloads: Sequence[bytes]) -> Iterator[Release]:
    """Undo `pack_release`. Raises ProtocolError."""
    for payload in payloads:
        try:
            message = pb.Release.FromString(payload)
        except DecodeError as error:
            raise ProtocolError(f"a release is not valid: {error}") from error
        yield Release(message.first, message.count)


HEARTBEAT_S = 0.12
"""Seconds between signs of life on a connection with loans; the loop turns every 0.15 s at least."""
BEATS_PER_SILENCE = 5
"""Signs of life per tolerated silence, where HEARTBEAT_S would be too rare."""
IDLE_BEAT_S, IDLE_SILENCE_S = 5.0, 15.0
"""Seconds between signs of life on a connection without loans, and seconds of silence after which it has failed."""
GREET_S = 5.0
"""Seconds that a caller has for its hello."""
SEND_BYTES = 256 << 10
"""Bytes of frames that are sent at once."""


class ConnectionHost(Protocol):
    """The network of a connection."""

    watcher: Watcher
    silence_s: float
    """Seconds without a sign of life after which a peer with loans has failed."""
    gives: GivesLoans
    readable: "dict[PeerConnection, None]"
    """Connections from which something can be read."""
    dirty: "dict[PeerConnection, None]"
    """Connections with something to send."""

    @property
    def now(self) -> float:
        """Seconds of a clock that stands still while the engine's loop does."""

    @property
    def delay_s(self) -> float:
        """Seconds by which what is sent is delayed now, in a drill."""

    def later(self, call: Callable[[], object]) -> None:
        """Have a call made by the next turn."""

    def greeted(self, connection: "PeerConnection", payload: bytes) -> None:
        """Take or refuse a caller, which has sent its hello."""

    def ended(self, connection: "PeerConnection") -> None:
        """Forget a connection."""


class PeerConnection:
    """One connection, from the wish to make it to its end."""

    def __init__(self, host: ConnectionHost, worker_id: str, address: str, opening: bytes | None) -> None:
        """Create it; `opening` is the hello of the side that calls."""
        self._host = host
        self.worker_id = worker_id
        self.incarnation = b""
        self.endpoint = b""
        self.mux = Mux(opening, self._opened, self._wants_write)
        self.mux.on_opened = lambda payload: host.greeted(self, payload)
        self.mux.on_note = self._on_note
        self._address = address
        self._socket: PeerSocket | None = None
        self._waiting: list[Callable[[bytes, str], object]] = []
        """Calls that wait for the peer's endpoint."""
        self._reason = b""
        self.mux.on_end.append(self._keep_reason)
        self._watches_writing = False
        self._heard_at = self._began_at = host.now
        self._sent_at = host.now
        self._was_busy = False
        self._held_until: float | None = None
        """Time until which nothing is sent, in a drill."""

    @property
    def quiet_s(self) -> float:
        return self._host.now - self._heard_at

    def when_known(self, call: Callable[[bytes, str], object]) -> None:
        """Call a function with the peer's endpoint once it is known, or with why it never will be."""
        if self.endpoint:
            self._host.later(partial(call, self.endpoint, ""))
        else:
            self._waiting.append(call)

    def known(self, endpoint: bytes) -> None:
        """Process that the peer has said who it is."""
        log.info("connected to %s", self.worker_id)
        self.endpoint = endpoint
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._host.later(partial(call, endpoint, ""))

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
        self._heard_at = self._began_at = self._host.now
        self._host.watcher.watch(connected.fileno(), self._on_ready)
        self._wants_write()

    def start_silence(self) -> None:
        """Count the peer's silence from now on: the first loan was opened."""
        if not self._was_busy:
            self._was_busy = True
            self._heard_at = self._host.now

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
            self._heard_at = self._host.now
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
                self._sent_at = self._host.now
                self._socket.send(b"".join(frames))
            if self._socket.has_unsent:
                self._socket.send(b"")
            if self._socket.has_unsent is not self._watches_writing:
                self._watches_writing = self._socket.has_unsent
                self._host.watcher.watch_writing(self._socket.fileno(), self._watches_writing)
        except OSError as error:
            self._host.later(partial(self.fail, f"the connection broke: {error}"))

    def beat(self, is_alive: bool) -> None:
        """Send a sign of life if one is due, and give up a silent peer."""
        if self._socket is None:
            return  # the connector gives it up
        now, is_busy = self._host.now, self.mux.num_channels > 0
        if is_busy:
            self.start_silence()
        self._was_busy = is_busy
        silence_s = self._host.silence_s if is_busy else IDLE_SILENCE_S
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
            self._host.watcher.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._host.ended(self)
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._host.later(partial(call, b"", self._reason.decode(errors="replace")))

    def _keep_reason(self, reason: bytes) -> None:
        self._reason = reason or b"the peer ended the connection"

    def _is_held(self) -> bool:
        """Return whether a drill delays what is sent; it is sent when the delay is over."""
        if self._held_until is None:
            if not (delay_s := self._host.delay_s):
                return False
            self._held_until = self._host.now + delay_s
            timer = threading.Timer(delay_s, self._host.watcher.wake)
            timer.daemon = True
            timer.start()
        if self._host.now < self._held_until:
            self._host.dirty[self] = None
            return True
        self._held_until = None
        return False

    def _on_ready(self) -> None:
        self._host.readable[self] = None
        if self._socket is not None and self._socket.has_unsent:
            self._host.dirty[self] = None

    def _wants_write(self) -> None:
        self._host.dirty[self] = None

    def _on_note(self, payload: bytes) -> None:
        """Process the answer of the engine that was called."""
        hello = hello_of(payload)
        if hello.incarnation != self.incarnation:
            raise ProtocolError("another engine answers than was called")
        self.known(hello.endpoint)

    def _opened(self, channel: Channel, payload: bytes) -> None:
        """Process that the peer opens a loan."""
        given, gives = Given(channel), self._host.gives

        def released(messages: Sequence[bytes]) -> None:
            for release in unpack_releases(messages):
                gives.released(given, *release)

        channel.on_messages = released
        channel.on_end = lambda _: gives.closed(given)
        gives.opened(given, unpack_want(payload))


class Given(LoanGiven):
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, message: Lent) -> None:
        for part in pack_lent(message):
            self._channel.send(part)

    def refuse(self, reason: str) -> None:
        self._channel.end(reason.encode())


class Taken(LoanTaken):
    def __init__(self, connection: PeerConnection, payload: bytes, takes: TakesLoan) -> None:
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


def hello_of(payload: bytes) -> pb.EngineHello:
    """Return a hello. Raises ProtocolError."""
    try:
        return pb.EngineHello.FromString(payload)
    except DecodeError as error:
        raise ProtocolError(f"a hello is not valid: {error}") from error
