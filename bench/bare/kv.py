"""References for the KV path: NIXL alone, and memcpy alone.

`python -m bench.bare.kv ROLE CORE ...` is one process, pinned to a core, that answers lines of JSON on standard input:

    lender NAME BYTES      memory to read from; prints {"metadata", "base"}
    reader NAME BYTES      {"metadata", "base"} once, then {"spans": [[local, remote, length], ...]} -> {"seconds"}
    pool TRANSPORT BYTES   memory to read from through one of Tandem's transports; prints {"endpoint"}
    reads TRANSPORT BYTES  {"endpoint"} once, then {"bytes"} -> {"seconds", "lanes"}
"""

import json
import os
import sys
import time
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.host.memory import huge_memory, pool_memory
from kvtransfer.registry import open_transport
from kvtransfer.transport import MAX_POSTED_BYTES, READ_BYTES, Pool, Span
from kvtransfer.ucx.nixl_lane import make_agent


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def filled(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory like an engine's pool, with every page present."""
    memory = huge_memory(num_bytes)
    memory[:] = 1
    return memory


def lend(name: str, num_bytes: int) -> None:
    memory = filled(num_bytes)
    agent = make_agent(name)
    agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
    say(metadata=b64encode(agent.get_agent_metadata()).decode(), base=memory.ctypes.data)
    sys.stdin.read()


def read(name: str, num_bytes: int) -> None:
    """Read groups of spans of at most MAX_POSTED_BYTES, one group after the other, polling without pause."""
    memory = filled(num_bytes)
    copied = filled(num_bytes)
    agent = make_agent(name)
    agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
    say(ready=True)
    lender = json.loads(sys.stdin.readline())
    peer = agent.add_remote_agent(b64decode(lender["metadata"])).decode()
    for line in sys.stdin:
        request = json.loads(line)
        if "copy" in request:
            started_at = time.perf_counter()
            copied[: request["copy"]] = memory[: request["copy"]]
            say(seconds=time.perf_counter() - started_at)
            continue
        started_at = time.perf_counter()
        for spans in windows(request["spans"]):
            local = agent.get_xfer_descs([(memory.ctypes.data + s[0], s[2], 0) for s in spans], "DRAM")
            remote = agent.get_xfer_descs([(lender["base"] + s[1], s[2], 0) for s in spans], "DRAM")
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            handle.release()
        say(seconds=time.perf_counter() - started_at)


def windows(spans: list[list[int]]) -> list[list[list[int]]]:
    """Cut and group spans so that each group has at most MAX_POSTED_BYTES."""
    groups: list[list[list[int]]] = [[]]
    room = MAX_POSTED_BYTES
    for local, remote, length in spans:
        done = 0
        while done < length:
            if not room:
                groups.append([])
                room = MAX_POSTED_BYTES
            piece = min(room, length - done)
            groups[-1].append([local + done, remote + done, piece])
            done += piece
            room -= piece
    return groups


def pool(transport: str, num_bytes: int) -> None:
    opened = open_transport(transport, f"bench-{os.getpid()}")
    lent = pool_memory(1, num_bytes, in_file=True)
    lent.memory[:] = 1
    say(endpoint=opened.register(lent).decode())
    sys.stdin.read()
    opened.close()


def reads(transport: str, num_bytes: int) -> None:
    """Queue all reads of a request at once, as the engine does."""
    opened = open_transport(transport, f"bench-{os.getpid()}")
    opened.register(Pool(filled(num_bytes).reshape(1, -1)))
    say(ready=True)
    peer = opened.connect(json.loads(sys.stdin.readline())["endpoint"].encode())
    for line in sys.stdin:
        wanted = json.loads(line)["bytes"]
        started_at = time.perf_counter()
        futures = [opened.read(peer, [Span(at, at, READ_BYTES)]) for at in range(0, wanted, READ_BYTES)]
        for future in futures:
            future.result()
        say(seconds=time.perf_counter() - started_at, lanes=peer.lanes)
    opened.close()


if __name__ == "__main__":
    role, core = sys.argv[1], int(sys.argv[2])
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # NIXL logs to standard output
    if core >= 0:
        os.sched_setaffinity(0, {core})
    {"lender": lend, "reader": read, "pool": pool, "reads": reads}[role](sys.argv[3], int(sys.argv[4]))
