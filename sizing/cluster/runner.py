"""Model runner whose blocks have no memory; a sampled token only says whose it is."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core_types import Chunk, SampleResult
from engine.core_types import EngineSequence as Chain
from engine.model_runner import ModelInfo, ModelRunner
from kvcache.layout import KvLayout
from kvtransfer.transport import DevicePool

FIRST_OUTPUT_TOKEN = 1 << 31
"""First output token; prompts' tokens are below. Seeds are added, so no two requests generate the same tokens."""

NO_BYTES: NDArray[np.uint8] = np.empty(0, np.uint8)
UNLIMITED_CONTEXT = 1 << 31
"""Context of a model that does not state one."""


def output_token(seed: int) -> int:
    """Return the token that a request of this seed always samples."""
    return FIRST_OUTPUT_TOKEN + seed % FIRST_OUTPUT_TOKEN


def token_of(sequence: Chain) -> int:
    """Return the token that a request's sequence always samples."""
    assert sequence.sampling is not None
    return output_token(sequence.sampling.seed)


class BytelessRunner(ModelRunner):
    """Runner whose blocks all have one fingerprint, being empty; the `sim` backend really verifies."""

    def __init__(self, layout: KvLayout, num_blocks: int, max_context_tokens: int = UNLIMITED_CONTEXT) -> None:
        self.layout = layout
        self.info = ModelInfo(b"simulated", 1 << 32, max_context_tokens, eos_token_ids=frozenset())
        self.pool = DevicePool(address=0, num_blocks=num_blocks, block_bytes=layout.block_bytes, device=0)
        self._sampled: dict[int, SampleResult] = {}

    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        """Return results at once; the caller models the time."""
        return [self._sample(chunk) for chunk in batch if chunk.answers]

    def copy_block(self, source: int, target: int) -> None:
        """Do nothing; blocks are empty."""

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        return [NO_BYTES] * len(blocks)

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Do nothing; blocks are empty."""

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
