"""References to a lender, as they stand in `kv_transfer_params` of answers and requests.

The keys are those of NixlConnector, so proxies made for it pass them on. A reference names a process and no blocks:
a borrower asks that process for the blocks of its own prompt, by their names.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from loans.messages import Peer

ASKS_FOR_REFERENCE = {"do_remote_decode": True, "do_remote_prefill": False}
PREFIX = "tandem-"
INCARNATION_BYTES = 16


class Reference(NamedTuple):
    """A lender's engine."""

    peer: Peer
    rank: int
    """Its data-parallel rank within its server."""


def write_reference(peer: Peer, rank: int, request_id: str, tensor_parallel: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` of an answer."""
    host, _, port = peer.address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{PREFIX}{peer.incarnation.hex()}-{rank}",
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": int(port),
        "remote_block_ids": [],
        "tp_size": tensor_parallel,
    }


def read_reference(params: Mapping[str, Any]) -> Reference:
    """Undo `write_reference`. Raises ValueError with the name of the key at fault."""
    engine, host, port = (params.get(key) for key in ("remote_engine_id", "remote_host", "remote_port"))
    if not isinstance(engine, str) or not engine.startswith(PREFIX):
        raise ValueError(f"kv_transfer_params.remote_engine_id: is no engine with TandemConnector: {engine!r:.80}")
    incarnation, _, rank = engine.removeprefix(PREFIX).partition("-")
    try:
        identity, number = bytes.fromhex(incarnation), int(rank)
    except ValueError:
        identity, number = b"", -1
    if len(identity) != INCARNATION_BYTES or number < 0:
        raise ValueError(f"kv_transfer_params.remote_engine_id: is no engine with TandemConnector: {engine!r:.80}")
    if not isinstance(host, str) or not 0 < len(host) < 256:
        raise ValueError(f"kv_transfer_params.remote_host: must be a host name or an address, not {host!r:.80}")
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"kv_transfer_params.remote_port: must be a port from 1 to 65535, not {port!r:.80}")
    return Reference(Peer(f"{host}:{port}", f"{host}:{port}", identity), number)
