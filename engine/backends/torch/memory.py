"""Memory of large tensors.

Small transfers to and from the device that computes: vLLM's engine samples on a GPU, too.

On a GPU a copy from or to ordinary memory waits for everything that was started before it, and the GPU then waits for
Python. So a step's inputs cross through pinned memory without waiting, and one copy brings back the sampled tokens.

Test patterns in a GPU's memory, moved by `tandem doctor` where there is a GPU.
"""

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.host.memory import huge_memory
from kvtransfer.transport import DevicePool

log = logging.getLogger(__name__)


_CHUNK = 64 << 20
_POPULATED_AT_ONCE = 4 << 20
_POPULATING = 0.1
"""Share of a core that `populate` uses while requests are served."""
_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23


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


def staged(values: Sequence[int] | Sequence[float] | NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as a tensor [len(values)] on the device; a copy to a GPU does not wait for the GPU."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def read_back(tokens: Tensor) -> list[int]:
    """Return the values of an integer tensor.

    On a GPU this waits for everything that was started before.
    """
    if not tokens.is_cuda:
        return [int(token) for token in tokens.tolist()]
    pinned = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    pinned.copy_(tokens, non_blocking=True)
    torch.cuda.current_stream(tokens.device).synchronize()
    return [int(token) for token in pinned.tolist()]


def put_on_gpu(contents: NDArray[np.uint8]) -> DevicePool:
    """Return a pool of one block, [1, len(contents)], on the first GPU that the process sees."""
    tensor = torch.from_numpy(contents).cuda()
    torch.cuda.synchronize()
    return DevicePool(tensor.data_ptr(), 1, len(contents), tensor.get_device(), owner=tensor)


def fetch_from_gpu(pool: DevicePool) -> NDArray[np.uint8]:
    """Return the bytes of a pool that `put_on_gpu` made."""
    fetched: NDArray[np.uint8] = pool.owner.cpu().numpy()
    return fetched


def clear_on_gpu(pool: DevicePool, start: int) -> None:
    """Zero the pool from byte `start` to the end."""
    pool.owner[start:].zero_()
    torch.cuda.synchronize()
