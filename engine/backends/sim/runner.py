"""Model runner of the sim backend: computes nothing, and each sampled token is a hash of all KV bytes read.

Sampling reads every slot of the sequence from the pool, so a wrong, stale, misplaced or missing block gives another
token. With thousands of long sequences it may read the last slot only, which depends on all before it.
"""

import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.backends.sim.states import (
    choice_token,
    hidden_states,
    prompt_logprob,
    state_after,
    states_of,
    token_of,
    token_of_all,
    tokens_seen,
)
from engine.backends.sim.timing import AT_ONCE, StepTiming
from engine.core_types import Chunk, SampleResult, TokenLogprobs
from engine.host.memory import pool_memory
from engine.model.embedding import is_embedding_model
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelInfo, ModelRunner
from kvcache.layout import KvLayout
from kvtransfer.transport import Pool

LARGE_BYTES = 64 << 20
"""Pool size from which huge pages are used, as in other backends. Smaller pools are many per process and hardly used.
"""


class SimRunner(ModelRunner):
    """Runner whose results depend on its inputs only.

    Another `weights_fingerprint` gives other KV.
    """

    pool: Pool

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        vocab_size: int = 1000,
        max_context_tokens: int = 1 << 20,
        weights_fingerprint: bytes = b"sim",
        timing: StepTiming = AT_ONCE,
        reads_all: bool = True,
        pool_in_file: bool = False,
        hidden_size: int = 64,
    ) -> None:
        assert layout.head_bytes % (8 * layout.block_tokens) == 0
        self.layout = layout
        self.info = ModelInfo(
            weights_fingerprint, vocab_size, max_context_tokens, eos_token_ids=frozenset(), reads_media=True
        )
        self.pool = _pool(num_blocks, layout.block_bytes, pool_in_file)
        self.timing = timing
        self._reads_all = reads_all
        self._hidden_size = hidden_size
        self._root = int.from_bytes(layout.fingerprint(weights_fingerprint)[:8], "little")
        slot_words = layout.head_bytes // 8 // layout.block_tokens
        shape = (-1, layout.kv_heads, layout.block_tokens, slot_words)
        self._words: NDArray[np.uint64] = self.pool.memory.view(np.uint64).reshape(shape)

    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        """Compute the batch; takes as long as `timing` says."""
        if seconds := self.timing.seconds(batch):
            time.sleep(seconds)
        return self.compute(batch)

    def compute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        """Compute the batch as `execute` does, at once."""
        for chunk in batch:
            self._write(chunk)
        return [self._answer(chunk) for chunk in batch if chunk.answers]

    def _write(self, chunk: Chunk) -> None:
        width, sequence, start = self.layout.block_tokens, chunk.sequence, chunk.start
        before = self._root ^ int.from_bytes(sequence.adapter[:8], "little")
        if start:
            before = int(self._words[sequence.blocks[(start - 1) // width], 0, (start - 1) % width, 0])
        if chunk.count == 1:  # the common case
            token_id = sequence.token_ids[start]
            if sequence.items:
                (token_id,) = tokens_seen(sequence.items, [token_id], start)
            state = state_after(before, token_id, start)
            self._words[sequence.blocks[start // width], :, start % width] = state
            return
        token_ids = tokens_seen(sequence.items, chunk.token_ids, start) if sequence.items else chunk.token_ids
        states = states_of(before, token_ids, start)
        first, end = start // width, chunk.end
        blocks = np.array(sequence.blocks[first : (end - 1) // width + 1])
        positions = np.arange(start, end)
        self._words[blocks[positions // width - first], :, positions % width] = states[:, None, None]

    def _answer(self, chunk: Chunk) -> SampleResult:
        prompt: tuple[TokenLogprobs, ...] = ()
        if chunk.pools:
            hidden = hidden_states(self._states(chunk, chunk.scored), self._hidden_size)
            total = hidden.sum(0, dtype=np.float32)
            return SampleResult(-1, pooled=total.tobytes(), num_pooled=len(chunk.scored))
        if scored := chunk.scored:
            prompt = tuple(TokenLogprobs(prompt_logprob(self._sample(chunk, p + 1)), (), ()) for p in scored)
        if not chunk.samples:
            return SampleResult(-1, prompt=prompt)
        token, sampling = self._sample(chunk, chunk.end), chunk.sequence.sampling
        assert sampling is not None
        return SampleResult(choice_token(token, chunk.sequence.choice, self.info.vocab_size), prompt=prompt)

    def _states(self, chunk: Chunk, positions: range) -> NDArray[np.uint64]:
        """Return the states of some positions, [len(positions)], as the pool holds them."""
        width, places = self.layout.block_tokens, np.array(positions)
        blocks = np.array(chunk.sequence.blocks)[places // width]
        states: NDArray[np.uint64] = self._words[blocks, 0, places % width, 0]
        return states

    def _sample(self, chunk: Chunk, end: int) -> int:
        """Return the token after the sequence's first `end` tokens."""
        if not self._reads_all:
            block, slot = divmod(end - 1, self.layout.block_tokens)
            last = self._words[chunk.sequence.blocks[block], :, slot]
            return token_of(int(last.sum(dtype=np.uint64)), self.info.vocab_size)
        blocks = chunk.sequence.blocks[: self.layout.blocks_for(end)]
        slots = self._words[blocks].swapaxes(0, 1)  # [kv_heads, blocks, block_tokens, words]
        flat = slots.reshape(self.layout.kv_heads, -1, slots.shape[-1])
        return token_of_all(flat[:, :end], self.info.vocab_size)


def sim_runner(
    model_path: Path,
    block_tokens: int,
    kv_bytes: int,
    timing: StepTiming = AT_ONCE,
    block_kib: int = 2,
    reads_all: bool = True,
    pool_in_file: bool = False,
) -> SimRunner:
    """Create a runner with the vocabulary, context and weights fingerprint of a model directory.

    16 tokens have `block_kib` KiB of KV.
    """
    model_dir = ModelDir.open(model_path)
    layout = KvLayout(layers=2, kv_heads=2, head_dim=2 * block_kib, block_tokens=block_tokens, dtype="float32")
    return SimRunner(
        layout,
        num_blocks=max(1, kv_bytes // layout.block_bytes),
        vocab_size=model_dir.vocab_size,
        max_context_tokens=model_dir.max_context_tokens,
        weights_fingerprint=weights_of(model_dir),
        timing=timing,
        reads_all=reads_all,
        pool_in_file=pool_in_file,
        hidden_size=model_dir.hidden_size if is_embedding_model(model_dir) else 0,
    )


def weights_of(model_dir: ModelDir) -> bytes:
    """Return the fingerprint that stands for a model's weights: of its config, and names and sizes of its weight files.

    The files are not read: a model of hundreds of gigabytes can be simulated at once.
    """
    files = sorted(model_dir.path.glob("*.safetensors"))
    sizes = "".join(f"{file.name} {file.stat().st_size} " for file in files)
    return blake2b(model_dir.config_fingerprint() + sizes.encode(), digest_size=16).digest()


def _pool(num_blocks: int, block_bytes: int, in_file: bool) -> Pool:
    """Allocate zeroed pool memory."""
    if in_file or num_blocks * block_bytes >= LARGE_BYTES:
        return pool_memory(num_blocks, block_bytes, in_file)
    return Pool(np.zeros((num_blocks, block_bytes), np.uint8))
