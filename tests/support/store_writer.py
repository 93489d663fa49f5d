"""A process that writes blocks to a shared folder until it is killed; arguments: folder, first block, files a part."""

import sys
from itertools import count
from pathlib import Path

import numpy as np

from engine.block_keys import block_keys, root_key
from engine.kv.store.folder import NUM_FOLDERS, FolderObjects
from engine.kv.store.object_format import ObjectFormat
from engine.kv.tiers.slots import NamedBlock
from kvtransfer.fingerprint import fingerprint_blocks

HEADS = 2
BLOCK_BYTES = 64 << 10
MODEL = bytes(range(32))
FORMAT = ObjectFormat(BLOCK_BYTES, HEADS, MODEL)
NUM_KEYS = 512
KEYS = block_keys(root_key(MODEL, ""), range(4 * NUM_KEYS), 4)


def content_of(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, BLOCK_BYTES, np.uint8)


def fingerprint_of(content: np.ndarray) -> bytes:
    return fingerprint_blocks(content.reshape(1, -1), [0], HEADS).tobytes()


def object_of(index: int) -> np.ndarray:
    row = np.empty(FORMAT.object_bytes, np.uint8)
    row[FORMAT.payload_offset :] = content = content_of(index)
    FORMAT.pack(NamedBlock(KEYS[index - 1] if index else bytes(16), KEYS[index], fingerprint_of(content)), row)
    return row


def folder(root: Path, max_files: int) -> FolderObjects:
    return FolderObjects(root, FORMAT.object_bytes, max_files * NUM_FOLDERS * FORMAT.object_bytes, 1e9)


def main(root: str, first: str, max_files: str) -> None:
    objects = folder(Path(root), int(max_files))
    rows = [object_of(index) for index in range(64)]
    for number in count(int(first)):
        name = FORMAT.name(KEYS[number % 64])
        objects.write(name, rows[number % 64])
        objects.trim(name)
        if number == int(first):
            print("writing", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
