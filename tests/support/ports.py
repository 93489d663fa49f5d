"""Ports for servers whose port must be known before they start."""

import random
import socket
from contextlib import ExitStack

LOCAL = "127.0.0.1"
BELOW_CLIENTS = range(20_000, 32_000)
"""Linux gives connections ports from 32,768 on, and Ray's workers use ports below 20,000."""
_draw = random.SystemRandom()


def free_port(*hosts: str, count: int = 1) -> int:
    """Return the first of `count` ports in a row that are free now at each of `hosts`; by default at 127.0.0.1.

    No connection of another process takes such a port before the server that it is for.
    """
    while True:
        port = _draw.choice(BELOW_CLIENTS)
        with ExitStack() as probes:
            try:
                for host in hosts or (LOCAL,):
                    for number in range(port, port + count):
                        probes.enter_context(socket.create_server((host, number)))
            except OSError:
                continue
            return port
