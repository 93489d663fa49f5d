"""How long a step of the sim engine takes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.vocabulary import Chunk


@dataclass(frozen=True, slots=True)
class StepTiming:
    """A step's seconds are a sum of these terms: what reading the weights costs, what arithmetic on the prompts'
    tokens costs, and what reading KV costs."""

    step_s: float = 0.0
    """Of every step."""
    prompt_token_s: float = 0.0
    """Of each prompt token."""
    prompt_pair_s: float = 0.0
    """Of each pair of a prompt token and a token before it: the quadratic term of attention."""
    stream_s: float = 0.0
    """Of each sequence that decodes."""
    kv_token_s: float = 0.0
    """Of each token of context of each sequence that decodes."""

    def seconds(self, batch: Sequence[Chunk]) -> float:
        total = self.step_s
        for chunk in batch:
            if chunk.sequence.decoding:
                total += self.stream_s + self.kv_token_s * (chunk.start + chunk.count)
            else:
                pairs = chunk.count * (chunk.start + (chunk.count + 1) / 2)
                total += self.prompt_token_s * chunk.count + self.prompt_pair_s * pairs
        return total


AT_ONCE = StepTiming()
