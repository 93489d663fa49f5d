"""Main memory for large arrays."""

import contextlib
import logging
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.roles import Role
from engine.errors import EngineStartError
from kvtransfer.hardware.main_memory import check_fits
from kvtransfer.memory_file import MemoryFile
from kvtransfer.transport import Pool

log = logging.getLogger(__name__)


HUGE_BYTES = 2 << 20
"""Size of a huge page."""
UNMEASURED_KV_BYTES = 256 << 20
"""Size of an automatic KV pool where the worker's share of the memory is unknown."""


def huge_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed memory aligned to huge pages; pages are allocated at their first write.

    For memory that is read at random: with 4 KiB pages each access would walk the page table. Raises MemoryError.
    """
    try:
        check_fits(num_bytes)
        memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MemoryError(f"cannot allocate {num_bytes >> 20} MiB of memory: {reason}") from None
    with contextlib.suppress(AttributeError, OSError):  # systems and kernels without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    first = -array.ctypes.data % HUGE_BYTES
    return array[first : first + num_bytes]


def pool_memory(num_blocks: int, block_bytes: int, in_file: bool) -> Pool:
    """Allocate a KV pool like `huge_memory`, or in a memory file where possible.

    Raises EngineStartError.
    """
    num_bytes = num_blocks * block_bytes
    try:
        check_fits(num_bytes)
    except OSError as error:
        raise EngineStartError("kv_memory_mib", f"is too large: {error.strerror}") from None
    if in_file:
        try:
            file = MemoryFile(num_bytes)
            return Pool(file.memory.reshape(num_blocks, block_bytes), file=file)
        except (OSError, OverflowError, ValueError) as error:
            log.warning("other processes on this host cannot map the KV blocks: %s", error)
    try:
        return Pool(huge_memory(num_bytes).reshape(num_blocks, block_bytes))
    except MemoryError as error:
        raise EngineStartError("kv_memory_mib", str(error)) from None


def belongs_in_file(role: Role) -> bool:
    """Return whether the KV pool of a worker that starts in that role should be a memory file.

    Borrowers of this host then read it in half to two thirds of the time of the kernel's copy. But on most machines
    files have small pages, which slow decode steps of many sequences by 3 to 5 %, and prompts not at all.
    """
    return role == "prefill" or _files_have_huge_pages()


def _files_have_huge_pages() -> bool:
    """Return whether memory files can have huge pages on request."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return any(f"[{chosen}]" in setting for chosen in ("always", "within_size", "advise", "force"))
