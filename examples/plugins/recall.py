"""An engine that repeats: each new token is the one `LAG` positions before it, as the KV cache has it.

It has no weights. Its "keys and values" are the tokens themselves, so a wrong or missing block gives a wrong token.
"""

from collections.abc import Sequence

import numpy as np

from cluster.roles import Role
from engine.config import WorkerConfig
from engine.core_types import Chunk, SampleResult
from engine.errors import EngineStartError
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelInfo, ModelRunner
from kvcache.layout import KvLayout
from kvtransfer.transport import Pool

LAG = 8
DEFAULT_KV_BYTES = 16 << 20


class RecallRunner(ModelRunner):
    pool: Pool

    def __init__(self, model: ModelDir, block_tokens: int, kv_bytes: int) -> None:
        # One head of one layer; a token's key and value are 16 bytes, of which the first 8 hold the token.
        self.layout = KvLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=block_tokens, dtype="float32")
        self.info = ModelInfo(b"recall-1", model.vocab_size, model.max_context_tokens, frozenset())
        num_blocks = kv_bytes // self.layout.block_bytes
        if num_blocks < 2:
            raise EngineStartError("kv_memory_mib", f"{kv_bytes >> 20} MiB hold {num_blocks} blocks")
        self.pool = Pool(np.zeros((num_blocks, self.layout.block_bytes), np.uint8))
        self._slots = self.pool.memory.view(np.uint64).reshape(num_blocks, block_tokens, 2)

    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        """Write the KV of every chunk's tokens, then answer the chunks that want an answer, in order."""
        width = self.layout.block_tokens
        for chunk in batch:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                self._slots[chunk.sequence.blocks[position // width], position % width, 0] = token
        return [self._answer(chunk) for chunk in batch if chunk.answers]

    def _answer(self, chunk: Chunk) -> SampleResult:
        position = max(0, chunk.start + chunk.count - LAG)
        block, slot = divmod(position, self.layout.block_tokens)
        return SampleResult(int(self._slots[chunk.sequence.blocks[block], slot, 0]) if chunk.samples else -1)


def open_runner(config: WorkerConfig, role: Role) -> RecallRunner:
    """Open the engine; the entry point `recall` names this function."""
    return RecallRunner(ModelDir.open(config.model), config.block_tokens, config.kv_bytes or DEFAULT_KV_BYTES)
