"""The sim backend's model: KV is a running sum over tokens and positions; tokens are hashes of KV.

The KV of position p is one 64-bit state, the sum of a hash of every token up to p with its position, repeated through
the slot. A sampled token is a hash of such states.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.items import Item

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
