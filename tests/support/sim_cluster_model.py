"""What the sim engine of a cluster answers, worked out without one, and how its KV lies in memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.backends.sim.runner import sim_runner, states_of, token_of, weights_of
from engine.model.model_dir import ModelDir
from kvcache.layout import KvLayout

_MASK = (1 << 64) - 1


class SimClusterModel:
    """Of the model directory and `sim_block_kib` that the workers have."""

    def __init__(self, path: Path, block_tokens: int = 16, block_kib: int = 2) -> None:
        runner = sim_runner(path, block_tokens, kv_bytes=1, block_kib=block_kib)
        self.layout: KvLayout = runner.layout
        self.vocab_size = runner.info.vocab_size
        self._root = int.from_bytes(self.layout.fingerprint(weights_of(ModelDir.open(path)))[:8], "little")
        self._words = self.layout.head_bytes // 8 // block_tokens

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy, undisturbed."""
        tokens, states = list(prompt), list(map(int, states_of(self._root, prompt, 0)))
        folded = sum(state * (2 * position + 1) for position, state in enumerate(states))
        for position in range(len(prompt), len(prompt) + max_tokens):
            tokens.append(self._sample(folded))
            states.append(int(states_of(states[-1], tokens[-1:], position)[0]))
            folded += states[-1] * (2 * position + 1)
        return tokens[len(prompt) :]

    def block(self, prompt: Sequence[int], index: int) -> bytes:
        """The bytes of one of the prompt's full blocks."""
        width = self.layout.block_tokens
        states = states_of(self._root, prompt[: (index + 1) * width], 0)
        head = np.repeat(states[index * width :], self._words)
        return np.tile(head, self.layout.kv_heads).tobytes()

    def _sample(self, folded: int) -> int:
        whole = (folded * self.layout.kv_heads * self._words) & _MASK
        return token_of(whole, self.vocab_size)
