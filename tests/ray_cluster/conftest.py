"""What tests of `tandem up` share."""

import contextlib
import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """And the next one is free, too, for a second router."""
    while True:
        with socket.socket() as probe, socket.socket() as next_one:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            with contextlib.suppress(OSError):
                next_one.bind(("127.0.0.1", port + 1))
                return port
