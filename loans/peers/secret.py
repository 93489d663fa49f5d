"""Proof that both ends of a connection know a secret, before anything else is said.

    caller   ── 32 random bytes ──▶   listener
             ◀── 32 random bytes ──
             ── HMAC(caller) ─────▶
             ◀── HMAC(listener) ───

Each proof covers both random values and its role, so none can be repeated elsewhere or sent back. The secret itself is
never sent, and what follows is not encrypted.
"""

import hashlib
import hmac
import os
import socket

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
