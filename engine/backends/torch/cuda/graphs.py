"""Decode-only steps as CUDA graphs: one call starts hundreds of small kernels.

There is one graph for each number of decodes in BATCHES; a step is padded up to the next. Padding is single tokens
whose KV goes into the scratch block, which belongs to no sequence. A graph reads its inputs from one buffer, filled by
one copy. The buffer's arrays stay where they lay at capture. Graphs share memory, since they never run at the same
time.

`tests/gpu` checks that graphs give the same results as the plain path.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.torch.attention import PagedAttention
from engine.backends.torch.cuda.step import GpuAttention, Step
from engine.backends.torch.cuda.tables import POSITIONS, TOKENS, Sections, StepTables, host_buffer
from engine.backends.torch.device import KvMemory
from engine.core_types import Chunk
from engine.kv.layout import KvLayout
from engine.model_runner import ModelInfo

log = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Forward = Callable[[Tensor, Tensor], Tensor]
"""Forward of a model: token ids and positions, [1, tokens], to the logits of all tokens, [tokens, vocab]."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Captured computation: `replay` reads the present content of its inputs and overwrites `output`."""

    output: Tensor
    replay: Callable[[], None]


Capture = Callable[[Callable[[], Tensor]], Captured]


class CudaCapture:
    """Capturer of computations, all into one pool of memory."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        """Run `compute` once, then capture it.

        The first run compiles and allocates, so that neither is part of the graph. Raises RuntimeError for operations
        that cannot be captured.
        """
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            compute()
            compute()
        before.wait_stream(self._stream)
        torch.cuda.synchronize()
        try:
            return self._capture(compute)
        except RuntimeError:
            torch.cuda.set_stream(before)  # torch does not restore it when a capture fails
            raise

    def _capture(self, compute: Callable[[], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        # thread_local: a transport's thread may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        return Captured(output, graph.replay)


@dataclass(frozen=True, slots=True)
class _Bucket:
    sections: Sections
    step: Step
    captured: Captured


class DecodeGraphs:
    """Graphs of decode-only steps, captured at construction, largest first: the others then fit into its memory."""

    def __init__(
        self,
        attention: GpuAttention,
        layout: KvLayout,
        forward: Forward,
        capture: Capture,
        scratch_block: int,
        max_blocks: int,
        batches: Sequence[int] = BATCHES,
    ) -> None:
        """Capture all sizes.

        `max_blocks` is the largest number of blocks of one sequence.
        """
        self._attention = attention
        self._layout = layout
        self._forward = forward
        self._scratch_block = scratch_block
        self._batches = sorted(batches)
        self._max_blocks = max_blocks
        largest = _sections(self._batches[-1], max_blocks).num_elements
        self._host = host_buffer(largest, attention.device)
        self._device = torch.zeros(largest, dtype=torch.int32, device=attention.device)
        self._buckets = {size: self._capture(size, capture) for size in reversed(self._batches)}

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether a graph can compute a step of these chunks."""
        return 0 < len(chunks) <= self._batches[-1] and all(chunk.num_rows == 1 for chunk in chunks)

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks and return [len(chunks), vocab], which the next call overwrites."""
        bucket = self._buckets[self._batches[bisect_left(self._batches, len(chunks))]]
        self._load(bucket.step, bucket.sections, chunks)
        bucket.captured.replay()
        return bucket.captured.output[: len(chunks)]

    def _capture(self, size: int, capture: Capture) -> _Bucket:
        sections = _sections(size, self._max_blocks)
        step = self._attention.bucket(size, self._device[: sections.num_elements], sections)
        self._load(step, sections, [])
        self._attention.step = step
        token_ids, positions = step.device[TOKENS][None], step.device[POSITIONS][None]
        return _Bucket(sections, step, capture(lambda: self._forward(token_ids, positions)))

    def _load(self, step: Step, sections: Sections, chunks: Sequence[Chunk]) -> None:
        tables = StepTables.of(self._layout, chunks)
        tables.pad(self._layout, step.num_decodes, self._scratch_block)
        used = sections.fill(self._host, [*tables.arrays, tables.tables])
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        self._attention.refill(step, sections.views(self._host), len(tables.tables))


@torch.inference_mode()
def decode_graphs(
    attention: PagedAttention, layout: KvLayout, forward: Forward, memory: KvMemory, info: ModelInfo
) -> DecodeGraphs | None:
    """Return the graphs, or None for another backend or a model whose computation depends on its own results."""
    if not isinstance(attention, GpuAttention):
        return None
    max_blocks = min(layout.blocks_for(info.max_context_tokens), memory.pool.num_blocks)
    try:
        return DecodeGraphs(attention, layout, forward, CudaCapture(), memory.scratch_block, max_blocks)
    except RuntimeError as error:
        log.warning("no CUDA graphs for this model, expect slower decoding: %s", error)
        return None


def _sections(size: int, max_blocks: int) -> Sections:
    """Return a bucket's sections: token ids, positions, rows, table starts, last lengths, tables."""
    return Sections([size, size, size, size + 1, size, size * max_blocks])
