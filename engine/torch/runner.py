"""The torch engine: a transformers model over a paged KV pool."""

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch

from engine.errors import EngineStartError
from engine.model_dir import ModelDir
from engine.runner import ModelInfo, Runner
from engine.torch.attention import PagedBatch
from engine.torch.loader import kv_layout, load_model, paged_attention
from engine.torch.sampler import sample
from engine.vocabulary import Chunk, Sampled, Sequence
from kvtransfer.transport import Pool


class TorchRunner(Runner):
    """One model on the CPU. Raises EngineStartError (or ModelRefused) when it cannot serve."""

    def __init__(self, model_path: Path, dtype: str, block_tokens: int, kv_bytes: int) -> None:
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
        pool = torch.zeros(shape, dtype=getattr(torch, layout.dtype))
        memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = pool.view(torch.uint8).reshape(num_blocks, -1).numpy()
        self.pool = Pool(memory, owner=pool)
        self._attention = paged_attention(self._model, pool, layout)

    @torch.inference_mode()
    def execute(self, batch: Seq[Chunk]) -> list[Sampled]:
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        sampling: list[Sequence] = []
        for chunk in batch:
            end = chunk.start + chunk.count
            tokens += chunk.sequence.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
            if chunk.samples:
                last_rows.append(len(tokens) - 1)
                sampling.append(chunk.sequence)
        self._attention.batch = PagedBatch.of(self.layout, batch)
        logits = self._model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.tensor(last_rows, dtype=torch.long),
        ).logits[0]
        return sample(logits, sampling, self.info.eos_token_ids) if sampling else []


def set_threads(threads: int) -> None:
    """Compute threads of this process."""
    torch.set_num_threads(threads)
