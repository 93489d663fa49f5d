"""Memory of large tensors, as the system sees it."""

import ctypes
import mmap
import platform

import numpy as np
import pytest
import torch

from engine.backends.torch.memory import huge_tensor, populate

SIZE = 40 << 20
OLD = platform.system() != "Linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14)


def resident(tensor: torch.Tensor) -> float:
    """The share of a tensor's pages that have physical memory."""
    pages = np.zeros(-(-tensor.numel() // mmap.PAGESIZE), np.uint8)
    arguments = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
    assert ctypes.CDLL(None).mincore(*arguments, pages.ctypes.data_as(ctypes.c_void_p)) == 0
    return float((pages & 1).mean())


@pytest.mark.skipif(OLD, reason="memory can be taken ahead since Linux 5.14")
def test_memory_is_taken_ahead_and_holds_what_it_held() -> None:
    memory = huge_tensor(SIZE)
    memory[5 << 20] = 7
    assert resident(memory) < 0.5
    populate(memory, lambda: False).join()
    assert resident(memory) == 1
    assert memory[5 << 20] == 7
    assert int(memory.sum()) == 7


@pytest.mark.skipif(OLD, reason="memory can be taken ahead since Linux 5.14")
def test_memory_is_taken_slowly_only_while_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, slept = iter([False, True, True, *[False] * 100]), list[float]()
    monkeypatch.setattr("engine.backends.torch.memory.time.sleep", slept.append)
    memory = huge_tensor(SIZE)
    populate(memory, lambda: next(asked)).join()
    assert len(slept) == 2
    assert resident(memory) == 1
