"""What one worker tells another about its weight files, before a byte is read."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64 << 10
"""Each file begins at a multiple of this in the offered memory: the largest page size in use."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file of a model directory."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsOffer:
    """Weight files that lie in a live worker's memory, one after the other."""

    worker_id: str
    files: tuple[WeightFile, ...]
    """Files in the order of their names."""
    fingerprint: bytes
    """Fingerprint of all files and of config.json, see `ModelDir.weights_fingerprint`."""
    endpoint: bytes
    """Endpoint of the transport that reads them."""


def layout_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each file in the offered memory, and the size of all of it."""
    offsets, end = [], 0
    for num_bytes in sizes:
        offsets.append(end)
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
