"""Main memory for what is large."""

import mmap

import numpy as np
from numpy.typing import NDArray

HUGE_BYTES = 2 << 20
"""A huge page has so many."""


def huge_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that begins on a huge page; physical memory is taken when it is first written.

    For what is read at random: of 4 KiB pages, each would cost a walk of the page table.
    """
    memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    first = -array.ctypes.data % HUGE_BYTES
    return array[first : first + num_bytes]
