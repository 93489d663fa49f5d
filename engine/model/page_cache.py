"""Whether files are in the system's page cache, so that reading them takes no disk."""

import os
from collections.abc import Sequence
from pathlib import Path

SAMPLES = 32
"""Places of a file that are tried."""
SHARE = 0.9
"""Share of them that must be there."""


def in_page_cache(paths: Sequence[Path]) -> bool:
    """Return whether nearly all of the files is there; False where the file system cannot tell.

    Some kernels begin to read a page that was tried, so a second answer about small files may differ.
    """
    return all(_found_in(path) >= SHARE * SAMPLES for path in paths)


def _found_in(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # a try must not read ahead
        size, byte = os.fstat(descriptor).st_size, bytearray(1)
        return sum(_is_there(descriptor, byte, size * sample // SAMPLES) for sample in range(SAMPLES))
    finally:
        os.close(descriptor)


def _is_there(descriptor: int, byte: bytearray, offset: int) -> bool:
    try:
        os.preadv(descriptor, [byte], offset, os.RWF_NOWAIT)
    except OSError:  # it would have to wait, or the file system does not know this flag
        return False
    return True
