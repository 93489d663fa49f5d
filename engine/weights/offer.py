"""Offers of weights: descriptions of one worker's weight files for another, before a byte is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT = 64 << 10
"""Each file begins at a multiple of this in the offered memory: the largest page size in use."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file of a model directory."""

    name: str
    num_bytes: int
    identity: str
    """Sign that two files of equal size hold the same bytes, told without reading them: the name that the Hub's cache
    gives to its content, otherwise the time of its last change, which copies of a volume or an image have in common."""

    @classmethod
    def of(cls, path: Path) -> "WeightFile":
        """Describe a file.

        Raises OSError.
        """
        stat, content = path.stat(), path.resolve()
        identity = content.name if content.parent.name == "blobs" else f"changed {stat.st_mtime_ns}"
        return cls(path.name, stat.st_size, identity)


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


def may_replace(offer: WeightsOffer, own: Sequence[WeightFile], known: bytes | None, trusted: bool) -> bool:
    """Return whether the offered weights may stand for files of one's own.

    `known` is the own files' fingerprint where it is remembered. Two models often differ in nothing but their weights,
    so equal sizes are enough only where the settings say so (`trusted`).
    """
    if [(file.name, file.num_bytes) for file in offer.files] != [(file.name, file.num_bytes) for file in own]:
        return False
    if known is not None:
        return known == offer.fingerprint
    return trusted or list(offer.files) == list(own)


def layout_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each file in the offered memory, and the size of all of it."""
    offsets, end = [], 0
    for num_bytes in sizes:
        offsets.append(end)
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
