"""A process whose pool others read: `python lender_peer.py NAME SEED NUM_BYTES [TRANSPORT]`.

Where LENDER_IN_FILE is set, its pool is a file that they may map. Prints its endpoint as one line of JSON, then answers
every line on standard input with the same line. Ends with its standard input, or with its parent.
"""

import ctypes
import json
import os
import signal
import sys

import numpy as np

from engine.host.memory import pool_memory
from kvtransfer.registry import open_transport

PR_SET_PDEATHSIG = 1


def contents(seed: int, num_bytes: int) -> np.ndarray:
    """What the pool holds; the reader's test computes the same."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    name, seed, num_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    transport = open_transport(sys.argv[4] if len(sys.argv) > 4 else "nixl", name)
    pool = pool_memory(1, num_bytes, in_file="LENDER_IN_FILE" in os.environ)
    pool.memory[0] = contents(seed, num_bytes)
    endpoint = transport.register(pool)
    print(json.dumps({"endpoint": endpoint.decode()}), flush=True)
    for line in sys.stdin:
        print(line, end="", flush=True)
    transport.close()


if __name__ == "__main__":
    main()
