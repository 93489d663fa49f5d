"""Model joined to its paged KV memory: chunks in, logits out."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.backends.torch.attention import use_attention
from engine.backends.torch.backends import Backend, join
from engine.backends.torch.memory import populate
from engine.backends.torch.sampling.scoring import scored_rows
from engine.core_types import Chunk
from engine.host.memory import pool_memory
from kvcache.layout import KvLayout


class PagedModel:
    """Model over `num_blocks` KV blocks of its own."""

    def __init__(
        self, model: torch.nn.Module, layout: KvLayout, num_blocks: int, backend: Backend, in_file: bool = False
    ) -> None:
        """Join `model` to a new pool of zeros.

        `in_file`: see `pool_memory`. Raises EngineStartError.
        """
        self.model = model
        self.num_blocks = num_blocks
        self._computing = False
        self.pool = pool_memory(num_blocks, layout.block_bytes, in_file)
        self.blocks = torch.from_numpy(self.pool.memory)
        """Pool as uint8 [num_blocks, block_bytes]."""
        shape = (num_blocks, layout.kv_heads, layout.layers, 2, layout.block_tokens, layout.head_dim)
        joined = join(model, self.blocks.view(getattr(torch, layout.dtype)).view(shape), layout, backend)
        self.backend, self._attention = joined.backend, joined.attention
        self.argmax, self._last_rows = joined.argmax, joined.last_rows
        self.bind_threads: Callable[[Sequence[int]], None] | None = joined.bind_threads
        # by now the memory that the weights were read from is free: both at once would be a peak
        populate(self.blocks, lambda: self._computing)
        # transformers keeps what is registered for ever, so it gets no reference that keeps the pool
        use_attention(model, weakref.proxy(self._attention))

    def logits(self, batch: Sequence[Chunk]) -> Tensor:
        """Compute the chunks and return logits [chunks that sample, vocab], in order."""
        self._computing = True
        try:
            return self._logits(batch)
        finally:
            self._computing = False

    def _logits(self, batch: Sequence[Chunk]) -> Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        wanted: list[int] = []
        for chunk in batch:
            wanted += scored_rows(chunk, len(tokens))
            tokens += chunk.token_ids
            positions += range(chunk.start, chunk.end)
            if chunk.samples:
                last_rows.append(len(tokens) - 1)
                wanted.append(len(tokens) - 1)
        rows = torch.tensor(last_rows, dtype=torch.long)
        self._attention.prepare(batch)
        if self._last_rows is not None:
            scores = len(wanted) > len(last_rows)
            self._last_rows.rows = torch.tensor(wanted, dtype=torch.long) if scores else rows
        logits: Tensor = self.model(
            input_ids=torch.tensor(tokens, dtype=torch.long)[None],
            position_ids=torch.tensor(positions, dtype=torch.long)[None],
            use_cache=False,
            logits_to_keep=rows,
        ).logits[0]
        return logits
