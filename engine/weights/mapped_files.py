"""Files mapped one after the other, so that one registration makes all of them readable by others.

They are pages of the system's page cache, which the files' owner shares with every process of its host. Python's own
mmap cannot choose an address, so the system's is called.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.weights.offer import layout_of
from kvtransfer.transport import Pool

_MAP_FIXED = 0x10


class MappedFiles:
    """Files as one pool, read-only; they stay mapped as long as the pool's memory is referenced."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Map the files.

        Raises OSError.
        """
        sizes = [path.stat().st_size for path in paths]
        offsets, total = layout_of(sizes)
        if not total:
            raise OSError("the weight files are empty")
        area = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        memory = np.frombuffer(area, np.uint8)
        for path, num_bytes, offset in zip(paths, sizes, offsets, strict=True):
            _map_at(path, num_bytes, memory.ctypes.data + offset)
        self.pool = Pool(memory.reshape(1, total))


def _map_at(path: Path, num_bytes: int, address: int) -> None:
    """Replace memory of this process by a file's pages."""
    system = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    system.mmap.argtypes, system.mmap.restype = [pointer, size, number, number, number, ctypes.c_long], pointer
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = system.mmap(address, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    finally:
        os.close(descriptor)
    if mapped != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
