"""Sources of guesses for tests, and a price for them that is no chance."""

import random

from engine.speculation.worth import StepCost, Wish
from engine.vocabulary import Chunk, Sampled, Sequence
from support.sim_model import undisturbed


class FreeRows(StepCost):
    """Every guess pays, however long steps take."""

    def learn(self, rows: int, seconds: float) -> None:
        """Not a thing."""


class Oracle:
    """Knows what the simulated model will say, and says it, but for a share of mistakes."""

    name = "oracle"
    pass_s = 0.0

    def __init__(self, mistakes: float = 0.0, seed: int = 0) -> None:
        self._mistakes = mistakes
        self._random = random.Random(seed)
        self._guesses: dict[Sequence, tuple[int, ...]] = {}
        self.heard: list[tuple[int, int]] = []
        """Of each answer, how many guesses were verified, and how many were right."""

    def wish(self, sequence: Sequence, most: int) -> Wish | None:
        said = sequence.num_sampled
        prompt = sequence.token_ids[: sequence.num_tokens - said]
        truth = undisturbed(prompt, said + most, sequence.choice)[said:]
        self._guesses[sequence] = tuple(token + (self._random.random() < self._mistakes) for token in truth)
        return Wish(1.0, most)

    def guessed(self, chunk: Chunk, count: int) -> Chunk:
        return Chunk(chunk.sequence, chunk.start, chunk.count, self._guesses[chunk.sequence][:count])

    def verified(self, sequence: Sequence, sampled: Sampled) -> None:
        self.heard.append((sampled.num_guesses, len(sampled.following)))
