"""Transports by name."""

from kvtransfer.transport import Transport

NAMES = ("nixl",)
"""Those that work between processes."""


def open_transport(name: str, agent_name: str) -> Transport:
    """Raises TransportUnavailable when it does not start here, KeyError for an unknown name."""
    if name == "nixl":
        from kvtransfer.nixl import NixlTransport

        return NixlTransport(agent_name)
    raise KeyError(name)
