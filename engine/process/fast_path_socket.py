"""Early words between the engines of one network namespace: Linux's abstract Unix sockets, which no folder holds and
no process outlives. Engines in other containers or on other hosts are not found there, and are told nothing early.

Anybody there can write to such a socket, so the kernel looks at what is written: a word that does not begin with this
engine's key never gets here, nor do descriptors that come with it. It keeps as many words for each engine as
`net.unix.max_dgram_qlen` says, often 10, and not many long ones that one engine sent and others have not read; more
are lost.
"""

import contextlib
import ctypes
import secrets
import socket
import struct

from engine.lending.fast_path import KEY_BYTES, MAX_WORD_BYTES, NAME_BYTES, VERSION, FastPathLink

PREFIX = f"\0tandem-early-{VERSION}-".encode()
"""What a borrower says of its address can make a lender write to such sockets, and to no others."""
MAX_AT_ONCE = 64
"""Who writes without end does not keep the loop from turning."""
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_INSTRUCTION = struct.Struct("=HBBI")


class FastPathSocket(FastPathLink):
    """Raises OSError where there is no such thing."""

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
        with contextlib.suppress(OSError):  # it is elsewhere, or gone, or has not read what there is: the lease says it
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
    """None where there is no such thing: then nothing is said early."""
    with contextlib.suppress(OSError):
        return FastPathSocket()
    return None


def _address(name: bytes) -> bytes:
    return PREFIX + name.hex().encode()


def _let_through(end: socket.socket, key: bytes) -> None:
    """Only what begins with `key`, by a BPF program that the kernel runs while the sender sends. Raises OSError."""
    first, second = struct.unpack(">II", key)
    program = b"".join(
        _INSTRUCTION.pack(*each)
        for each in [
            (_LOAD_WORD, 0, 0, 0),  # what is too short for it is not let through either
            (_JUMP_IF_EQUAL, 0, 3, first),
            (_LOAD_WORD, 0, 0, 4),
            (_JUMP_IF_EQUAL, 0, 1, second),
            (_RETURN, 0, 0, MAX_WORD_BYTES),
            (_RETURN, 0, 0, 0),
        ]
    )
    held = ctypes.create_string_buffer(program, len(program))
    end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 6, ctypes.addressof(held)))
