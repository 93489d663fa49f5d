"""Model joined to its paged KV memory: chunks in, logits out."""

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.backends.torch.attention import use_attention
from engine.backends.torch.backends import Backend, join
from engine.backends.torch.cuda.graphs import decode_graphs
from engine.backends.torch.device import KvMemory, allocate, staged
from engine.backends.torch.memory import populate
from engine.backends.torch.sampling.scoring import scored_rows
from engine.core_types import Chunk, SamplingParams, Sequence
from engine.errors import EngineStartError
from engine.kv.layout import KvLayout
from engine.model_runner import ModelInfo

WARM_UP_TOKENS = (24, 48, 96, 512)
"""Prompt lengths of the warm-up, one for each tile size that a kernel may choose."""


class PagedModel:
    """Model over `num_blocks` KV blocks of its own."""

    def __init__(
        self,
        model: torch.nn.Module,
        layout: KvLayout,
        info: ModelInfo,
        num_blocks: int,
        backend: Backend,
        device: torch.device,
        ranks: int = 1,
        in_file: bool = False,
    ) -> None:
        """Join `model` to a new pool.

        `model` and `layout` are one rank's part, of `ranks` tensor-parallel ranks. `in_file`: see `pool_memory`. Raises
        EngineStartError.
        """
        self.model = model
        self.layout = layout
        self.num_blocks = num_blocks
        self._computing = False
        self.memory: KvMemory = allocate(layout, num_blocks, device, in_file)
        joined = join(model, self.memory.tensor, layout, backend, ranks)
        self.backend, self._attention = joined.backend, joined.attention
        self.argmax, self._last_rows = joined.argmax, joined.last_rows
        self.bind_threads: Callable[[Seq[int]], None] | None = joined.bind_threads
        self.device = device
        # by now the memory that the weights were read from is free: both at once would be a peak
        if device.type == "cpu":
            populate(self.memory.byte_blocks, lambda: self._computing)
        # transformers keeps what is registered for ever, so it gets no reference that keeps the pool
        use_attention(model, weakref.proxy(self._attention))
        self.graphs = None
        if ranks == 1:  # a sum over ranks inside a CUDA graph is not supported
            self.graphs = decode_graphs(self._attention, layout, self._forward_all, self.memory, info)
        if device.type == "cuda":
            self.warm_up(self.memory.scratch_block, info.max_context_tokens)

    def logits(self, batch: Seq[Chunk]) -> Tensor:
        """Compute the chunks and return logits [places, vocab]: every place of the chunks that sample, in order."""
        self._computing = True
        try:
            return self._logits(batch)
        finally:
            self._computing = False

    def _logits(self, batch: Seq[Chunk]) -> Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        wanted: list[int] = []
        for chunk in batch:
            wanted += scored_rows(chunk, len(tokens))
            tokens += chunk.token_ids
            positions += range(chunk.start, chunk.start + chunk.num_rows)
            if chunk.samples:
                places = range(len(tokens) - len(chunk.draft_tokens) - 1, len(tokens))
                last_rows += places
                wanted += places
        scores = len(wanted) > len(last_rows)
        if self.graphs is not None and self.graphs.takes(batch) and not scores:
            every = self.graphs.logits(batch)
            return every if len(last_rows) == len(tokens) else every[staged(last_rows, torch.long, self.device)]
        rows = staged(last_rows, torch.long, self.device)
        self._attention.prepare(batch)
        if self._last_rows is not None:
            self._last_rows.rows = staged(wanted, torch.long, self.device) if scores else rows
        logits: Tensor = self.model(
            input_ids=staged(tokens, torch.long, self.device)[None],
            position_ids=staged(positions, torch.long, self.device)[None],
            use_cache=False,
            logits_to_keep=rows,
        ).logits[0]
        return logits

    @torch.inference_mode()
    def warm_up(self, scratch_block: int, max_tokens: int) -> None:
        """Compute prompts of several lengths, as far as the context goes, in a block that belongs to no sequence.

        So no request waits for code that is compiled at its first use. Raises EngineStartError when memory is too
        small.
        """
        try:
            for num_tokens in WARM_UP_TOKENS:
                count = min(num_tokens, max_tokens)
                blocks = [scratch_block] * self.layout.blocks_for(count)
                sequence = Sequence("warm-up", [0] * count, count, b"", SamplingParams(1), 0, 0, blocks=blocks)
                self.logits([Chunk(sequence, 0, count)])
        except torch.cuda.OutOfMemoryError as error:
            raise EngineStartError("kv_memory_mib", f"leaves the GPU too little memory to compute: {error}") from error

    def _forward_all(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits of every token, [tokens, vocab].

        The caller has prepared the attention for these tokens.
        """
        logits: Tensor = self.model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0]
        return logits
