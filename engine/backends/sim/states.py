"""The sim engine's model: KV that is a running sum over tokens and their places, and tokens that are hashes of KV read.

The KV of position p is one 64-bit state, a sum of a hash of every token up to p together with its place, repeated
through the slot. What a sequence samples is a hash of such states.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.core_types import TokenLogprobs

_OF_TOKENS, _OF_PLACES, _OF_BOTH = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD
_MASK = (1 << 64) - 1


def states_of(before: int, token_ids: Sequence[int], start: int) -> NDArray[np.uint64]:
    """[len(token_ids)]: of tokens at positions from `start` on; `before` is the state of the position before them."""
    tokens = np.array(token_ids, np.uint64)
    places = np.arange(start + 1, start + 1 + len(tokens), dtype=np.uint64)
    hashed = ((tokens + np.uint64(1)) * np.uint64(_OF_TOKENS)) ^ (places * np.uint64(_OF_PLACES))
    hashed ^= hashed >> np.uint64(29)
    hashed *= np.uint64(_OF_BOTH)
    hashed ^= hashed >> np.uint64(32)
    sums: NDArray[np.uint64] = hashed.cumsum(dtype=np.uint64) + np.uint64(before)
    return sums


def state_after(before: int, token_id: int, position: int) -> int:
    """The same for one token."""
    hashed = (((token_id + 1) * _OF_TOKENS) ^ ((position + 1) * _OF_PLACES)) & _MASK
    hashed = ((hashed ^ (hashed >> 29)) * _OF_BOTH) & _MASK
    return (before + (hashed ^ (hashed >> 32))) & _MASK


def token_of_all(words: NDArray[np.uint64], vocab_size: int) -> int:
    """The token sampled from the KV words of a whole sequence, [kv_heads, positions, words]."""
    weights = np.arange(1, 2 * words.shape[1], 2, dtype=np.uint64)
    return token_of(int(words.sum(axis=(0, 2), dtype=np.uint64) @ weights), vocab_size)


def token_of(folded: int, vocab_size: int) -> int:
    """The token of a sum over words, modulo 2**64."""
    mixed = ((folded ^ 1) * _OF_TOKENS) & _MASK
    return (mixed ^ (mixed >> 29)) % vocab_size


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
