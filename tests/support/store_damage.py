"""Damaged objects in a shared folder, and writers that are killed at any moment: which blocks would be used?

`python support/store_damage.py FOLDER FIRST` is such a writer.
"""

import random
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import block_keys, root_key
from kvcache.store.folder import FolderObjects
from kvcache.store.kv_store import ObjectFormat, ObjectMissing, ObjectRefused, StoredBlock
from kvtransfer.fingerprint import fingerprint_blocks

HEADS = 2
BLOCK_BYTES = 64 << 10
MODEL = bytes(range(32))
NUM_BLOCKS = 64
FORMAT = ObjectFormat(BLOCK_BYTES, HEADS, MODEL)
KEYS = block_keys(root_key(MODEL, ""), range(4 * NUM_BLOCKS), 4)
FILES_A_PART = 1
"""Bound of the writers' folder, below what they write."""


def damaged(stored: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return other bytes in place of `stored`; `others` are objects of other blocks, models and layouts."""
    match rng.randrange(7):
        case 0:  # one bit, anywhere
            changed = bytearray(stored)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case 1:  # one byte of the header
            changed = bytearray(stored)
            at = rng.randrange(min(256, len(changed)))
            changed[at] = (changed[at] + rng.randrange(1, 256)) % 256
            return bytes(changed)
        case 2:  # torn: the rest was never written
            at = rng.randrange(len(stored))
            return stored[:at] + bytes(len(stored) - at)
        case 3:  # truncated
            return stored[: rng.randrange(len(stored))]
        case 4:  # longer
            return stored + rng.randbytes(rng.randrange(1, 100))
        case 5:  # another object
            return rng.choice(others)
        case _:  # the head of one object, the rest of another
            other, at = rng.choice(others), rng.randrange(len(stored))
            return stored[:at] + other[at:]


def content_of(index: int) -> NDArray[np.uint8]:
    return np.random.default_rng(index).integers(0, 256, BLOCK_BYTES, np.uint8)


def fingerprint_of(content: NDArray[np.uint8]) -> bytes:
    return fingerprint_blocks(content.reshape(1, -1), [0], HEADS).tobytes()


def object_of(index: int) -> NDArray[np.uint8]:
    row = np.empty(FORMAT.object_bytes, np.uint8)
    row[FORMAT.payload_offset :] = content = content_of(index)
    FORMAT.pack(StoredBlock(KEYS[index - 1] if index else bytes(16), KEYS[index], fingerprint_of(content)), row)
    return row


def folder(root: Path, files_a_part: int = 1000) -> FolderObjects:
    return FolderObjects(root, FORMAT.object_bytes, files_a_part * 256 * FORMAT.object_bytes, 1e9)


def use(objects: FolderObjects, index: int) -> str:
    """Read a block as an engine does; return what became of it: used, wrong, refused, missing or untyped."""
    row = np.empty(FORMAT.object_bytes, np.uint8)
    try:
        (failure,) = objects.read([FORMAT.name(KEYS[index])], [row])
        if failure is not None:
            return "missing" if isinstance(failure, ObjectMissing) else "untyped"
        block = FORMAT.check(KEYS[index], row)
    except ObjectRefused:
        return "refused"
    except Exception:
        return "untyped"
    payload = row[FORMAT.payload_offset :]
    if fingerprint_of(payload) != block.fingerprint:
        return "mismatched"
    return "used" if np.array_equal(payload, content_of(index)) else "wrong"


def damage_files(root: Path, num_files: int) -> Counter[str]:
    """Damage files one after the other and read each; return how often what became of them."""
    rng, objects, found = random.Random(11), folder(root), Counter[str]()
    whole = [object_of(index).tobytes() for index in range(8)]
    for number in range(num_files):
        index = number % 8
        name = FORMAT.name(KEYS[index])
        objects.write(name, np.frombuffer(whole[index], np.uint8))
        others = [each for at, each in enumerate(whole) if at != index]
        (root / name).write_bytes(damaged(whole[index], others, rng))
        found[use(objects, index)] += 1
    return found


def kill_writers(root: Path, num_rounds: int) -> Counter[str]:
    """Kill two writers of one folder at a random moment, again and again, and read all blocks after each time."""
    rng, found = random.Random(3), Counter[str]()
    for number in range(num_rounds):
        command = [sys.executable, __file__, str(root)]
        writers = [
            subprocess.Popen([*command, str(first)], stdout=subprocess.PIPE, text=True)
            for first in (number, number + NUM_BLOCKS // 2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
        time.sleep(rng.uniform(0.0, 0.2))
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        found.update(use(folder(root), index) for index in range(NUM_BLOCKS))
    return found


def main(root: str, first: str) -> None:
    objects, rows = folder(Path(root), FILES_A_PART), [object_of(index) for index in range(NUM_BLOCKS)]
    for number in count(int(first)):
        name = FORMAT.name(KEYS[number % NUM_BLOCKS])
        objects.write(name, rows[number % NUM_BLOCKS])
        objects.trim(name)
        if number == int(first):
            print("writing", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
