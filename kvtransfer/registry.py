"""Transports by name."""

from collections.abc import Sequence

from kvtransfer.strict_lanes import StrictLanes
from kvtransfer.transport import Transport

NAMES = ("nixl", "ucxx")
"""Those that work between processes."""


def open_transport(name: str, agent_name: str, host: str = "127.0.0.1", strict_lanes: Sequence[str] = ()) -> Transport:
    """`agent_name` must be unique among all processes that will ever meet; peers reach this one by `host`.

    `strict_lanes`: what the bytes must travel over, see `strict_lanes.py`; a process has one demand at most, since
    UCX learns of it through the environment.

    Raises TransportUnavailable when it does not start here, TransportRefused when it does not over the lanes that are
    demanded, KeyError for an unknown name.
    """
    strict = StrictLanes(strict_lanes)
    if name == "nixl":
        from kvtransfer.nixl import NixlTransport

        return NixlTransport(agent_name, strict)
    if name == "ucxx":
        from kvtransfer.ucxx import UcxxTransport

        return UcxxTransport(host, strict)
    raise KeyError(name)
