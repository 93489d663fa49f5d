"""Messages between the two sides of the `ucxx` transport on their control connection.

    borrower                     lender
    Hello  ──────────────────▶          the incarnation it means, and the address of its UCX worker
           ◀────────────────── Welcome  the same, of the lender
    Read   ──────────────────▶          then the spans come as tagged UCX messages, one each
           ◀────────────────── Refused  and the connection ends: malformed, or out of range

A frame is the length of its body, its kind, and the body. Addresses are signed with the secret in the lender's
endpoint, because UCX trusts any address: a process without the endpoint gets no further.

Control connection of a `ucxx` link: a non-blocking TCP socket with frames.

It also shows that a peer is gone: a process that dies closes it at once, and TCP notices a host that dies. A stopped
process keeps it open, because it may continue.
"""

import contextlib
import hmac
import ipaddress
import json
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from kvtransfer.errors import EndpointMismatch, PeerGone, TransferError
from kvtransfer.transport import MAX_POSTED_BYTES_ON_GPU

FORMAT = "tandem-ucxx-1"
HEADER = struct.Struct("!IB")
SPAN = struct.Struct("!QQ")
NUMBER = struct.Struct("!Q")
ID_BYTES = 16
MAC_BYTES = 32
INDEX_BITS = 16
MAX_SPANS = 1 << INDEX_BITS
MAX_ADDRESS_BYTES = 4096
MAX_GREETING_BYTES = ID_BYTES + MAC_BYTES + MAX_ADDRESS_BYTES
MAX_BODY_BYTES = NUMBER.size + SPAN.size * MAX_SPANS


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    READ = 3
    REFUSED = 4


KINDS = frozenset(map(int, Kind))


class Malformed(TransferError):
    """A message that the other side must not send."""


