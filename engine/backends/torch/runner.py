"""Torch model runner: a transformers model over a paged KV pool."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.torch.backends import Backend
from engine.backends.torch.device import Device, choose_device, gpu_of
from engine.backends.torch.draft import DraftModel
from engine.backends.torch.kv.block_bytes import BlockBytes
from engine.backends.torch.kv.fingerprint import TensorFingerprints
from engine.backends.torch.kv.room import DEFAULT_ROOM, KvRoom, automatic_kv_bytes
from engine.backends.torch.loading.loader import kv_layout, load_model, whole_layout
from engine.backends.torch.paged_model import PagedModel
from engine.backends.torch.ranks import RankGroup
from engine.backends.torch.sampling.sampler import sample_chunks
from engine.backends.torch.sampling.scoring import PromptScorer, wants_scores
from engine.core_types import Chunk, SampleResult
from engine.errors import EngineStartError
from engine.kv.layout import KvLayout
from engine.model.model_dir import ModelDir
from engine.model.quantization import AS_SAVED, QuantizationConfig
from engine.model_runner import ModelInfo, ModelRunner, RankInfo
from engine.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """Model built by a caller instead of loaded, and its device.

    It serves no structured output.
    """

    model: torch.nn.Module
    info: ModelInfo


class TorchRunner(ModelRunner):
    """Runner of one model on one device."""

    def __init__(
        self,
        source: Path | BuiltModel,
        dtype: str,
        block_tokens: int,
        kv_bytes: int | None,
        backend: Backend = "auto",
        device: Device = "auto",
        draft: Path | None = None,
        quantization: QuantizationConfig = AS_SAVED,
        place: RankInfo | None = None,
        pool_in_file: bool = False,
        room: KvRoom = DEFAULT_ROOM,
    ) -> None:
        """Load or take the model and allocate its KV pool.

        `source` is a model directory or a built model, whose dtype is `dtype` and whose weights stay as they are.
        `draft` is the directory of a draft model. `place` makes this one of several tensor-parallel ranks, with its
        shard of the model and its part of each KV block; `kv_bytes` count all ranks together. None: what the weights
        and `room` leave. `pool_in_file`: see `belongs_in_file`.

        Raises EngineStartError, or ModelRefused, for a model that cannot be served.
        """
        self.device = choose_device(device, place.rank if place is not None else None)
        self.gpu = gpu_of(self.device)
        group = RankGroup(place, self.device) if place is not None else None
        self.grammars: Grammars | None = None
        model_dir: ModelDir | None = None
        if isinstance(source, BuiltModel):
            self._model = source.model
            self.layout = part = kv_layout(self._model, block_tokens, quantization.kv_dtype)
            self.info = source.info
        else:
            model_dir = ModelDir.open(source)
            self._model = load_model(model_dir, dtype, self.device, quantization, group)
            self.layout = part = kv_layout(self._model, block_tokens, quantization.kv_dtype)
            if group is not None:
                self.layout = whole_layout(self._model, part, group.size)
            samples = group is None or group.rank == 0
            self.info = _info_of(model_dir, quantization, known=samples)
            self.grammars = Grammars(model_dir) if samples else None
        self._part = part
        if kv_bytes is None:
            context = self.info.max_context_tokens
            kv_bytes = automatic_kv_bytes(self._model, self.device, room, context, draft is not None, group)
        num_blocks = kv_bytes // self.layout.block_bytes
        if num_blocks < 1:
            raise EngineStartError("kv_memory_mib", f"is less than one KV block of {self.layout.block_bytes} bytes")
        ranks = group.size if group is not None else 1
        paged = self.paged = PagedModel(
            self._model, part, self.info, num_blocks, backend, self.device, ranks, pool_in_file
        )
        self.pool, self.backend = paged.memory.pool, paged.backend
        self._blocks = paged.memory.byte_blocks
        self._device_fingerprints = TensorFingerprints(self._blocks, part.kv_heads) if self._on_gpu else None
        self._device_bytes = BlockBytes(self._blocks) if self._on_gpu else None
        self._scorer = PromptScorer(self._model, self.info.vocab_size)
        self._draft: DraftModel | None = None
        if draft is not None:
            self._draft = DraftModel(draft, dtype, paged, model_dir, self.info, quantization)

    def bind(self, own_cores: Seq[int], shared_cores: Seq[int]) -> None:
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

    @property
    def pool_layout(self) -> KvLayout:
        return self._part

    @property
    def draft_pass_s(self) -> float:
        return self._draft.pass_s if self._draft is not None else 0.0

    @torch.inference_mode()
    def execute(self, batch: Seq[Chunk]) -> list[SampleResult]:
        if self._draft is not None:
            batch = self._draft.draft_token(batch)
        scores = wants_scores(batch)
        with self._scorer.keeping_hidden_states() if scores else nullcontext():
            logits = self.logits(batch)
        sampling = [chunk for chunk in batch if chunk.samples]
        sampled: list[SampleResult] = []
        if sampling:
            sampled = sample_chunks(logits, sampling, self.info.eos_token_ids, self.grammars, self.paged.argmax)
        if scores:
            sampled = self._scorer.score(batch, sampled)
        if self._on_gpu:  # a step that samples nothing is still computing
            torch.cuda.current_stream(self.device).synchronize()
        return sampled

    @torch.inference_mode()
    def follow(self, batch: Seq[Chunk]) -> None:
        """Compute the batch on a rank that does not sample.

        Its part of the logits is not read.
        """
        scores = wants_scores(batch)
        with self._scorer.keeping_hidden_states() if scores else nullcontext():
            self.logits(batch)
        if scores:
            self._scorer.follow(batch)
        if self._on_gpu:
            torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def logits(self, batch: Seq[Chunk]) -> torch.Tensor:
        """Compute the chunks and return logits [places, vocab]: every place of the chunks that sample, in order."""
        return self.paged.logits(batch)

    def fingerprints(self, blocks: Seq[int]) -> NDArray[np.uint64]:
        """Return the blocks' fingerprints; one of several ranks returns those of its part."""
        if self._device_fingerprints is None:
            return super().fingerprints(blocks)
        return self._device_fingerprints.of(blocks)

    def read_blocks(self, blocks: Seq[int]) -> Iterable[NDArray[np.uint8]]:
        return super().read_blocks(blocks) if self._device_bytes is None else self._device_bytes.read(blocks)

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        if self._device_bytes is None:
            super().write_block(block, content)
        else:
            self._device_bytes.write(block, content)

    def copy_block(self, source: int, target: int) -> None:
        self._blocks[target] = self._blocks[source]

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"


def _info_of(model_dir: ModelDir, quantization: QuantizationConfig, known: bool) -> ModelInfo:
    """Read the model's description; with `known` also the weights' fingerprint, which takes reading all weights."""
    return ModelInfo(
        weights_fingerprint=quantization.fingerprint(model_dir.weights_fingerprint()) if known else b"",
        vocab_size=model_dir.vocab_size,
        max_context_tokens=model_dir.max_context_tokens,
        eos_token_ids=model_dir.eos_token_ids,
    )


def set_threads(threads: int) -> None:
    """Set the number of compute threads of this process."""
    torch.set_num_threads(threads)
