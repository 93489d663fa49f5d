"""Sources of draft tokens for tests, and a price for them without chance."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from engine.core_types import Chunk, SampleResult, Sequence
from engine.speculation.speculation_policy import DraftBudget, StepCost
from engine.speculation.speculator import Speculator
from support.sim_model import VOCAB, undisturbed


class FreeRows(StepCost):
    """Every guess pays, however long steps take."""

    def learn(self, rows: int, seconds: float) -> None:
        """Not a thing."""


class Oracle:
    """Knows what will be said, and says it, but for a share of mistakes. By default of the simulated model."""

    pass_s = 0.0

    def __init__(self, mistakes: float = 0.0, seed: int = 0, vocab_size: int = VOCAB) -> None:
        self._mistakes = mistakes
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._draft_tokens: dict[Sequence, tuple[int, ...]] = {}

    def propose_budget(self, sequence: Sequence, most: int) -> DraftBudget | None:
        truth = self.truth(sequence, most)
        self._draft_tokens[sequence] = tuple(
            self._random.randrange(self._vocab_size) if self._random.random() < self._mistakes else token
            for token in truth
        )
        return DraftBudget(1.0, len(truth)) if truth else None

    def truth(self, sequence: Sequence, most: int) -> Seq[int]:
        """The next tokens, `most` at most."""
        said = sequence.num_sampled
        prompt = sequence.token_ids[: sequence.num_tokens - said]
        return undisturbed(prompt, said + most, sequence.choice)[said:]

    def drafted(self, chunk: Chunk, count: int) -> Chunk:
        return Chunk(chunk.sequence, chunk.start, chunk.count, self._draft_tokens[chunk.sequence][:count])

    def verified(self, sequence: Sequence, sampled: SampleResult) -> None:
        """It knows."""


class Recording(Oracle):
    """Of what was said by another engine, by request and choice."""

    def __init__(
        self, said: Mapping[tuple[str, int], Seq[int]], vocab_size: int, mistakes: float = 0.3, seed: int = 0
    ) -> None:
        super().__init__(mistakes, seed, vocab_size)
        self._said = said

    def truth(self, sequence: Sequence, most: int) -> Seq[int]:
        said = self._said[sequence.request_id, sequence.choice]
        return said[sequence.num_sampled :][:most]


def always(source: Oracle, most: int = 5) -> Speculator:
    """As many guesses as there is room for, in each step."""
    return Speculator(source, most, FreeRows())
