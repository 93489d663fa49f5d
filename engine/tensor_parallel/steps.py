"""Steps as rank 0 sends them to its followers, which make the same batch from them.

A follower keeps a copy of each sequence, as far as computing needs it. A step contains only the changes since the
sequence's last step: for a long context, one token and sometimes a block.
"""

import weakref
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.core_types import Chunk, SamplingParams, Sequence


@dataclass(frozen=True, slots=True)
class NewSequence:
    """Constant facts about a sequence, sent with its first step."""

    num_prompt: int
    num_emitted_before: int
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """Changes of one sequence.

    Each new list is the first `kept` entries of the old one and these entries.
    """

    number: int
    kept_tokens: int
    tokens: tuple[int, ...]
    kept_blocks: int
    blocks: tuple[int, ...]
    num_scored: int
    beginning: NewSequence | None = None
    """Constant facts, for a sequence that followers have not seen."""


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A chunk of sequence `number`."""

    number: int
    start: int
    count: int
    draft_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One batch, in order."""

    changes: tuple[SequenceUpdate, ...]
    chunks: tuple[ChunkRef, ...]
    over: tuple[int, ...]
    """Sequences that no later step contains."""


@dataclass(slots=True)
class _KnownSequence:
    """A sequence as the followers know it."""

    number: int
    tokens: list[int]
    """The sequence's own list; while it is the same object it only grows."""
    num_tokens: int
    blocks: list[int]
    num_scored: int


class StepWriter:
    """Rank 0's end of the steps.

    Used by one thread; sequences may end on any.
    """

    def __init__(self) -> None:
        self._sent: weakref.WeakKeyDictionary[Sequence, _KnownSequence] = weakref.WeakKeyDictionary()
        self._over: deque[int] = deque()
        self._count = 0

    def step(self, batch: Seq[Chunk]) -> Step:
        """Return the step for a batch.

        Each step must be sent to every follower, in order.
        """
        changes: list[SequenceUpdate] = []
        chunks: list[ChunkRef] = []
        for chunk in batch:
            assert not chunk.num_drafts, "the guesses of a draft model are made by rank 0 alone"
            number, change = self._change(chunk.sequence)
            if change is not None:
                changes.append(change)
            chunks.append(ChunkRef(number, chunk.start, chunk.count, chunk.draft_tokens))
        over = tuple(self._over.popleft() for _ in range(len(self._over)))
        return Step(tuple(changes), tuple(chunks), over)

    def _change(self, sequence: Sequence) -> tuple[int, SequenceUpdate | None]:
        sent = self._sent.get(sequence)
        if sent is None:
            return self._begin(sequence)
        kept_tokens = sent.num_tokens if sent.tokens is sequence.token_ids else 0
        kept_blocks = _num_equal(sent.blocks, sequence.blocks)
        tokens, blocks = sequence.token_ids[kept_tokens:], sequence.blocks[kept_blocks:]
        same = not tokens and not blocks and kept_blocks == len(sent.blocks) and kept_tokens == sent.num_tokens
        if same and sent.num_scored == sequence.num_scored:
            return sent.number, None
        sent.tokens, sent.num_tokens, sent.num_scored = sequence.token_ids, sequence.num_tokens, sequence.num_scored
        sent.blocks = list(sequence.blocks)
        change = SequenceUpdate(
            sent.number, kept_tokens, tuple(tokens), kept_blocks, tuple(blocks), sequence.num_scored
        )
        return sent.number, change

    def _begin(self, sequence: Sequence) -> tuple[int, SequenceUpdate]:
        self._count += 1
        number = self._count
        tokens, blocks = sequence.token_ids, list(sequence.blocks)
        self._sent[sequence] = _KnownSequence(number, tokens, len(tokens), blocks, sequence.num_scored)
        weakref.finalize(sequence, self._over.append, number).atexit = False
        beginning = NewSequence(sequence.num_prompt, sequence.num_emitted_before, sequence.sampling)
        return number, SequenceUpdate(number, 0, tuple(tokens), 0, tuple(blocks), sequence.num_scored, beginning)


def _num_equal(some: list[int], others: list[int]) -> int:
    """Return the number of equal leading entries."""
    shared = min(len(some), len(others))
    if some[:shared] == others[:shared]:  # the common case, faster than an entry-wise comparison
        return shared
    return next(index for index in range(shared) if some[index] != others[index])


class StepReader:
    """A follower's end of the steps."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def batch(self, step: Step) -> list[Chunk]:
        """Return the batch of a step, equal to rank 0's except for fields that only rank 0 needs."""
        for number in step.over:
            self._sequences.pop(number, None)
        for change in step.changes:
            self._apply(change)
        return [Chunk(self._sequences[each.number], each.start, each.count, each.draft_tokens) for each in step.chunks]

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def _apply(self, change: SequenceUpdate) -> None:
        if change.beginning is not None:
            self._sequences[change.number] = Sequence(
                request_id="",
                token_ids=[],
                num_prompt=change.beginning.num_prompt,
                root=b"",
                sampling=change.beginning.sampling,
                priority=0,
                arrival=0,
                num_emitted_before=change.beginning.num_emitted_before,
            )
        sequence = self._sequences[change.number]
        sequence.token_ids[change.kept_tokens :] = change.tokens
        sequence.blocks[change.kept_blocks :] = change.blocks
        sequence.num_scored = change.num_scored


def filled_blocks(batch: Seq[Chunk], block_tokens: int) -> list[int]:
    """Return, in order, the blocks whose last slot the batch writes.

    Such a block is full after the batch, unless its last token is a draft that turns out wrong.
    """
    return [
        block
        for chunk in batch
        for block in chunk.sequence.blocks[chunk.start // block_tokens : (chunk.start + chunk.num_rows) // block_tokens]
    ]
