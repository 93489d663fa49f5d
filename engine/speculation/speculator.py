"""Adds guesses to a step's batch, and learns from what becomes of them.

Only sequences that decode get any, and no beams. Guesses take nothing from anybody: of the step's token budget what all
others left, and of KV blocks what the sequence was promised, or what is available while nobody waits for any. So the
bounds of `engine/core/scheduler.py` and `engine/core/preemption.py` hold as they stand; nobody is preempted for a guess.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

from engine.core.core_types import Chunk, SampleResult, Sequence
from engine.core.model_runner import ModelRunner
from engine.kv.kv_cache_manager import KVCacheManager
from engine.speculation.ngrams import NgramIndex, continuation
from engine.speculation.speculation_policy import AcceptanceRates, DraftBudget, SequenceAcceptance, StepCost, allot

NGRAM = "ngram"
"""What the settings call it."""
MAX_GUESSES = 7
"""Of a sequence in a step, unless set otherwise: a step of 8 rows still waits for memory, on a CPU."""
MAX_KIND = 6
"""Chances of what n-grams say are learnt by how many tokens agreed; so many or more are one kind."""


class Proposer(Protocol):
    """Where guesses come from."""

    @property
    def pass_s(self) -> float:
        """Seconds that guessing one place further takes, for all sequences at once."""

    def wish(self, sequence: Sequence, most: int) -> DraftBudget | None:
        """What the sequence could make use of now; None when nothing comes to mind. Asked at every step."""

    def drafted(self, chunk: Chunk, count: int) -> Chunk:
        """The chunk with `count` guesses, of those wished for last. Not asked when it gets none."""

    def verified(self, sequence: Sequence, sampled: SampleResult) -> None:
        """What became of them."""


@dataclass(slots=True)
class _Text:
    """One sequence's own repetitions."""

    index: NgramIndex
    chances: SequenceAcceptance
    draft_tokens: tuple[int, ...] = ()
    kind: int = 0
    num_tokens: int = 0
    """It had when those were guessed."""


class NgramProposer:
    """What followed the last tokens where they were before in the prompt or the output.

    A guess that was not used is compared with what came all the same. So the chances of a text are known whether
    speculation is on for it or not."""

    pass_s = 0.0

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()
        self._chances = AcceptanceRates()

    def wish(self, sequence: Sequence, most: int) -> DraftBudget | None:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text(NgramIndex(), SequenceAcceptance(self._chances))
        tokens = sequence.token_ids
        if text.draft_tokens:
            came = tokens[text.num_tokens :]
            text.chances.learn(text.kind, (g == t for g, t in zip(text.draft_tokens, came, strict=False)))
            text.draft_tokens = ()
        if (match := text.index.search(tokens)) is None:
            return None
        text.draft_tokens = continuation(tokens, match.end, most)
        text.kind, text.num_tokens = min(match.agreeing, MAX_KIND), len(tokens)
        return DraftBudget(text.chances.of(text.kind), most)

    def drafted(self, chunk: Chunk, count: int) -> Chunk:
        return replace(chunk, draft_tokens=self._texts[chunk.sequence].draft_tokens[:count])

    def verified(self, sequence: Sequence, sampled: SampleResult) -> None:
        """The next wish sees it in the sequence's tokens."""


