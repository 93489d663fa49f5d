"""Torch model runner: a transformers model over a paged KV pool on the CPU, with the fastest attention backend."""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from engine.backends.torch.attention import PagedAttention, SdpaPagedAttention, use_attention
from engine.backends.torch.kv import DEFAULT_ROOM, KvRoom, automatic_kv_bytes
from engine.backends.torch.loader import kv_layout, load_model
from engine.backends.torch.memory import populate
from engine.backends.torch.native.decoder_layer import NativePagedAttention, use_native_layers
from engine.backends.torch.native.kernels import TYPES, Kernels, attention_part
from engine.backends.torch.native.modules import LastRows, use_kernels
from engine.backends.torch.sampling.sampler import LIKELIEST, sample
from engine.backends.torch.sampling.scoring import PromptScorer, scored_rows, wants_scores
from engine.core_types import Chunk, SampleResult
from engine.errors import EngineStartError, KernelsUnavailable
from engine.host.memory import pool_memory
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelInfo, ModelRunner
from engine.sampling.grammar import Grammars
from kvcache.layout import KvLayout

log = logging.getLogger(__name__)


Backend = Literal["auto", "native", "sdpa"]


@dataclass(frozen=True, slots=True)
class BoundModel:
    """Model joined to its KV memory, ready for a runner.

    Its modules may have been replaced.
    """

    backend: Backend
    """Attention backend in use, never auto."""
    attention: PagedAttention
    argmax: Callable[[Tensor], Tensor] = LIKELIEST
    last_rows: LastRows | None = None
    bind_threads: Callable[[Sequence[int]], None] | None = None
    """Function that pins the computing thread's team to one core each; None where pinning would not help."""


def join(model: nn.Module, pool: Tensor, layout: KvLayout, backend: Backend) -> BoundModel:
    """Join a model to its KV memory.

    auto means `native`, or `sdpa` with a warning where its kernels are missing.

    Raises KernelsUnavailable for missing kernels that were asked for by name.
    """
    if backend != "sdpa":
        try:
            return _native(model, pool, layout)
        except KernelsUnavailable as error:
            if backend == "native":
                raise
            log.warning("attention is computed by torch, expect several times slower steps: %s", error)
    return BoundModel("sdpa", SdpaPagedAttention(pool, layout))


def _native(model: nn.Module, pool: Tensor, layout: KvLayout) -> BoundModel:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if dtype not in TYPES:
        raise KernelsUnavailable(f"the CPU kernels do not support {layout.dtype}")
    kernels = Kernels(attention_part(dtype))
    heads: int = model.config.get_text_config().num_attention_heads  # type: ignore[union-attr,operator]
    attention = NativePagedAttention(kernels, pool, layout, heads)
    last_rows = use_kernels(model, kernels).last_rows
    if last_rows is not None:
        attention.trim_last_layer()
    use_native_layers(model, kernels, attention)
    return BoundModel("native", attention, kernels.argmax, last_rows, kernels.bind_threads)


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