@dataclass(frozen=True, slots=True)
class UcxxEndpoint:
    """Address of a lender's listener, its identity, and the size of its pool."""

    host: str
    """IP address."""
    port: int
    num_bytes: int
    incarnation: bytes
    """Incarnation of the process, 16 bytes."""
    secret: bytes
    """Secret that signs addresses, 32 bytes."""

    def pack(self) -> bytes:
        return json.dumps(
            {
                "format": FORMAT,
                "host": self.host,
                "port": self.port,
                "bytes": self.num_bytes,
                "incarnation": self.incarnation.hex(),
                "secret": self.secret.hex(),
            }
        ).encode()

    @classmethod
    def unpack(cls, endpoint: bytes) -> "UcxxEndpoint":
        """Unpack an endpoint.

        Raises EndpointMismatch.
        """
        try:
            fields = json.loads(endpoint)
            if fields["format"] != FORMAT:
                raise EndpointMismatch(f"endpoint format {fields['format']!r}, this side speaks {FORMAT!r}")
            host = str(ipaddress.ip_address(_string(fields["host"])))
            incarnation, secret = (bytes.fromhex(_string(fields[name])) for name in ("incarnation", "secret"))
            port, num_bytes = fields["port"], fields["bytes"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EndpointMismatch("the endpoint is not one of the ucxx transport") from error
        for name, value, limit in (("port", port, 1 << 16), ("bytes", num_bytes, 1 << 63)):
            if type(value) is not int or not 0 < value < limit:
                raise EndpointMismatch(f"the endpoint's {name!r} is {value!r}, not a positive number below {limit}")
        if len(incarnation) != ID_BYTES or len(secret) != MAC_BYTES:
            raise EndpointMismatch("the endpoint's incarnation or secret is of a wrong length")
        return cls(host, port, num_bytes, incarnation, secret)


def pack_frame(kind: Kind, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind) + body


class FrameReader:
    """Splitter of received bytes into frames."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[tuple[Kind, bytes]]:
        """Return the frames that are complete now.

        Raises Malformed as soon as a frame's header is invalid.
        """
        self._buffer += received
        frames: list[tuple[Kind, bytes]] = []
        while len(self._buffer) >= HEADER.size:
            size, kind = HEADER.unpack_from(self._buffer)
            if size > self.max_body_bytes:
                raise Malformed(f"a frame has {size} bytes; the limit is {self.max_body_bytes}")
            if kind not in KINDS:
                raise Malformed(f"a frame of unknown kind {kind}")
            if len(self._buffer) < HEADER.size + size:
                break
            frames.append((Kind(kind), bytes(self._buffer[HEADER.size : HEADER.size + size])))
            del self._buffer[: HEADER.size + size]
        return frames


def pack_greeting(endpoint: UcxxEndpoint, address: bytes) -> bytes:
    """Pack Hello or Welcome; `endpoint` is the lender's, `address` that of the sender's UCX worker."""
    content = endpoint.incarnation + address
    return _sign(endpoint.secret, content) + content


def unpack_greeting(body: bytes, incarnation: bytes, secret: bytes) -> bytes:
    """Return the address of the other side's UCX worker.

    Raises Malformed, also for another incarnation.
    """
    signature, content = body[:MAC_BYTES], body[MAC_BYTES:]
    if content[:ID_BYTES] != incarnation:
        raise Malformed("the greeting is for another incarnation of this process")
    if not hmac.compare_digest(signature, _sign(secret, content)):
        raise Malformed("the greeting's signature does not match the endpoint's secret")
    if not 0 < len(content) - ID_BYTES <= MAX_ADDRESS_BYTES:
        raise Malformed(f"the UCX address has {len(content) - ID_BYTES} bytes, not 1 to {MAX_ADDRESS_BYTES}")
    return content[ID_BYTES:]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A read of `pieces`: (offset, length) in the lender's pool, each sent with its list index as tag."""

    number: int
    pieces: tuple[tuple[int, int], ...]

    def pack(self) -> bytes:
        return NUMBER.pack(self.number) + b"".join(SPAN.pack(*piece) for piece in self.pieces)

    @classmethod
    def unpack(cls, body: bytes, pool_bytes: int) -> "ReadRequest":
        """Unpack a request.

        Raises Malformed, also for pieces outside the pool or more bytes than a read may carry.
        """
        if len(body) < NUMBER.size + SPAN.size or (len(body) - NUMBER.size) % SPAN.size:
            raise Malformed(f"a read request cannot have {len(body)} bytes")
        (number,) = NUMBER.unpack_from(body)
        pieces = tuple(SPAN.iter_unpack(body[NUMBER.size :]))
        for offset, length in pieces:
            if length == 0 or offset + length > pool_bytes:
                raise Malformed(f"{length} bytes at offset {offset} lie outside the pool of {pool_bytes} bytes")
        total = sum(length for _, length in pieces)
        if total > MAX_POSTED_BYTES_ON_GPU:  # of a borrower with any kind of memory
            raise Malformed(f"a read asks for {total} bytes; the limit is {MAX_POSTED_BYTES_ON_GPU}")
        if number >> (64 - INDEX_BITS):
            raise Malformed(f"read number {number} is too large")
        return cls(number, pieces)

    def tags(self) -> range:
        """Return one tag per piece."""
        return range(self.number << INDEX_BITS, (self.number << INDEX_BITS) + len(self.pieces))


def _sign(secret: bytes, content: bytes) -> bytes:
    return hmac.digest(secret, content, "sha256")


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


RECEIVE_BYTES = 1 << 16
SILENCE_MS = 10_000
"""Milliseconds without an acknowledgement after which the peer's host counts as gone."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


def open_listener(address: str) -> socket.socket:
    """Listen at a port that the system chooses.

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def start_connecting(host: str, port: int) -> socket.socket:
    """Start a connection to an IP address.

    Raises PeerGone when the system refuses at once.
    """
    connecting = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    connecting.setblocking(False)
    try:
        with contextlib.suppress(BlockingIOError):
            connecting.connect((host, port))
    except OSError as error:
        connecting.close()
        raise PeerGone(f"{host}:{port}: {error.strerror}") from error
    return connecting


class Control:
    """Owner of a connected or connecting socket."""

    def __init__(self, connection: socket.socket, max_body_bytes: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.reader = FrameReader(max_body_bytes)
        self.connection = connection
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Queue a frame; `flush` sends it."""
        self._unsent += pack_frame(kind, body)

    def flush(self) -> None:
        """Send what the socket takes now. Raises PeerGone."""
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerGone(f"the connection broke: {error.strerror}") from error

    def receive(self) -> list[tuple[Kind, bytes]]:
        """Return the frames that have arrived.

        Raises PeerGone when the peer has closed the connection, Malformed as `FrameReader.feed` does.
        """
        try:
            received = self.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise PeerGone(f"the connection broke: {error.strerror}") from error
        if not received:
            raise PeerGone("the peer closed the connection")
        return self.reader.feed(received)

    def close(self) -> None:
        self.connection.close()
