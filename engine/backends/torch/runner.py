"""Torch model runner: a transformers model over a paged KV pool, on the CPU."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from engine.backends.torch.backends import Backend
from engine.backends.torch.kv.room import DEFAULT_ROOM, KvRoom, automatic_kv_bytes
from engine.backends.torch.loading.loader import kv_layout, load_model
from engine.backends.torch.paged_model import PagedModel
from engine.backends.torch.sampling.sampler import sample
from engine.backends.torch.sampling.scoring import PromptScorer, wants_scores
from engine.core_types import Chunk, SampleResult
from engine.errors import EngineStartError
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelInfo, ModelRunner
from engine.sampling.grammar import Grammars


class TorchRunner(ModelRunner):
    """Runner of one model."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        block_tokens: int,
        kv_bytes: int | None,
        backend: Backend = "auto",
        pool_in_file: bool = False,
        room: KvRoom = DEFAULT_ROOM,
    ) -> None:
        """Load the model of a directory and allocate its KV pool.

        `kv_bytes` None: what the weights and `room` leave. `pool_in_file`: see `belongs_in_file`.

        Raises EngineStartError, or ModelRefused, for a model that cannot be served.
        """
        model_dir = ModelDir.open(path)
        model = load_model(model_dir, dtype)
        self.layout = kv_layout(model, block_tokens)
        self.info = _info_of(model_dir)
        self.grammars: Grammars | None = Grammars(model_dir)
        if kv_bytes is None:
            kv_bytes = automatic_kv_bytes(model, room, self.info.max_context_tokens)
        num_blocks = kv_bytes // self.layout.block_bytes
        if num_blocks < 1:
            raise EngineStartError("kv_memory_mib", f"is less than one KV block of {self.layout.block_bytes} bytes")
        self.paged = PagedModel(model, self.layout, num_blocks, backend, pool_in_file)
        self.pool, self.backend = self.paged.pool, self.paged.backend
        self._scorer = PromptScorer(model, self.info.vocab_size)

    def bind(self, own_cores: Sequence[int], shared_cores: Sequence[int]) -> None:
        """Bind the kernels to all given cores, torch's operators to `own_cores`.

        The kernels hand out work to threads as they become free. torch's operators split work into equal parts, and
        would wait for the thread with the smallest share of a core.
        """
        if not own_cores:
            return
        if self.paged.bind_threads is None:
            torch.set_num_threads(len(own_cores))
            return
        cores = [*own_cores, *shared_cores]
        torch.set_num_threads(len(cores))  # size of the thread teams that this thread starts
        self.paged.bind_threads(cores)

    @torch.inference_mode()
    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        scores = wants_scores(batch)
        with self._scorer.keeping_hidden_states() if scores else nullcontext():
            logits = self.logits(batch)
        sampled: list[SampleResult] = []
        if sampling := [chunk.sequence for chunk in batch if chunk.samples]:
            sampled = sample(logits, sampling, self.info.eos_token_ids, self.grammars, self.paged.argmax)
        return self._scorer.score(batch, sampled) if scores else sampled

    @torch.inference_mode()
    def logits(self, batch: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks and return logits [chunks that sample, vocab], in order."""
        return self.paged.logits(batch)

    def copy_block(self, source: int, target: int) -> None:
        self.paged.blocks[target] = self.paged.blocks[source]


def _info_of(model_dir: ModelDir) -> ModelInfo:
    """Read the model's description, and the weights' fingerprint, which takes reading all weights."""
    return ModelInfo(
        weights_fingerprint=model_dir.weights_fingerprint(),
        vocab_size=model_dir.vocab_size,
        max_context_tokens=model_dir.max_context_tokens,
        eos_token_ids=model_dir.eos_token_ids,
    )


def set_threads(threads: int) -> None:
    """Set the number of compute threads of this process."""
    torch.set_num_threads(threads)
