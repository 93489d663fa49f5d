"""A runner that computes nothing and yet cannot be fooled: each sampled token is a hash of all KV bytes read.

The KV of position p is a 64-bit state chained over the tokens before it, repeated through the slot. Sampling
reads every slot of the sequence back from the pool, so a block that is wrong, stale, misplaced or missing gives
another token.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.layout import KvLayout
from engine.model_dir import ModelDir
from engine.runner import ModelInfo, Runner
from engine.vocabulary import Chunk, Sampled, TokenLogprobs
from kvtransfer.transport import Pool

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def chain(state: int, token_id: int) -> int:
    """The state after one more token."""
    mixed = ((state ^ (token_id + 1)) * _MULTIPLIER) & _MASK
    return mixed ^ (mixed >> 29)


def token_of(states: NDArray[np.uint64], vocab_size: int) -> int:
    """The token sampled from the KV words of a whole sequence, [kv_heads, positions, words]."""
    weights = np.arange(1, 2 * states.shape[1], 2, dtype=np.uint64)[None, :, None]
    folded = int((states * weights).sum(dtype=np.uint64))
    return chain(0, folded) % vocab_size


def choice_token(token: int, choice: int, vocab_size: int) -> int:
    """What a choice samples where the first of its request would sample `token`."""
    return (token + choice * (1 + token % 7)) % vocab_size


def likeliest(token: int, count: int, vocab_size: int) -> TokenLogprobs:
    """The `count` likeliest tokens of beam search, where `token` would be sampled: never two the same."""
    count = min(count, vocab_size)
    token_ids = tuple((token + rank) % vocab_size for rank in range(count))
    first, step = token * 0.618034 % 1, 0.05 + token * 0.754878 % 0.3  # no two tokens have the same
    logprobs = tuple(-first - rank * step for rank in range(count))
    return TokenLogprobs(logprobs[0], token_ids, logprobs)


def prompt_logprob(token: int) -> float:
    """Of a prompt token that follows those from which `token` would be sampled."""
    return -token / 64


class SimRunner(Runner):
    """Deterministic by its inputs. `weights_fingerprint` stands for the weights: other ones, other KV."""

    pool: Pool

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        vocab_size: int = 1000,
        max_context_tokens: int = 1 << 20,
        weights_fingerprint: bytes = b"sim",
        step_s: float = 0.0,
    ) -> None:
        assert layout.head_bytes % (8 * layout.block_tokens) == 0
        self.layout = layout
        self.info = ModelInfo(weights_fingerprint, vocab_size, max_context_tokens, eos_token_ids=frozenset())
        self.pool = Pool(np.zeros((num_blocks, layout.block_bytes), np.uint8))
        self._step_s = step_s
        self._root = int.from_bytes(layout.fingerprint(weights_fingerprint)[:8], "little")

    def execute(self, batch: Sequence[Chunk]) -> list[Sampled]:
        if self._step_s:
            time.sleep(self._step_s)
        for chunk in batch:
            self._write(chunk)
        return [self._answer(chunk) for chunk in batch if chunk.answers]

    def _words(self) -> NDArray[np.uint64]:
        """The pool as [num_blocks, kv_heads, block_tokens, words of a slot]."""
        shape = (
            -1,
            self.layout.kv_heads,
            self.layout.block_tokens,
            self.layout.head_bytes // 8 // self.layout.block_tokens,
        )
        return self.pool.memory.view(np.uint64).reshape(shape)

    def _write(self, chunk: Chunk) -> None:
        words, width = self._words(), self.layout.block_tokens
        sequence, state = chunk.sequence, self._root
        if chunk.start:
            previous = chunk.start - 1
            state = int(words[sequence.blocks[previous // width], 0, previous % width, 0])
        for position in range(chunk.start, chunk.start + chunk.count):
            state = chain(state, sequence.token_ids[position])
            words[sequence.blocks[position // width], :, position % width] = state

    def _answer(self, chunk: Chunk) -> Sampled:
        prompt = tuple(TokenLogprobs(prompt_logprob(self._sample(chunk, p + 1)), (), ()) for p in chunk.scored)
        if not chunk.samples:
            return Sampled(-1, prompt=prompt)
        token, sampling = self._sample(chunk, chunk.start + chunk.count), chunk.sequence.sampling
        assert sampling is not None
        if sampling.beam is not None:
            return Sampled(token, likeliest(token, sampling.logprobs or 1, self.info.vocab_size), prompt=prompt)
        return Sampled(choice_token(token, chunk.sequence.choice, self.info.vocab_size), prompt=prompt)

    def _sample(self, chunk: Chunk, end: int) -> int:
        """From the sequence's first `end` tokens."""
        blocks = chunk.sequence.blocks[: self.layout.blocks_for(end)]
        slots = self._words()[blocks].swapaxes(0, 1)  # [kv_heads, blocks, block_tokens, words]
        flat = slots.reshape(self.layout.kv_heads, -1, slots.shape[-1])
        return token_of(flat[:, :end], self.info.vocab_size)


def sim_runner(
    model_path: Path, block_tokens: int, kv_bytes: int, step_s: float = 0.0, block_kib: int = 2
) -> SimRunner:
    """A runner that stands for the model in a directory: its vocabulary, context and weights' fingerprint. 16 tokens
    have `block_kib` of KV."""
    model_dir = ModelDir.open(model_path)
    layout = KvLayout(layers=2, kv_heads=2, head_dim=2 * block_kib, block_tokens=block_tokens, dtype="float32")
    return SimRunner(
        layout,
        num_blocks=max(1, kv_bytes // layout.block_bytes),
        vocab_size=model_dir.vocab_size,
        max_context_tokens=model_dir.max_context_tokens,
        weights_fingerprint=model_dir.config_fingerprint(),
        step_s=step_s,
    )
