"""A runner whose blocks have no memory: what it samples says only whose token it is."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.core_types import Chunk, SampleResult
from engine.core.core_types import Sequence as Chain
from engine.core.model_runner import ModelInfo, ModelRunner
from engine.kv.layout import KvLayout
from kvtransfer.transport import DevicePool

FIRST_OUTPUT_TOKEN = 1 << 31
"""Tokens of prompts are below. A request's own are this and its seed, so that no two requests generate the same."""

UNLIMITED_CONTEXT = 1 << 31
"""Of a model that does not say how long its context is."""


def output_token(seed: int) -> int:
    """What a request of this seed samples, always."""
    return FIRST_OUTPUT_TOKEN + seed % FIRST_OUTPUT_TOKEN


def token_of(sequence: Chain) -> int:
    """What a sequence of a request samples, always."""
    assert sequence.sampling is not None
    return output_token(sequence.sampling.seed)


class BytelessRunner(ModelRunner):
    """All blocks have the same fingerprint, there being nothing in them: a real check is that of the `sim` engine."""

    def __init__(self, layout: KvLayout, num_blocks: int, max_context_tokens: int = UNLIMITED_CONTEXT) -> None:
        self.layout = layout
        self.info = ModelInfo(b"simulated", 1 << 32, max_context_tokens, eos_token_ids=frozenset())
        self.pool = DevicePool(address=0, num_blocks=num_blocks, block_bytes=layout.block_bytes, device=0)
        self._sampled: dict[int, SampleResult] = {}

    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        """At once; how long it is to take is the caller's affair."""
        return [self._sample(chunk) for chunk in batch if chunk.answers]

    def copy_block(self, source: int, target: int) -> None:
        """There is nothing to copy."""

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        return np.zeros((len(blocks), self.layout.kv_heads), np.uint64)

    def _sample(self, chunk: Chunk) -> SampleResult:
        sampling = chunk.sequence.sampling
        assert sampling is not None
        if (sampled := self._sampled.get(sampling.seed)) is None:
            if len(self._sampled) > 4096:
                self._sampled.clear()
            sampled = self._sampled[sampling.seed] = SampleResult(output_token(sampling.seed))
        return sampled
