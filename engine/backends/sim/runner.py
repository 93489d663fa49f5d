"""Model runner of the sim backend: computes nothing, and each sampled token is a hash of all KV bytes read.

Sampling reads every slot of the sequence from the pool, so a wrong, stale, misplaced or missing block gives another
token. With thousands of long sequences it may read the last slot only, which depends on all before it.

The sim backend's model: KV is a running sum over tokens and positions; tokens are hashes of KV.

The KV of position p is one 64-bit state, the sum of a hash of every token up to p with its position, repeated through
the slot. A sampled token is a hash of such states.
"""

import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.backends.sim.settings import AT_ONCE, StepTiming
from engine.core_types import Chunk, SampleResult, TokenLogprobs
from engine.host.memory import pool_memory
from engine.model.embedding import is_embedding_model
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelInfo, ModelRunner
from kvcache.items import Item
from kvcache.layout import KvLayout
from kvtransfer.transport import Pool

_OF_TOKENS, _OF_PLACES, _OF_BOTH = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD
_MASK = (1 << 64) - 1


def states_of(before: int, token_ids: Sequence[int], start: int) -> NDArray[np.uint64]:
    """Return the states of tokens at positions from `start` on, [len(token_ids)]; `before` is the preceding state."""
    tokens = np.array(token_ids, np.uint64)
    places = np.arange(start + 1, start + 1 + len(tokens), dtype=np.uint64)
    hashed = ((tokens + np.uint64(1)) * np.uint64(_OF_TOKENS)) ^ (places * np.uint64(_OF_PLACES))
    hashed ^= hashed >> np.uint64(29)
    hashed *= np.uint64(_OF_BOTH)
    hashed ^= hashed >> np.uint64(32)
    sums: NDArray[np.uint64] = hashed.cumsum(dtype=np.uint64) + np.uint64(before)
    return sums


def state_after(before: int, token_id: int, position: int) -> int:
    """Return the state after one more token."""
    hashed = (((token_id + 1) * _OF_TOKENS) ^ ((position + 1) * _OF_PLACES)) & _MASK
    hashed = ((hashed ^ (hashed >> 29)) * _OF_BOTH) & _MASK
    return (before + (hashed ^ (hashed >> 32))) & _MASK


def tokens_seen(items: Sequence[Item], token_ids: Sequence[int], start: int) -> list[int]:
    """Return the tokens at positions from `start` on, those of items replaced by hashes of content and place."""
    seen, end = list(token_ids), start + len(token_ids)
    for item in items:
        content = int.from_bytes(item.identifier[:7], "little")
        for position in range(max(item.offset, start), min(item.end, end)):
            seen[position - start] = (content + position - item.offset) & (_MASK >> 1)
    return seen


def token_of_all(words: NDArray[np.uint64], vocab_size: int) -> int:
    """Return the token sampled from the KV words of a whole sequence, [kv_heads, positions, words]."""
    weights = np.arange(1, 2 * words.shape[1], 2, dtype=np.uint64)
    return token_of(int(words.sum(axis=(0, 2), dtype=np.uint64) @ weights), vocab_size)


def token_of(folded: int, vocab_size: int) -> int:
    """Return the token of a sum over words, modulo 2**64."""
    mixed = ((folded ^ 1) * _OF_TOKENS) & _MASK
    return (mixed ^ (mixed >> 29)) % vocab_size


def choice_token(token: int, choice: int, vocab_size: int) -> int:
    """Return the token that `choice` samples where choice 0 would sample `token`."""
    return (token + choice * (1 + token % 7)) % vocab_size


def prompt_logprob(token: int) -> float:
    """Return the log probability of a prompt token where `token` would be sampled."""
    return -token / 64


def _odd(size: int) -> NDArray[np.uint64]:
    return np.arange(1, 2 * size, 2, dtype=np.uint64)


def hidden_states(states: NDArray[np.uint64], size: int) -> NDArray[np.float32]:
    """Return a hidden state for each state, [len(states), size], of values in [-1, 1)."""
    mixed: NDArray[np.uint64] = states[:, None] * _odd(size) * np.uint64(_OF_TOKENS)
    values: NDArray[np.float32] = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    return values


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
