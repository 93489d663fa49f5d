"""Memory of large tensors."""

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.host.memory import huge_memory

_CHUNK = 64 << 20
_POPULATED_AT_ONCE = 4 << 20
_POPULATING = 0.1
"""Share of a core that `populate` uses while requests are served."""
_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23

log = logging.getLogger(__name__)


def huge_tensor(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes], allocated as by `huge_memory`."""
    return torch.from_numpy(huge_memory(num_bytes))


def populate(tensor: Tensor, busy: Callable[[], bool]) -> threading.Thread:
    """Take the physical memory of a contiguous tensor ahead of use, on a thread that is returned.

    The tensor's content stays. While `busy()`, the thread works slowly.

    Memory that is first written in a step is found, zeroed and mapped in that step, which is slow in a virtual machine
    whose host has yet to find the page. The memory is taken in pieces, since the process can map nothing else
    meanwhile.
    """
    thread = threading.Thread(target=_populate, args=(tensor, busy), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(tensor: Tensor, busy: Callable[[], bool]) -> None:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    for piece in torch.split(tensor.view(-1).view(torch.uint8), _POPULATED_AT_ONCE):
        begin = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = piece.data_ptr() + piece.numel() - begin
        began_at = time.monotonic()
        if advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
            # A system other than Linux 5.14 or newer: memory is taken when it is written.
            log.debug("memory could not be allocated ahead: %s", os.strerror(ctypes.get_errno()))
            return
        if busy():
            time.sleep((time.monotonic() - began_at) * (1 / _POPULATING - 1))


class Arena:
    """Allocator of zeroed pieces of shared huge pages, so that a small piece does not cost a whole page.

    Never shrinks.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return uint8 memory, aligned to 64 bytes."""
        if num_bytes > self._chunk.numel():
            if num_bytes > _CHUNK // 2:
                return huge_tensor(num_bytes)
            self._chunk = huge_tensor(_CHUNK)
        size = -(-num_bytes // 64) * 64
        piece, self._chunk = self._chunk[:num_bytes], self._chunk[size:]
        return piece


def forget_file_pages(tensor: Tensor) -> None:
    """Drop the physical pages of an unchanged tensor that is mapped from a .safetensors file.

    Other tensors stay as they are. Reading the tensor again reads the file, so weights that are no longer used stop
    counting as this process's memory.
    """
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    first, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and _mapped_from_weights(first, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)


def _mapped_from_weights(first: int, end: int) -> bool:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        addresses, *_, path = line.split(maxsplit=5)
        low, _, high = addresses.partition("-")
        if path.endswith(".safetensors") and int(low, 16) <= first and end <= int(high, 16):
            return True
    return False
