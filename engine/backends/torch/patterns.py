"""Test patterns in a GPU's memory, moved by `tandem doctor` where there is a GPU."""

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.transport import DevicePool


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
