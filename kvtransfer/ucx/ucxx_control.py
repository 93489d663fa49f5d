"""Control connection of a `ucxx` link: a non-blocking TCP socket with frames.

It also shows that a peer is gone: a process that dies closes it at once, and TCP notices a host that dies. A stopped
process keeps it open, because it may continue.
"""

import contextlib
import socket

from kvtransfer.errors import PeerGone
from kvtransfer.ucx.ucxx_wire import FrameReader, Kind, pack_frame

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
        self._socket = connection
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

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
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerGone(f"the connection broke: {error.strerror}") from error

    def receive(self) -> list[tuple[Kind, bytes]]:
        """Return the frames that have arrived.

        Raises PeerGone when the peer has closed the connection, Malformed as `FrameReader.feed` does.
        """
        try:
            received = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise PeerGone(f"the connection broke: {error.strerror}") from error
        if not received:
            raise PeerGone("the peer closed the connection")
        return self.reader.feed(received)

    def close(self) -> None:
        self._socket.close()
