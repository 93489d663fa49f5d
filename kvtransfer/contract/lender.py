"""A process whose pool others read: `python -m kvtransfer.contract.lender NAME SEED NUM_BYTES [TRANSPORT]`.

Where LENDER_IN_FILE is set, its pool is a file that they may map. Prints its endpoint as one line of JSON, then answers
every line on standard input with the same line. Ends with its standard input, or with its parent.
"""

import ctypes
import json
import os
import signal
import sys

import numpy as np

from kvtransfer.contract.worlds import contents
from kvtransfer.memory_file import MemoryFile
from kvtransfer.registry import open_transport
from kvtransfer.transport import Pool

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    name, seed, num_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    transport = open_transport(sys.argv[4] if len(sys.argv) > 4 else "nixl", name)
    file = MemoryFile(num_bytes) if "LENDER_IN_FILE" in os.environ else None
    memory = file.memory if file is not None else np.empty(num_bytes, np.uint8)
    memory[:] = contents(seed, num_bytes)
    pool = Pool(memory.reshape(1, num_bytes), file=file)
    endpoint = transport.register(pool)
    print(json.dumps({"endpoint": endpoint.decode()}), flush=True)
    for line in sys.stdin:
        print(line, end="", flush=True)
    transport.close()


if __name__ == "__main__":
    main()
