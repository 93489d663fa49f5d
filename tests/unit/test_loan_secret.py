"""Proof of a shared secret between two ends of a connection."""

import socket
import threading
from collections.abc import Callable

import pytest

from loans.peers.sockets import NONCE_BYTES, SecretRefused, prove_as_caller, prove_as_listener

SECRET = b"a secret of some length"


def both(caller: Callable[[socket.socket], None], listener: Callable[[socket.socket], None]) -> list[Exception | None]:
    """Run both ends; return the failure of each."""
    ends = socket.socketpair()
    failures: list[Exception | None] = [None, None]

    def run(number: int, call: Callable[[socket.socket], None]) -> None:
        try:
            call(ends[number])
        except OSError as error:
            failures[number] = error
        finally:
            ends[number].close()

    threads = [threading.Thread(target=run, args=each) for each in enumerate((caller, listener))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_both_ends_know_it() -> None:
    assert both(lambda end: prove_as_caller(end, SECRET), lambda end: prove_as_listener(end, SECRET)) == [None, None]


def test_a_caller_without_it_learns_nothing() -> None:
    received = []

    def caller(end: socket.socket) -> None:
        end.sendall(bytes(NONCE_BYTES))
        received.append(end.recv(NONCE_BYTES))
        end.sendall(bytes(32))
        received.append(end.recv(32))

    failures = both(caller, lambda end: prove_as_listener(end, SECRET))
    assert isinstance(failures[1], SecretRefused)
    assert received[1] == b"", "a proof came although the caller gave none"


def test_a_listener_without_it_is_refused() -> None:
    failures = both(lambda end: prove_as_caller(end, SECRET), lambda end: prove_as_listener(end, b"another"))
    assert all(isinstance(failure, SecretRefused) for failure in failures)


def test_a_proof_sent_back_is_refused() -> None:
    """A listener that only repeats what the caller says has no proof of its own."""

    def mirror(end: socket.socket) -> None:
        end.sendall(end.recv(NONCE_BYTES))
        end.sendall(end.recv(32))

    failures = both(lambda end: prove_as_caller(end, SECRET), mirror)
    assert isinstance(failures[0], SecretRefused)


@pytest.mark.parametrize("num_bytes", [0, 7])
def test_a_connection_that_ends_early_is_refused(num_bytes: int) -> None:
    failures = both(lambda end: end.sendall(bytes(num_bytes)), lambda end: prove_as_listener(end, SECRET))
    assert isinstance(failures[1], SecretRefused)
