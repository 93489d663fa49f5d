"""Sockets of an engine's process to other engines, driven by the engine's loop.

The loop reads and writes sockets that never block. What may take long runs on threads that end with it: names are
looked up, connections made, TLS agreed on and secrets proven there.

Proof that both ends of a connection know a secret, before anything else is said.

    caller   ── 32 random bytes ──▶   listener
             ◀── 32 random bytes ──
             ── HMAC(caller) ─────▶
             ◀── HMAC(listener) ───

Each proof covers both random values and its role, so none can be repeated elsewhere or sent back. The secret itself is
never sent, and what follows is not encrypted.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from cluster.errors import StartError
from cluster.network.tls import MemberIdentity

log = logging.getLogger(__name__)


NONCE_BYTES = PROOF_BYTES = 32
CALLER, LISTENER = b"tandem loans: caller", b"tandem loans: listener"


class SecretRefused(OSError):
    """A peer that does not know the secret."""

    def __init__(self) -> None:
        super().__init__("the peer does not know the secret (secret_file)")


def prove_as_caller(connected: socket.socket, secret: bytes) -> None:
    """Prove the secret to a listener, and demand its proof. Raises OSError."""
    own = os.urandom(NONCE_BYTES)
    connected.sendall(own)
    theirs = _receive(connected, NONCE_BYTES)
    connected.sendall(_proof(secret, CALLER, own, theirs))
    _check(_receive(connected, PROOF_BYTES), _proof(secret, LISTENER, own, theirs))


def prove_as_listener(connected: socket.socket, secret: bytes) -> None:
    """Demand a caller's proof of the secret, and only then give one. Raises OSError."""
    theirs = _receive(connected, NONCE_BYTES)
    own = os.urandom(NONCE_BYTES)
    connected.sendall(own)
    _check(_receive(connected, PROOF_BYTES), _proof(secret, CALLER, theirs, own))
    connected.sendall(_proof(secret, LISTENER, theirs, own))


def _proof(secret: bytes, role: bytes, of_caller: bytes, of_listener: bytes) -> bytes:
    return hmac.digest(secret, role + of_caller + of_listener, hashlib.sha256)


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise SecretRefused


def _receive(connected: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes. Raises OSError, also at the end of the connection."""
    received = b""
    while len(received) < num_bytes:
        part = connected.recv(num_bytes - len(received))
        if not part:
            raise SecretRefused
        received += part
    return received


CONNECT_S = 3.0
"""Seconds for a connection to another engine, TLS and secret included."""
READ_BYTES = 256 << 10
"""Bytes that are read at once."""
MAX_HANDSHAKES = 64
"""Callers that may agree on TLS, or prove the secret, at a time; further ones are turned away."""


class Watcher(Protocol):
    """The loop of an engine, which waits for sockets."""

    def watch(self, descriptor: int, on_readable: Callable[[], object]) -> None:
        """Call a function whenever the descriptor can be read."""

    def watch_writing(self, descriptor: int, is_wanted: bool) -> None:
        """Call the descriptor's function also when it can be written."""

    def unwatch(self, descriptor: int) -> None: ...

    def wake(self) -> None:
        """End the loop's present or next wait. From any thread."""


class PeerSocket:
    """A connected socket that does not block."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._unsent = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> bytes | None:
        """Return bytes that arrived, no byte at the end, or None where none are there now. Raises OSError."""
        try:
            return self._socket.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def send(self, data: bytes) -> None:
        """Send bytes after those that are unsent, as far as there is room. Raises OSError."""
        self._unsent = self._unsent + data if self._unsent else data
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


OnConnected = Callable[[PeerSocket | None, str], object]
"""Function that gets a connected socket, or why there is none."""


class Connector:
    """Threads that connect to other engines, and take what connects to this one."""

    def __init__(self, watcher: Watcher, trust: MemberIdentity | None, secret: bytes = b"") -> None:
        """Create it.

        With `trust`, both sides of a connection show certificates of the cluster's members; with a `secret`, both
        prove that they know it.
        """
        self._watcher = watcher
        self._trust = trust
        self._secret = secret
        self._server_context = None if trust is None else trust.credentials.for_http()
        self._connected: SimpleQueue[tuple[OnConnected, PeerSocket | None, str]] = SimpleQueue()
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._listening: socket.socket | None = None

    def listen(self, host: str, port: int, on_connected: OnConnected) -> int:
        """Listen, and return the port; 0 lets the system choose. Raises StartError."""
        try:
            family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
            self._listening = socket.create_server((host.strip("[]"), port), family=family, backlog=1024)
        except OSError as error:
            raise StartError("loan_port", f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self._listening.setblocking(False)
        self._watcher.watch(self._listening.fileno(), lambda: self._accept(on_connected))
        bound: int = self._listening.getsockname()[1]
        return bound

    def connect(self, address: str, on_connected: OnConnected) -> None:
        """Connect to another engine; `take` reports it."""
        threading.Thread(target=self._dial, args=(address, on_connected), daemon=True).start()

    def take(self) -> bool:
        """Report connections that were made or failed; return whether there were any."""
        has_news = False
        while not self._connected.empty():
            on_connected, connected, failure = self._connected.get_nowait()
            on_connected(connected, failure)
            has_news = True
        return has_news

    def close(self) -> None:
        """Stop listening. May be called again."""
        if self._listening is not None:
            self._watcher.unwatch(self._listening.fileno())
            self._listening.close()
            self._listening = None

    def _dial(self, address: str, on_connected: OnConnected) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            raw = socket.create_connection((host, int(port)), CONNECT_S)
            if self._trust is not None:
                context, name = self._trust.for_stream(host)
                raw = context.wrap_socket(raw, server_hostname=name)
            if self._secret:
                prove_as_caller(raw, self._secret)
            self._report(on_connected, PeerSocket(raw), "")
        except (OSError, ValueError, StartError) as error:
            self._report(on_connected, None, str(error) or type(error).__name__)

    def _accept(self, on_connected: OnConnected) -> None:
        assert self._listening is not None
        while True:
            try:
                raw, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is left, or the caller is gone already
                log.warning("a connection of another engine could not be taken: %s", error)
                return
            if self._server_context is None and not self._secret:
                self._report(on_connected, PeerSocket(raw), "")
            elif self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._agree, args=(raw, on_connected), daemon=True).start()
            else:
                raw.close()

    def _agree(self, raw: socket.socket, on_connected: OnConnected) -> None:
        """Agree on TLS with a caller, and demand its proof of the secret."""
        try:
            raw.settimeout(CONNECT_S)
            if self._server_context is not None:
                raw = self._server_context.wrap_socket(raw, server_side=True)
            if self._secret:
                prove_as_listener(raw, self._secret)
            self._report(on_connected, PeerSocket(raw), "")
        except (OSError, ValueError) as error:
            raw.close()
            self._report(on_connected, None, str(error))
        finally:
            self._handshakes.release()

    def _report(self, on_connected: OnConnected, connected: PeerSocket | None, failure: str) -> None:
        self._connected.put((on_connected, connected, failure))
        self._watcher.wake()
