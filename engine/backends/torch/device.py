"""Small transfers to and from the device that computes: vLLM's engine samples on a GPU, too.

On a GPU a copy from or to ordinary memory waits for everything that was started before it, and the GPU then waits for
Python. So a step's inputs cross through pinned memory without waiting, and one copy brings back the sampled tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


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
