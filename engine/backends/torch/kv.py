"""KV pool of the torch engine: its size, the bytes of its blocks for stores, and fingerprints on a device.

Fingerprints equal those of `kvtransfer/fingerprint.py`: torch's int64 arithmetic wraps around modulo 2**64 as numpy's
uint64 does, and the sum of products has the same bits under either sign.
"""

import contextlib
import logging
import resource
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.torch.attention import use_attention
from engine.backends.torch.memory import staged
from engine.errors import EngineStartError
from engine.host.container_memory import container_memory
from engine.host.memory import UNMEASURED_KV_BYTES
from kvtransfer.fingerprint import WORD_BYTES, Cut, plane_multipliers, words_of

log = logging.getLogger(__name__)


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


MEASURED_TOKENS = 256
"""Tokens of the measured step, since a whole step takes long; its memory grows with the tokens."""
RESERVE = 0.05
"""Share of the container's memory that stays free: fragments, and what libraries take later."""
MIN_RESERVE_BYTES = 512 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Memory that others take beside a KV pool of automatic size."""

    step_tokens: int
    """Largest number of tokens of a step."""
    host_bytes: int = 0
    """Main memory that will be taken, for evicted blocks."""


DEFAULT_ROOM = KvRoom(2048)


def automatic_kv_bytes(model: torch.nn.Module, room: KvRoom, max_context_tokens: int) -> int:
    """Return the size of the KV pool in bytes.

    `model` is loaded and has no pool yet. Outside of a container of its own, the worker's share of the memory is
    unknown, and the size fixed. Raises EngineStartError where nothing is left.
    """
    if (of_container := container_memory()) is None:
        return UNMEASURED_KV_BYTES
    tokens = min(room.step_tokens, max_context_tokens, MEASURED_TOKENS)
    step = measured_step(model, tokens) * room.step_tokens // tokens
    total, free = of_container
    free -= room.host_bytes
    reserve = max(int(RESERVE * total), MIN_RESERVE_BYTES)
    left = free - step - reserve
    how = (
        f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free beside the weights, a step of {room.step_tokens} tokens"
        f" takes {step / GIB:.2f} and {reserve / GIB:.2f} stay free"
    )
    if left <= 0:
        raise EngineStartError("kv_memory_mib", f"auto leaves no memory for KV blocks: {how}")
    log.info("the KV pool takes %.2f GiB: %s", left / GIB, how)
    return left


@torch.inference_mode()
def measured_step(model: torch.nn.Module, num_tokens: int) -> int:
    """Return the memory in bytes that a step of one prompt needs beyond the weights, attention's own aside."""
    use_attention(model, _nothing)
    token_ids = torch.zeros(1, num_tokens, dtype=torch.long)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel begins a new maximum
    before = _peak()
    model(input_ids=token_ids, position_ids=torch.arange(num_tokens)[None], use_cache=False, logits_to_keep=1)
    return max(0, _peak() - before)


def _peak() -> int:
    """Return the most memory in bytes that was in use."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _nothing(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> object:
    """Return attention's output as zeros."""
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