class DraftModelProposer:
    """A draft model: it always has something to say, in the runner, when it is asked to."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._chances = AcceptanceRates()
        self._own: WeakKeyDictionary[Sequence, SequenceAcceptance] = WeakKeyDictionary()

    @property
    def pass_s(self) -> float:
        return self._runner.draft_pass_s

    def wish(self, sequence: Sequence, most: int) -> DraftBudget | None:
        own = self._own.get(sequence)
        if own is None:
            own = self._own[sequence] = SequenceAcceptance(self._chances)
        own.forgive(0)
        return DraftBudget(own.of(0), most)

    def drafted(self, chunk: Chunk, count: int) -> Chunk:
        return replace(chunk, num_drafts=count)

    def verified(self, sequence: Sequence, sampled: SampleResult) -> None:
        num_right = len(sampled.following)
        self._own[sequence].learn(0, [place < num_right for place in range(sampled.num_draft_tokens)])


class Speculator:
    """Of one engine."""

    def __init__(self, source: Proposer, max_guesses: int = MAX_GUESSES, cost: StepCost | None = None) -> None:
        assert max_guesses >= 1
        self.source = source
        self._max_guesses = max_guesses
        self._cost = cost or StepCost()
        self.num_draft_tokens = 0
        """Verified since the engine started."""
        self.num_right = 0

    def add_draft_tokens(self, batch: list[Chunk], books: KVCacheManager, max_tokens: int, short: bool) -> list[Chunk]:
        """The batch with guesses, and with promises for their blocks. `max_tokens`: the step's budget. `short`:
        somebody waits for blocks."""
        wishes: dict[int, DraftBudget] = {}
        num_tokens = num_rows = 0
        for place, chunk in enumerate(batch):
            num_rows += chunk.count
            num_tokens += chunk.samples
            if (most := self._most(chunk, books, short)) and (wish := self.source.wish(chunk.sequence, most)):
                wishes[place] = wish
        if not wishes:
            return batch
        left, pass_s = max_tokens - num_rows, self.source.pass_s
        counts = allot(list(wishes.values()), num_tokens, num_rows, left, self._cost, pass_s)
        if not any(counts):
            self._cost.forgive()
            return batch
        batch = list(batch)
        for place, count in zip(wishes, counts, strict=True):
            # What was available when it was asked may be another's by now.
            if kept := min(count, self._room(batch[place], books, short)):
                batch[place] = chunk = self.source.drafted(batch[place], kept)
                if lacking := books.num_lacking(chunk.sequence, chunk.end):
                    books.extend(chunk.sequence, lacking)
        batch.sort(
            key=lambda chunk: (not chunk.sequence.decoding, chunk.num_draft_tokens > 0)
        )  # as the GPU's kernels want
        return batch

    def heard(self, chunk: Chunk, sampled: SampleResult) -> None:
        """The runner's answer to a chunk."""
        if sampled.num_draft_tokens:
            self.num_draft_tokens += sampled.num_draft_tokens
            self.num_right += len(sampled.following)
            self.source.verified(chunk.sequence, sampled)

    def step_took(self, batch: Seq[Chunk], sampled: Seq[SampleResult], seconds: float) -> None:
        """A step of nothing but decoding sequences tells what rows cost; one with prompts is of another kind, and so is
        one whose guesses were not made because the draft model had to read a prompt first."""
        num_draft_tokens = sum(chunk.num_draft_tokens for chunk in batch)
        if num_draft_tokens == sum(answer.num_draft_tokens for answer in sampled):
            depth = max(chunk.num_drafts for chunk in batch)
            self._cost.learn(num_draft_tokens + sum(c.count for c in batch), seconds - depth * self.source.pass_s)

    def _most(self, chunk: Chunk, books: KVCacheManager, short: bool) -> int:
        """Guesses that the sequence has a use and blocks for."""
        sequence = chunk.sequence
        if not sequence.decoding or sequence.sampling is None or sequence.sampling.beam is not None:
            return 0
        useful = sequence.max_num_tokens - sequence.num_tokens - 1  # the token sampled after them is the last one then
        return max(0, min(self._max_guesses, useful, self._room(chunk, books, short)))

    def _room(self, chunk: Chunk, books: KVCacheManager, short: bool) -> int:
        sequence = chunk.sequence
        spare = 0 if short else max(0, books.pool.num_available)
        num_blocks = len(sequence.blocks) + sequence.num_reserved + spare
        return max(0, num_blocks * books.layout.block_tokens - chunk.start - chunk.count)
