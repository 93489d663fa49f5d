"""The torch engine: a transformers model over a paged KV pool."""

from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import EngineStartError
from engine.grammar import Grammars
from engine.model_dir import ModelDir
from engine.runner import ModelInfo, Runner
from engine.torch.backends import Backend, join
from engine.torch.block_bytes import BlockBytes
from engine.torch.cuda.graphs import decode_graphs
from engine.torch.device import Device, allocate, choose_device, staged
from engine.torch.fingerprint import TensorFingerprints
from engine.torch.loader import kv_layout, load_model, use_attention
from engine.torch.sampler import sample
from engine.torch.scoring import PromptScorer, scored_rows, wants_scores
from engine.vocabulary import Chunk, Sampled


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model that was made rather than loaded, where it shall compute. It serves no structured output."""

    model: torch.nn.Module
    info: ModelInfo


class TorchRunner(Runner):
    """One model on one device. Raises EngineStartError (or ModelRefused) when it cannot serve."""

    def __init__(
        self,
        source: Path | BuiltModel,
        dtype: str,
        block_tokens: int,
        kv_bytes: int,
        backend: Backend = "auto",
        device: Device = "auto",
    ) -> None:
        """`source` is a model directory; of a built model `dtype` is what it has."""
        self.device = choose_device(device)
        self._grammars: Grammars | None = None
        if isinstance(source, BuiltModel):
            self._model = source.model
            self.layout = kv_layout(self._model, block_tokens)
            self.info = source.info
        else:
            model_dir = ModelDir.open(source)
            self._model = load_model(model_dir, dtype, self.device)
            self.layout = kv_layout(self._model, block_tokens)
            self.info = _info_of(model_dir)
            self._grammars = Grammars(model_dir)
        num_blocks = kv_bytes // self.layout.block_bytes
        if num_blocks < 1:
            raise EngineStartError("kv_memory_mib", f"less than one KV block of {self.layout.block_bytes} bytes")
        memory = allocate(self.layout, num_blocks, self.device)
        self.pool = memory.pool
        self._blocks = memory.byte_blocks
        self._device_fingerprints = TensorFingerprints(self._blocks, self.layout.kv_heads) if self._on_gpu else None
        self._device_bytes = BlockBytes(self._blocks) if self._on_gpu else None
        joined = join(self._model, memory.tensor, self.layout, backend)
        self.backend, self._attention = joined.backend, joined.attention
        self._argmax, self._last_rows, self._bind_threads = joined.argmax, joined.last_rows, joined.bind_threads
        use_attention(self._model, self._attention)
        self._scorer = PromptScorer(self._model, self.info.vocab_size)
        self._graphs = decode_graphs(self._attention, self.layout, self._forward_all, memory, self.info)

    def bind(self, own_cores: Seq[int], shared_cores: Seq[int]) -> None:
        """Cores of others only for the kernels, which give work to threads as they become free: torch's operators
        deal it out in equal parts, and would wait for the thread that gets the least of its core."""
        if self._bind_threads is None or not own_cores:
            return
        cores = [*own_cores, *shared_cores]
        torch.set_num_threads(len(cores))  # of teams that this thread begins
        self._bind_threads(cores)

    @torch.inference_mode()
    def execute(self, batch: Seq[Chunk]) -> list[Sampled]:
        scores = wants_scores(batch)
        with self._scorer.keeping() if scores else nullcontext():
            logits = self.logits(batch)
        sampling = [chunk.sequence for chunk in batch if chunk.samples]
        sampled = sample(logits, sampling, self.info.eos_token_ids, self._grammars, self._argmax) if sampling else []
        if scores:
            sampled = self._scorer.score(batch, sampled)
        if self._on_gpu:  # a step that samples nothing is still computing
            torch.cuda.current_stream(self.device).synchronize()
        return sampled

    @torch.inference_mode()
    def logits(self, batch: Seq[Chunk]) -> torch.Tensor:
        """Compute the chunks; the logits of the last token of each that is sampled from, [sampled, vocab]."""
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        wanted: list[int] = []
        for chunk in batch:
            wanted += scored_rows(chunk, len(tokens))
            end = chunk.start + chunk.count
            tokens += chunk.sequence.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
            if chunk.samples:
                last_rows.append(len(tokens) - 1)
                wanted.append(len(tokens) - 1)
        scores = len(wanted) > len(last_rows)
        if self._graphs is not None and self._graphs.takes(batch) and not scores:
            every = self._graphs.logits(batch)
            return every if len(last_rows) == len(tokens) else every[staged(last_rows, torch.long, self.device)]
        rows = staged(last_rows, torch.long, self.device)
        self._attention.prepare(batch)
        if self._last_rows is not None:
            self._last_rows.rows = staged(wanted, torch.long, self.device) if scores else rows
        logits: torch.Tensor = self._model(
            input_ids=staged(tokens, torch.long, self.device)[None],
            position_ids=staged(positions, torch.long, self.device)[None],
            use_cache=False,
            logits_to_keep=rows,
        ).logits[0]
        return logits

    def fingerprints(self, blocks: Seq[int]) -> NDArray[np.uint64]:
        if self._device_fingerprints is None:
            return super().fingerprints(blocks)
        return self._device_fingerprints.of(blocks)

    def read_blocks(self, blocks: Seq[int]) -> Seq[NDArray[np.uint8]]:
        return super().read_blocks(blocks) if self._device_bytes is None else self._device_bytes.read(blocks)

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        if self._device_bytes is None:
            super().write_block(block, content)
        else:
            self._device_bytes.write(block, content)

    def copy_block(self, source: int, target: int) -> None:
        self._blocks[target] = self._blocks[source]

    def _forward_all(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits of every token: [tokens, vocab]. The attention is prepared for them."""
        logits: torch.Tensor = self._model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0]
        return logits

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"


def _info_of(model_dir: ModelDir) -> ModelInfo:
    return ModelInfo(
        weights_fingerprint=model_dir.weights_fingerprint(),
        vocab_size=model_dir.vocab_size,
        max_context_tokens=model_dir.max_context_tokens,
        eos_token_ids=model_dir.eos_token_ids,
    )


def set_threads(threads: int) -> None:
    """Compute threads of this process."""
    torch.set_num_threads(threads)
