"""Memory of large tensors, as the system sees it."""

import ctypes
import mmap
import platform

import numpy as np
import pytest
import torch

from engine.backends.torch.device import allocate
from engine.backends.torch.memory import huge_tensor, populate
from engine.kv.layout import KvDtype, KvLayout
from kvtransfer.transport import Pool

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


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("in_file", [False, True])
def test_the_pool_is_what_the_model_writes(kv_dtype: KvDtype, in_file: bool) -> None:
    layout = KvLayout(2, 2, 64, 16, "bfloat16", kv_dtype)
    memory = allocate(layout, 3, torch.device("cpu"), in_file)
    assert isinstance(memory.pool, Pool)
    assert (memory.pool.file is not None) is in_file
    assert memory.pool.memory.shape == (3, layout.block_bytes)
    memory.tensor[1] = 1
    assert [bool(block.any()) for block in memory.pool.memory] == [False, True, False]
