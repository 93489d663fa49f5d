"""`python strict_reader.py TRANSPORT LANES ENDPOINT`: two reads by a transport that demands LANES (with commas).

Prints what became of it as one line of JSON. A process of its own, because UCX learns of the demand but once.
"""

import json
import os
import sys
from typing import Any

import numpy as np

from kvtransfer.errors import TransferError, TransportRefused
from kvtransfer.registry import open_transport
from kvtransfer.transport import Pool, Span

NUM_BYTES = 1 << 20
TIMEOUT_S = 20.0


def main() -> dict[str, Any]:
    name, lanes, endpoint = sys.argv[1:]
    pool = Pool(np.zeros((1, NUM_BYTES), np.uint8))
    try:
        transport = open_transport(name, f"strict-{os.getpid()}", strict_lanes=lanes.split(","))
    except TransportRefused as refused:
        return {"refused": "open", "wanted": refused.wanted, "found": refused.found, "message": str(refused)}
    transport.register(pool)
    try:
        peer = transport.connect(endpoint.encode())
        errors = [transport.read(peer, [Span(0, 0, NUM_BYTES)]).exception(TIMEOUT_S) for _ in range(2)]
        lanes_seen = peer.lanes
    except TransferError as error:
        errors, lanes_seen = [error, error], ()
    finally:
        transport.close()
    for error in errors:
        if isinstance(error, TransportRefused):
            return {"refused": "read", "wanted": error.wanted, "found": error.found, "message": str(error)}
        if error is not None:
            return {"failed": type(error).__name__, "message": str(error)}
    return {"lanes": lanes_seen, "sum": int(pool.memory.sum(dtype=np.int64))}


if __name__ == "__main__":
    print(json.dumps(main()))
