"""The scheduler: which tokens one step computes.

Pure: the same sequences and budget give the same batch.

Decoding sequences come first, then prompts (and preempted sequences to be computed again), each by priority and
arrival. That order alone would starve low priorities, or prompts while decoding sequences fill the budget. So every
step has a guaranteed share, `StepBudget.guaranteed_tokens`, for the sequence that has waited longest for its next
token. That is the one with the lowest `turn`, a number drawn from a rising counter whenever a sequence starts or
restarts with its blocks, gets a token, or is forked from.

The bound: a runnable sequence that stays runnable gets its next token within

    sum over itself and those of a lower turn of ceil(num_remaining / guaranteed_tokens)   steps.

A sequence that joins later has a higher turn. The one with the lowest turn gets the share at every step until its token
(a loan's job: until its end), and then it has a higher turn, or is gone. `max_wait_steps` bounds the sum by the size of
the pool: every token left to compute has a slot in a block that only its own sequence holds or has reserved.

Where priorities are equal the share changes nothing while decoding sequences leave room for it: the prompt that has
waited longest is the first in order as well.
"""

from collections.abc import Iterable

from engine.core_types import Chunk, EngineSequence, StepBudget


def schedule(runnable: Iterable[EngineSequence], budget: StepBudget) -> list[Chunk]:
    """Return the batch: every decoding sequence, then prompts by priority and arrival within the budget.

    The share of the sequence that has waited longest comes before both. Sequences beyond the budget wait a step. The
    caller provides the blocks.
    """
    sequences = list(runnable)
    if not sequences:
        return []
    decoding = [sequence.decoding for sequence in sequences]
    if all(decoding) and len(sequences) <= budget.max_tokens:  # one token each: the common case
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


def _rank(sequence: EngineSequence) -> tuple[int, int]:
    return -sequence.priority, sequence.arrival


def max_wait_steps(budget: StepBudget, num_blocks: int, block_tokens: int) -> int:
    """Return the steps within which a runnable sequence gets its next token, whatever a pool of `num_blocks` holds."""
    return num_blocks + num_blocks * block_tokens // budget.guaranteed_tokens
