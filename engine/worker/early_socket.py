"""Early words between the engines of one host: Linux's abstract Unix sockets, which no folder holds and no process
outlives. Engines in other containers or on other hosts are not found there, and are told nothing early. The kernel
keeps as many words for each as `net.unix.max_dgram_qlen` says, often 10, and more are lost."""

import contextlib
import secrets
import socket

from engine.lending.early import MAX_WORD_BYTES, NAME_BYTES, EarlyLink

PREFIX = b"\0tandem-early-"
"""What a borrower says of its address can make a lender write to such sockets, and to no others."""

MAX_AT_ONCE = 1024
"""Whoever writes without end does not keep the loop from turning."""


class EarlySocket(EarlyLink):
    """Raises OSError where there is no such thing."""

    def __init__(self) -> None:
        self.name = secrets.token_bytes(NAME_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(_address(self.name))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, name: bytes, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it is elsewhere, or gone, or has not read what there is: the lease says it
            self._socket.sendto(word, _address(name))

    def take(self) -> list[bytes]:
        words: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while len(words) < MAX_AT_ONCE:
                words.append(self._socket.recv(MAX_WORD_BYTES))
        return words

    def close(self) -> None:
        self._socket.close()


def open_early_socket() -> EarlySocket | None:
    """None where there is no such thing: then nothing is said early."""
    with contextlib.suppress(OSError):
        return EarlySocket()
    return None


def _address(name: bytes) -> bytes:
    return PREFIX + name.hex().encode()
