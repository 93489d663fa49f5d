"""Disk tiers on real files, and a process that writes one until it is killed: this file, run as `DIRECTORY SEED`."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.block_keys import BlockKey, block_keys, root_key
from engine.kv.block_pool import Stored
from engine.kv.tiers.disk_format import DiskFormat
from engine.kv.tiers.tiers import TierConfig, Tiers
from kvtransfer.fingerprint import fingerprint_blocks

PR_SET_PDEATHSIG = 1
HEADS = 4
BLOCK_BYTES = 256 << 10
"""Large, so that a process is nearly always killed within one."""
DISK_SLOTS = 12
HOST_SLOTS = 4
MODEL = bytes(range(32))
ROOT = root_key(MODEL, "")
FORMAT = DiskFormat(BLOCK_BYTES, HEADS)
PATIENCE_S = 90.0
NAME = f"{MODEL.hex()[:16]}-{BLOCK_BYTES}"


def disk_bytes_for(num_slots: int) -> int:
    return FORMAT.payload_offset(num_slots - 1) + FORMAT.payload_stride


def key_of(number: int) -> BlockKey:
    return block_keys(ROOT, [number], 1)[0]


def fingerprint_of(block: NDArray[np.uint8]) -> bytes:
    return fingerprint_blocks(block.reshape(1, -1), [0], HEADS).tobytes()


def open_tiers(directory: Path, disk_slots: int = DISK_SLOTS, host_slots: int = HOST_SLOTS) -> Tiers:
    config = TierConfig(host_slots * BLOCK_BYTES, directory, disk_bytes_for(disk_slots))
    return Tiers(config, BLOCK_BYTES, HEADS, MODEL)


def put(tiers: Tiers, number: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Block `number`, with bytes that no other put has."""
    block = rng.integers(0, 256, BLOCK_BYTES, np.uint8)
    tiers.put(ROOT, key_of(number), block, fingerprint_of(block))
    return block


@contextmanager
def writer_on(directory: Path, seed: int) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process with a file of `directory`, killed at the end."""
    command = [sys.executable, __file__, str(directory), str(seed)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def burst(process: "subprocess.Popen[str]") -> None:
    """One block in every slot."""
    assert process.stdout is not None
    tell(process, "burst")
    assert process.stdout.readline() == "burst\n"


def until_written(tiers: Tiers, num_blocks: int) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while tiers.counters.disk_blocks < num_blocks:
        assert time.monotonic() < give_up_at, tiers.counters
        time.sleep(0.001)


def fill(directory: Path, num_blocks: int = DISK_SLOTS) -> dict[BlockKey, bytes]:
    """Blocks in slots 0, 1, ...: the bytes of each."""
    tiers, rng, made = open_tiers(directory), np.random.default_rng(0), {}
    for number in range(num_blocks):
        made[key_of(number)] = put(tiers, number, rng).tobytes()
        until_written(tiers, number + 1)
    tiers.close()
    return made


def served(tiers: Tiers) -> dict[BlockKey, tuple[bytes, bytes]]:
    """Of everything held: the fingerprint that should be and the bytes that came."""
    keys = [key for event in tiers.snapshot() if isinstance(event, Stored) for key in event.keys]
    found = {}
    for key in keys:
        held = tiers.pin([key])
        landed: list[bytes] = []
        tiers.read(held, lambda _, block, landed=landed: landed.append(block.tobytes())).result(PATIENCE_S)  # type: ignore[misc]
        found[key] = (tiers.fingerprints(held)[0], landed[0])
        tiers.unpin(held)
    return found


def is_right(fingerprint: bytes, data: bytes) -> bool:
    return fingerprint_of(np.frombuffer(data, np.uint8)) == fingerprint


def file_of(directory: Path, number: int = 0) -> Path:
    return directory / NAME / f"kv-{number}.blocks"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def write_slowly() -> None:
    """A disk that takes its time, so that a process is mostly killed between two parts of a write."""
    pwrite = os.pwrite

    def slow(file: int, content: bytes, offset: int) -> int:
        time.sleep(0.002)
        return pwrite(file, content, offset)

    os.pwrite = slow  # type: ignore[assignment]


def write_until_killed() -> None:
    """Print the file that is locked. Then every line on standard input is one burst of puts, answered when it was
    written; after the line `storm` it never stops. Ends with its standard input, or with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    directory, rng = Path(sys.argv[1]), np.random.default_rng(int(sys.argv[2]))
    tiers = open_tiers(directory)
    assert tiers._disk is not None
    print(tiers._disk.path, flush=True)
    for line in sys.stdin:
        if line == "storm\n":
            write_slowly()
        while line == "storm\n":
            put(tiers, int(rng.integers(0, 1 << 30)), rng)
        for number in range(DISK_SLOTS):
            put(tiers, number, rng)
            while tiers.counters.disk_blocks <= number:
                pass
        print(line, end="", flush=True)
    tiers.close()


if __name__ == "__main__":
    write_until_killed()
