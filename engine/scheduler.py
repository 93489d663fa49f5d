"""What one step computes. Pure: the same sequences and budget give the same batch."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.vocabulary import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of one step, in tokens."""

    max_tokens: int
    max_prefill_tokens: int
    """Of those, at most this many for prompts: what bounds the inter-token latency of running streams."""


def schedule(runnable: Iterable[Sequence], budget: StepBudget) -> list[Chunk]:
    """Every decoding sequence first, then prompts by priority and arrival with what the budget leaves.

    All sequences given have their blocks reserved, so none of them can run out in mid-step. Decoding
    sequences beyond the budget wait a step, the longest-waiting (lowest arrival) go first.
    """
    ordered = sorted(runnable, key=lambda sequence: (-sequence.priority, sequence.arrival))
    decodes = [sequence for sequence in ordered if sequence.decoding][: budget.max_tokens]
    batch = [Chunk(sequence, sequence.num_computed, 1) for sequence in decodes]
    left = min(budget.max_tokens - len(batch), budget.max_prefill_tokens)
    for sequence in ordered:
        if left <= 0:
            break
        if not sequence.decoding:
            count = min(sequence.num_remaining, left)
            batch.append(Chunk(sequence, sequence.num_computed, count))
            left -= count
    return batch
