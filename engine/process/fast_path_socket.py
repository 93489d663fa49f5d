"""Datagrams of the fast path between engines of one network namespace: Linux's abstract Unix sockets.

Abstract sockets have no file and vanish with their process. Engines in other containers or on other hosts cannot be
reached, and get no fast-path announcements.

Any process of the namespace can write to such a socket, so a kernel filter drops datagrams that do not begin with this
engine's key, with any descriptors they carry. The kernel queues `net.unix.max_dgram_qlen` datagrams per engine, often
10, and limits the unread bytes of one sender; more are lost.
"""

import contextlib
import ctypes
import secrets
import socket
import struct

from loans.fast_path import KEY_BYTES, MAX_WORD_BYTES, NAME_BYTES, VERSION, FastPathLink

PREFIX = f"\0tandem-early-{VERSION}-".encode()
"""Prefix of socket names: an address given by a borrower can make a lender write to such sockets only."""
MAX_AT_ONCE = 64
"""Datagrams read in one turn, so that a flood does not stop the loop."""
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_INSTRUCTION = struct.Struct("=HBBI")


class FastPathSocket(FastPathLink):
    """Socket of one engine.

    Raises OSError where abstract sockets do not exist.
    """

    def __init__(self) -> None:
        self.name, self.key = secrets.token_bytes(NAME_BYTES), secrets.token_bytes(KEY_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            _let_through(self._socket, self.key)
            self._socket.bind(_address(self.name))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, name: bytes, word: bytes) -> None:
        # elsewhere, gone, or its queue is full: the lease carries the announcement too
        with contextlib.suppress(OSError):
            self._socket.sendto(word, _address(name))

    def take(self) -> list[bytes]:
        words: list[bytes] = []
        with contextlib.suppress(OSError):
            while len(words) < MAX_AT_ONCE:
                words.append(self._socket.recv(MAX_WORD_BYTES))
        return words

    def close(self) -> None:
        self._socket.close()


def open_fast_path_socket() -> FastPathSocket | None:
    """Open the socket; None where abstract sockets do not exist, and then there is no fast path."""
    with contextlib.suppress(OSError):
        return FastPathSocket()
    return None


def _address(name: bytes) -> bytes:
    return PREFIX + name.hex().encode()


def _let_through(end: socket.socket, key: bytes) -> None:
    """Attach a BPF filter that passes datagrams beginning with `key` only.

    Raises OSError.
    """
    first, second = struct.unpack(">II", key)
    program = b"".join(
        _INSTRUCTION.pack(*each)
        for each in [
            (_LOAD_WORD, 0, 0, 0),  # datagrams too short for the key are dropped as well
            (_JUMP_IF_EQUAL, 0, 3, first),
            (_LOAD_WORD, 0, 0, 4),
            (_JUMP_IF_EQUAL, 0, 1, second),
            (_RETURN, 0, 0, MAX_WORD_BYTES),
            (_RETURN, 0, 0, 0),
        ]
    )
    held = ctypes.create_string_buffer(program, len(program))
    end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 6, ctypes.addressof(held)))
