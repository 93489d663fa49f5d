"""Prompts for requests with known lengths and sharing: equal hash ids give equal text up to there."""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workloads.request import MAX_HASH_ID, TraceRequest

_OF_IDS, _OF_PLACES, _OF_BOTH = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD
LEAST_TOKEN = 256
"""Smallest token id used; smaller ones are often special tokens or single bytes."""
_SYLLABLES = [first + second for first in "bdfghklmnprstvz" for second in "aeiou"]
_REMEMBERED = 8192
"""Number of cached texts of blocks."""


def token_ids(request: TraceRequest, vocab_size: int) -> list[int]:
    """Return as many token ids as the request says, each below `vocab_size`."""
    numbers = _numbers(request)
    least = min(LEAST_TOKEN, vocab_size // 2)
    ids: list[int] = (numbers % np.uint64(vocab_size - least) + np.uint64(least)).tolist()
    return ids


class PromptWords:
    """Text of about as many tokens as a request says."""

    def __init__(self, tokens_per_word: float) -> None:
        """Create it with the tokenizer's tokens per word, measured with `sample`."""
        self._tokens_per_word = tokens_per_word

    def text(self, request: TraceRequest) -> str:
        size, rest = request.hash_tokens, request.input_tokens
        parts = []
        for hash_id in (*request.hash_ids, MAX_HASH_ID + request.number % MAX_HASH_ID):
            tokens = min(size, rest) if hash_id < MAX_HASH_ID else rest
            count = round(tokens / self._tokens_per_word)
            parts.append(_text(hash_id, count) if tokens == size else " ".join(_words(hash_id, count)))
            rest -= tokens
        return " ".join(part for part in parts if part) or _words(0, 1)[0]


def sample(count: int) -> str:
    """Return so many words, to be counted by a tokenizer."""
    return " ".join(_words(0, count))


@functools.lru_cache(_REMEMBERED)
def _text(hash_id: int, count: int) -> str:
    return " ".join(_words(hash_id, count))


def _words(hash_id: int, count: int) -> list[str]:
    """Return words of two or three syllables."""
    values: Sequence[int] = _mixed(np.full(count, hash_id, np.uint64), np.arange(count, dtype=np.uint64)).tolist()
    words, base = [], len(_SYLLABLES)
    for value in values:
        word = _SYLLABLES[value % base] + _SYLLABLES[value // base % base]
        words.append(word + _SYLLABLES[value // base**2 % base] if value & 1 << 40 else word)
    return words


def _numbers(request: TraceRequest) -> NDArray[np.uint64]:
    """Return a number per token, [input_tokens]."""
    size = request.hash_tokens
    ids = np.full(request.input_tokens, MAX_HASH_ID + request.number % MAX_HASH_ID, np.uint64)
    shared = np.repeat(np.array(request.hash_ids, np.uint64), size)[: request.input_tokens]
    ids[: len(shared)] = shared
    return _mixed(ids, np.arange(request.input_tokens, dtype=np.uint64) % np.uint64(size))


def _mixed(ids: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = ((ids + np.uint64(1)) * np.uint64(_OF_IDS)) ^ ((places + np.uint64(1)) * np.uint64(_OF_PLACES))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_OF_BOTH)
    mixed ^= mixed >> np.uint64(32)
    return mixed
