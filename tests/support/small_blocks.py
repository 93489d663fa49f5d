"""Blocks of 64 bytes of one model."""

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import root_key
from kvtransfer.fingerprint import fingerprint_blocks

HEADS = 2
BLOCK_BYTES = 64
MODEL = bytes(range(32))
ROOT = root_key(MODEL, "")


def block_of(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def fingerprint_of(block: NDArray[np.uint8]) -> bytes:
    return fingerprint_blocks(block.reshape(1, -1), [0], HEADS).tobytes()
