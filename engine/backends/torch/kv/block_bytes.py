"""Bytes of KV blocks, copied out of the pool to the stores below it and back."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BlockBytes:
    """Reader and writer of a pool's blocks, on any device.

    Safe from any thread, but only for blocks that no running step writes or reads. On a GPU the copies have a stream of
    their own. The blocks were written by steps that are over and that the caller waited for, so the copies need not
    wait for the running step.
    """

    def __init__(self, pool: Tensor, planes: int = 1) -> None:
        """Create it for a contiguous uint8 pool [num_blocks, block_bytes].

        With `planes` above 1 the pool is [planes, num_blocks, span_bytes]; a block's bytes are its spans in that order.
        """
        self._spans = pool if planes > 1 else pool[None]
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def read(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return copies of the blocks, [block_bytes] each, in main memory."""
        with self._own_stream():
            spans = self._spans[:, list(blocks)].transpose(0, 1)  # [blocks, planes, span_bytes]
            rows: NDArray[np.uint8] = spans.reshape(len(blocks), -1).cpu().numpy()  # waits for this stream alone
        return list(rows)

    @torch.inference_mode()
    def write(self, block: int, content: NDArray[np.uint8]) -> None:
        """Write the block's bytes and return when they are there."""
        with self._own_stream():
            spans = torch.from_numpy(np.ascontiguousarray(content).reshape(len(self._spans), -1))
            self._spans[:, block].copy_(spans)
        if self._stream is not None:
            self._stream.synchronize()

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
