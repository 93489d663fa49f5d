"""What one step computes. Pure: the same sequences and budget give the same batch.

Decoding sequences come first, then prompts (and what preempted ones must compute anew), each by priority and arrival.
That order alone would starve: a low priority under a constant flow of higher ones, or prompts while decoding
sequences fill the budget. So every step has a guaranteed share, `StepBudget.guaranteed_tokens`, for one sequence: the
one that has waited longest for its next token. That is the one of the lowest `turn`, a number drawn from a rising
counter whenever a sequence starts or restarts with its blocks, and whenever it gets a token or others are forked from
it.

The bound: a runnable sequence that stays runnable gets its next token within

    sum over itself and those of a lower turn of ceil(num_remaining / guaranteed_tokens)   steps.

For whoever joins later has a higher turn; whoever has the lowest gets the share at every step until its token
(a loan's job: until its end), and then it has a higher turn, or is gone. `max_wait_steps` bounds the sum by the size of
the pool: every token left to compute has a slot in a block that only its own sequence holds or was promised.

Where priorities are equal the share changes nothing while the decoding sequences leave room for it: the prompt that
has waited longest is the first in order as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.core_types import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of one step, in tokens."""

    max_tokens: int
    max_prefill_tokens: int
    """Of those, at most this many for prompts: what bounds the inter-token latency of running streams."""

    @property
    def guaranteed_tokens(self) -> int:
        """The share of the sequence that has waited longest for its next token."""
        return max(1, min(self.max_tokens, self.max_prefill_tokens) // 4)


def schedule(runnable: Iterable[Sequence], budget: StepBudget) -> list[Chunk]:
    """Every decoding sequence first, then prompts by priority and arrival with what the budget leaves; before all of
    them the share of the one that has waited longest.

    What does not fit the budget waits a step. The blocks of what is computed are the caller's affair.
    """
    sequences = list(runnable)
    if not sequences:
        return []
    decoding = [sequence.decoding for sequence in sequences]
    if all(decoding) and len(sequences) <= budget.max_tokens:  # a token each: most steps
        sequences.sort(key=_rank)
        return [Chunk(sequence, sequence.num_computed, 1) for sequence in sequences]
    ordered = sorted(
        (not decodes, *_rank(sequence), place, sequence.num_remaining, sequence)
        for place, (sequence, decodes) in enumerate(zip(sequences, decoding, strict=True))
    )
    *_, longest = min(ordered, key=lambda entry: (entry[-1].turn, entry[-1].arrival))
    share = min(longest.num_remaining, budget.guaranteed_tokens)
    left = budget.max_tokens - share
    prefill_left = budget.max_prefill_tokens - (0 if longest.decoding else share)
    chunks: list[Chunk] = []
    for is_prompt, _, _, _, remaining, sequence in ordered:
        own_share = share if sequence is longest else 0
        count = min(remaining - own_share, left)
        if is_prompt:
            count = min(count, prefill_left)
            prefill_left -= count
        left -= count
        if count + own_share:
            chunks.append(Chunk(sequence, sequence.num_computed, count + own_share))
    return chunks


def _rank(sequence: Sequence) -> tuple[int, int]:
    return -sequence.priority, sequence.arrival


def max_wait_steps(budget: StepBudget, num_blocks: int, block_tokens: int) -> int:
    """Steps within which a runnable sequence gets its next token, whatever else is in a pool of `num_blocks`."""
    return num_blocks + num_blocks * block_tokens // budget.guaranteed_tokens
