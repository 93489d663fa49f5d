"""Tiers of a few blocks of 64 bytes. Jobs run only when a test says so; the disk tier's file is a real one."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.block_keys import root_key
from engine.kv.tiers.disk_format import DiskFormat
from engine.kv.tiers.tiers import TierConfig, Tiers
from kvtransfer.fingerprint import fingerprint_blocks

HEADS = 2
BLOCK_BYTES = 64
MODEL = bytes(range(32))
ROOT = root_key(MODEL, "")
FORMAT = DiskFormat(BLOCK_BYTES, HEADS)


def block_of(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def fingerprint_of(block: NDArray[np.uint8]) -> bytes:
    return fingerprint_blocks(block.reshape(1, -1), [0], HEADS).tobytes()


def disk_bytes_for(num_slots: int) -> int:
    return FORMAT.payload_offset(num_slots - 1) + FORMAT.payload_stride


def tiers_of(host_slots: int, disk_slots: int = 0, directory: Path | None = None) -> Tiers:
    config = TierConfig(host_slots * BLOCK_BYTES, directory, disk_bytes_for(disk_slots) if directory else 0)
    return Tiers(config, BLOCK_BYTES, HEADS, MODEL, threaded=False)
