"""Fingerprints of blocks on a GPU, computed there.

The values equal those of `kvtransfer/fingerprint.py`.

torch's int64 arithmetic wraps around modulo 2**64 as numpy's uint64 does, and the sum of products has the same bits
under either sign.
"""

import contextlib
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.torch.device import staged
from kvtransfer.fingerprint import WORD_BYTES, Cut, plane_multipliers, words_of

WORK_BYTES = 32 << 20
"""Bytes of blocks that one sequence of kernels covers. Each kernel reads what the one before it wrote, so the copy of
the blocks should fit into the GPU's L2 cache (H100: 50 MB), and launches are few beside 0.1 ms of work."""


class PendingFingerprints:
    """Fingerprints that a GPU computes."""

    def __init__(self, folded: Tensor, zero: np.uint64, done: torch.cuda.Event | None) -> None:
        """Create them; `folded` is in main memory, and complete once `done` has happened."""
        self._folded, self._zero, self._done = folded, zero, done

    @property
    def ready(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def result(self) -> NDArray[np.uint64]:
        """Wait for the GPU and return the fingerprints, uint64 [blocks, kv_heads]."""
        if self._done is not None:
            self._done.synchronize()
        sums: NDArray[np.int64] = self._folded.numpy()
        return sums.view(np.uint64) + self._zero


class TensorFingerprints:
    """Fingerprints of a pool's blocks, as `Fingerprints` or, with several planes, `PlaneFingerprints` computes them.

    Safe from any thread.

    On a GPU the computation has streams of its own, of high priority, so that blocks are checked while a step runs. The
    number of kernels and waits depends on the bytes of a call's blocks and not on the number of blocks.
    """

    def __init__(
        self,
        pool: Tensor,
        kv_heads: int,
        planes: int = 1,
        num_blocks: int | None = None,
        plane_cut: Cut | None = None,
        head_cut: Cut | None = None,
    ) -> None:
        """Create it for a contiguous uint8 pool [num_blocks, block_bytes].

        With `planes` above 1 the pool is [planes, num_blocks, span_bytes] of any shape, and `num_blocks` must be given.
        The pool of a pipeline stage has a `plane_cut` of the planes of whole blocks, or a `head_cut` of their heads.
        """
        self._planes = planes
        self._num_blocks = num_blocks or len(pool)
        self._spans = pool.view(planes * self._num_blocks, -1).view(torch.int64)
        head_words = self._spans.shape[1] // kv_heads
        of_words, zero = words_of(head_words, *(head_cut or Cut(0, head_words)))
        is_plane = planes > 1 or plane_cut is not None
        factors = plane_multipliers(planes, plane_cut) if is_plane else np.ones(1, np.uint64)
        multipliers = np.multiply.outer(factors, of_words).reshape(planes, 1, 1, head_words)
        self._multipliers = torch.from_numpy(multipliers.view(np.int64)).to(pool.device)
        self._zero = np.multiply(factors, zero).sum(dtype=np.uint64)
        block_bytes = planes * self._spans.shape[1] * WORD_BYTES
        self._blocks_at_once = min(max(1, WORK_BYTES // block_bytes), self._num_blocks)
        self._arrived, self._filled = self._sequence(), self._sequence()
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)  # makes the multipliers visible to the other streams

    def of(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return the fingerprints of blocks that are written already, uint64 [len(blocks), kv_heads]."""
        return self._arrived.begin(blocks).result()

    def begin(self, blocks: Sequence[int], after: torch.cuda.Event) -> PendingFingerprints:
        """Start to compute the fingerprints of blocks that the work before the event `after` writes.

        The GPU waits for the event, the caller does not. `of` does not wait for it either. On a CPU the event is
        ignored, and the blocks must be written.
        """
        return self._filled.begin(blocks, after)

    def _sequence(self) -> "_Sequence":
        return _Sequence(self._spans, self._multipliers, self._zero, self._planes, self._blocks_at_once)


class _Sequence:
    """Kernels that compute fingerprints, in order on one stream."""

    def __init__(self, spans: Tensor, multipliers: Tensor, zero: np.uint64, planes: int, blocks_at_once: int) -> None:
        """Create it for spans of 64-bit words, [planes * num_blocks, words], and multipliers [planes, 1, 1, words]."""
        self._spans = spans
        self._multipliers = multipliers
        self._zero = zero
        self._planes = planes
        self._blocks_at_once = blocks_at_once
        self._heads = spans.shape[1] // multipliers.shape[-1]
        self._lock = threading.Lock()  # the copy of the blocks belongs to one call at a time, in the stream's order
        self._copy = torch.empty(planes * blocks_at_once, spans.shape[1], dtype=torch.int64, device=spans.device)
        self._stream: torch.cuda.Stream | None = None
        if spans.is_cuda:
            self._stream = torch.cuda.Stream(spans.device, priority=-1)  # type: ignore[no-untyped-call]

    def begin(self, blocks: Sequence[int], after: torch.cuda.Event | None = None) -> PendingFingerprints:
        """Start the kernels, on a GPU behind the event `after`."""
        stream = self._stream
        with self._lock, contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None and after is not None:
                stream.wait_event(after)
            folded = self._fold(np.array(blocks, np.int64))
            if stream is None:
                return PendingFingerprints(folded, self._zero, None)
            on_host = torch.empty(folded.shape, dtype=folded.dtype, pin_memory=True)
            on_host.copy_(folded, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return PendingFingerprints(on_host, self._zero, done)

    def _fold(self, blocks: NDArray[np.int64]) -> Tensor:
        """Return the sums of the blocks' words, int64 [len(blocks), kv_heads], on the pool's device."""
        num_blocks, step = len(self._spans) // self._planes, self._blocks_at_once
        assert not len(blocks) or 0 <= blocks.min() <= blocks.max() < num_blocks
        folded = torch.empty(len(blocks), self._heads, dtype=torch.int64, device=self._spans.device)
        parts = [blocks[first : first + step] for first in range(0, len(blocks), step)]
        # the spans of each part, plane by plane
        rows = [(part + num_blocks * np.arange(self._planes)[:, None]).reshape(-1) for part in parts]
        if not rows:
            return folded
        ids, first, begin = staged(np.concatenate(rows), torch.int64, self._spans.device), 0, 0
        for part in parts:
            last, end = first + len(part), begin + self._planes * len(part)
            words = torch.index_select(self._spans, 0, ids[begin:end], out=self._copy[: end - begin])
            words = words.view(self._planes, len(part), self._heads, -1)
            halves = words.view(torch.int32)
            halves[..., 0::2].bitwise_xor_(halves[..., 1::2])  # the lower half comes first
            torch.sum(words.mul_(self._multipliers), dim=(0, 3), out=folded[first:last])
            first, begin = last, end
        return folded
