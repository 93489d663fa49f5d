"""The bytes of KV blocks, out of the pool and into it: what goes to the tiers below the pool and comes back."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BlockBytes:
    """Of a pool on any device. From any thread; only of blocks that no running step writes or reads.

    On a GPU the copies have a stream of their own: what they touch was written by steps that are over, which their
    caller has waited for, so they need not wait for the step that runs.
    """

    def __init__(self, blocks: Tensor) -> None:
        """`blocks` is uint8 [num_blocks, block_bytes]."""
        self._blocks = blocks
        self._stream = torch.cuda.Stream(blocks.device) if blocks.is_cuda else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def read(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Copies, [block_bytes] each, in main memory when this returns."""
        with self._own_stream():
            rows: NDArray[np.uint8] = self._blocks[list(blocks)].cpu().numpy()  # waits for this stream alone
        return list(rows)

    @torch.inference_mode()
    def write(self, block: int, content: NDArray[np.uint8]) -> None:
        """The block has these bytes when this returns."""
        with self._own_stream():
            self._blocks[block].copy_(torch.from_numpy(np.ascontiguousarray(content)))
        if self._stream is not None:
            self._stream.synchronize()

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
