"""The simulated model of the engines' unit tests, and what it answers with no engine about it."""

from collections.abc import Sequence

import numpy as np

from engine.backends.sim.runner import choice_token, states_of, token_of_all, tokens_seen
from kvcache.items import Item
from kvcache.layout import KvLayout

WIDTH = 4
LAYOUT = KvLayout(layers=1, kv_heads=2, head_dim=1, block_tokens=WIDTH, dtype="float32")
VOCAB = 1000


def undisturbed(prompt: Sequence[int], max_tokens: int, choice: int = 0, items: Sequence[Item] = ()) -> list[int]:
    """What the model answers to a prompt, greedy or of a later choice."""
    root = int.from_bytes(LAYOUT.fingerprint(b"sim")[:8], "little")
    tokens = tokens_seen(items, prompt, 0)
    while len(tokens) < len(prompt) + max_tokens:
        words = np.array([states_of(root, tokens, 0)] * LAYOUT.kv_heads)[:, :, None]
        tokens.append(choice_token(token_of_all(words, VOCAB), choice, VOCAB))
    return tokens[len(prompt) :]
