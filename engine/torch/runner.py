"""The torch engine: a transformers model over a paged KV pool."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from engine.errors import EngineStartError, KernelsUnavailable
from engine.grammar import Grammars
from engine.model_dir import ModelDir
from engine.runner import ModelInfo, Runner
from engine.torch.attention import PagedAttention
from engine.torch.loader import kv_layout, load_model, use_attention
from engine.torch.memory import huge_tensor
from engine.torch.native.attention import NativePagedAttention
from engine.torch.native.kernels import TYPES, Kernels
from engine.torch.native.modules import LastRows, use_kernels
from engine.torch.sampler import sample
from engine.torch.sdpa import SdpaPagedAttention
from engine.vocabulary import Chunk, Sampled
from kvtransfer.transport import Pool

log = logging.getLogger(__name__)

Backend = Literal["auto", "native", "sdpa"]


class TorchRunner(Runner):
    """One model on the CPU. Raises EngineStartError (or ModelRefused) when it cannot serve."""

    def __init__(
        self, model_path: Path, dtype: str, block_tokens: int, kv_bytes: int, backend: Backend = "auto"
    ) -> None:
        model_dir = ModelDir.open(model_path)
        self._model = load_model(model_dir, dtype)
        self.layout = kv_layout(self._model, block_tokens)
        self.info = ModelInfo(
            weights_fingerprint=model_dir.weights_fingerprint(),
            vocab_size=model_dir.vocab_size,
            max_context_tokens=model_dir.max_context_tokens,
            eos_token_ids=model_dir.eos_token_ids,
        )
        num_blocks = kv_bytes // self.layout.block_bytes
        if num_blocks < 1:
            raise EngineStartError("kv_memory_mib", f"less than one KV block of {self.layout.block_bytes} bytes")
        layout = self.layout
        shape = (num_blocks, layout.kv_heads, layout.layers, 2, layout.block_tokens, layout.head_dim)
        memory = huge_tensor(num_blocks * layout.block_bytes)
        bytes_view: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = memory.view(num_blocks, -1).numpy()
        self.pool = Pool(bytes_view, owner=memory)
        self._last_rows: LastRows | None = None
        self._attention = self._join(memory.view(getattr(torch, layout.dtype)).view(shape), backend)
        use_attention(self._model, self._attention)
        self._grammars = Grammars(model_dir)

    @torch.inference_mode()
    def execute(self, batch: Seq[Chunk]) -> list[Sampled]:
        logits = self.logits(batch)
        sampling = [chunk.sequence for chunk in batch if chunk.samples]
        return sample(logits, sampling, self.info.eos_token_ids, self._grammars, self._argmax) if sampling else []

    @torch.inference_mode()
    def logits(self, batch: Seq[Chunk]) -> torch.Tensor:
        """Compute the chunks; the logits of the last token of each that is sampled from, [sampled, vocab]."""
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for chunk in batch:
            end = chunk.start + chunk.count
            tokens += chunk.sequence.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
            if chunk.samples:
                last_rows.append(len(tokens) - 1)
        rows = torch.tensor(last_rows, dtype=torch.long)
        self._attention.prepare(batch)
        if self._last_rows is not None:
            self._last_rows.rows = rows
        logits: torch.Tensor = self._model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=rows,
        ).logits[0]
        return logits

    def _join(self, pool: torch.Tensor, backend: Backend) -> PagedAttention:
        """Join the model to its pool, by the CPU kernels unless they cannot be had. Raises KernelsUnavailable when
        they were asked for by name."""
        self.backend: Backend = "sdpa"
        self._argmax: Callable[[torch.Tensor], torch.Tensor] = partial(torch.argmax, dim=-1)
        if backend == "sdpa":
            return SdpaPagedAttention(pool, self.layout)
        try:
            if pool.dtype not in TYPES:
                raise KernelsUnavailable(f"there are no CPU kernels for {self.layout.dtype}")
            kernels = Kernels()
        except KernelsUnavailable as error:
            if backend == "native":
                raise
            log.warning("the CPU kernels are not used, expect several times slower steps: %s", error)
            return SdpaPagedAttention(pool, self.layout)
        heads = self._model.config.get_text_config().num_attention_heads  # type: ignore[union-attr,operator]
        self.backend = "native"
        self._argmax = kernels.argmax
        attention = NativePagedAttention(kernels, pool, self.layout, heads)
        self._last_rows = use_kernels(self._model, kernels).last_rows
        if self._last_rows is not None:
            attention.trim_last_layer()
        return attention


def set_threads(threads: int) -> None:
    """Compute threads of this process."""
    torch.set_num_threads(threads)
