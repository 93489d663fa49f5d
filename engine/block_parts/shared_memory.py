"""Memory of rank 0 that its followers map: whole blocks, of which each rank reads and writes its part.

The memory is an unnamed file whose descriptor the followers inherit. It only grows, so no mapping loses pages.
"""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvtransfer.hardware.main_memory import check_fits


class SharedMemory:
    """Rank 0's end: allocates rows, and knows the offset of each."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
        self._num_bytes = 0
        self._areas: list[tuple[int, int, int]] = []
        """Address, length and offset of each allocation."""

    def take(self, count: int, row_bytes: int) -> NDArray[np.uint8]:
        """Allocate zeroed rows, uint8 [count, row_bytes]; they are never given back.

        Pages are allocated at their first write. Raises MemoryError.
        """
        length = -(-count * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            check_fits(length)
            # A file may be larger than what a system that does not overcommit gives: so allocate as much otherwise.
            mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
            os.ftruncate(self.descriptor, self._num_bytes + length)
            mapped = mmap.mmap(self.descriptor, length, offset=self._num_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(str(error)) from None
        rows = np.frombuffer(mapped, np.uint8)[: count * row_bytes].reshape(count, row_bytes)
        self._areas.append((rows.ctypes.data, length, self._num_bytes))
        self._num_bytes += length
        return rows

    def offset_of(self, row: NDArray[np.uint8]) -> int:
        """Return the offset in the file of a row, or of a part of one, that lies in this memory."""
        address = row.ctypes.data
        for begin, length, offset in self._areas:
            if begin <= address < begin + length:
                return int(offset + address - begin)
        raise AssertionError("the row does not lie in shared memory")


class MappedMemory:
    """A follower's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = np.empty(0, np.uint8)

    def row(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return the bytes from `offset` on, which rank 0 has allocated.

        From any thread. Raises MemoryError.
        """
        memory = self._memory
        if offset + num_bytes > len(memory):  # rank 0 has allocated more since
            try:
                mapped = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
            except OSError as error:
                raise MemoryError(str(error)) from None
            self._memory = memory = np.frombuffer(mapped, np.uint8)
        row = memory[offset : offset + num_bytes]
        assert len(row) == num_bytes
        return row
