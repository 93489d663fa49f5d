"""Speculator: adds draft tokens to a step's batch, and learns from their verification.

Only decoding sequences get drafts, and no beams. Drafts take nothing from other sequences: they use what is left of the
step's token budget, and KV blocks that the sequence reserved, or that are available while no sequence waits for any. So
the bounds of the scheduler and of preemption hold unchanged; no sequence is preempted for a draft.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

from engine.core_types import Chunk, SampleResult, Sequence
from engine.kv.kv_cache_manager import KVCacheManager
from engine.model_runner import ModelRunner
from engine.speculation.ngrams import NgramIndex, continuation
from engine.speculation.speculation_policy import AcceptanceRates, DraftBudget, SequenceAcceptance, StepCost, allot

NGRAM = "ngram"
"""Name of prompt lookup in the settings."""
MAX_GUESSES = 7
"""Default limit of draft tokens per sequence and step: on a CPU a step of 8 rows still waits for memory."""
MAX_KIND = 6
"""Number of agreeing tokens from which acceptance of n-gram drafts is learned as one kind."""


class Proposer(Protocol):
    """Source of draft tokens."""

    @property
    def pass_s(self) -> float:
        """Seconds of proposing one more token for all sequences at once."""

    def propose_budget(self, sequence: Sequence, most: int) -> DraftBudget | None:
        """Return the drafts that the sequence could use now, or None.

        Called at every step.
        """

    def drafted(self, chunk: Chunk, count: int) -> Chunk:
        """Return the chunk with `count` of the drafts last wished for.

        Called only for a positive count.
        """

    def verified(self, sequence: Sequence, sampled: SampleResult) -> None:
        """Learn from the verified drafts."""


@dataclass(slots=True)
class _Text:
    """Repetitions within one sequence."""

    index: NgramIndex
    chances: SequenceAcceptance
    draft_tokens: tuple[int, ...] = ()
    kind: int = 0
    num_tokens: int = 0
    """Length of the sequence when the drafts were proposed."""


class NgramProposer:
    """Prompt lookup: proposes the tokens that followed earlier occurrences, in prompt or output.

    Unused drafts are compared with the sampled tokens as well, so the acceptance of a text is known whether it is given
    drafts or not.
    """

    pass_s = 0.0

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()
        self._chances = AcceptanceRates()

    def propose_budget(self, sequence: Sequence, most: int) -> DraftBudget | None:
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
        """Do nothing: the next `propose_budget` sees the result in the sequence's tokens."""


class DraftModelProposer:
    """Draft model, run by the model runner; it can always propose."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._chances = AcceptanceRates()
        self._own: WeakKeyDictionary[Sequence, SequenceAcceptance] = WeakKeyDictionary()

    @property
    def pass_s(self) -> float:
        return self._runner.draft_pass_s

    def propose_budget(self, sequence: Sequence, most: int) -> DraftBudget | None:
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
    """Speculation of one engine."""

    def __init__(self, source: Proposer, max_guesses: int = MAX_GUESSES, cost: StepCost | None = None) -> None:
        assert max_guesses >= 1
        self.source = source
        self._max_drafts = max_guesses
        self._cost = cost or StepCost()
        self.num_draft_tokens = 0
        """Draft tokens verified since the engine started."""
        self.num_right = 0

    def add_draft_tokens(
        self, batch: list[Chunk], kv_cache: KVCacheManager, max_tokens: int, short: bool
    ) -> list[Chunk]:
        """Return the batch with draft tokens, and reserve their blocks.

        `max_tokens` is the step's budget; `short`: whether any sequence waits for blocks.
        """
        budgets: dict[int, DraftBudget] = {}
        num_tokens = num_rows = 0
        for place, chunk in enumerate(batch):
            num_rows += chunk.count
            num_tokens += chunk.samples
            if (most := self._most(chunk, kv_cache, short)) and (
                budget := self.source.propose_budget(chunk.sequence, most)
            ):
                budgets[place] = budget
        if not budgets:
            return batch
        left, pass_s = max_tokens - num_rows, self.source.pass_s
        counts = allot(list(budgets.values()), num_tokens, num_rows, left, self._cost, pass_s)
        if not any(counts):
            self._cost.forgive()
            return batch
        batch = list(batch)
        for place, count in zip(budgets, counts, strict=True):
            # Blocks that were available above may be another sequence's by now.
            if kept := min(count, self._room(batch[place], kv_cache, short)):
                batch[place] = chunk = self.source.drafted(batch[place], kept)
                if lacking := kv_cache.num_lacking(chunk.sequence, chunk.end):
                    kv_cache.extend(chunk.sequence, lacking)
        batch.sort(
            key=lambda chunk: (not chunk.sequence.decoding, chunk.num_draft_tokens > 0)
        )  # the order that GPU kernels need
        return batch

    def record_result(self, chunk: Chunk, sampled: SampleResult) -> None:
        """Learn from the runner's result of a chunk."""
        if sampled.num_draft_tokens:
            self.num_draft_tokens += sampled.num_draft_tokens
            self.num_right += len(sampled.following)
            self.source.verified(chunk.sequence, sampled)

    def step_took(self, batch: Seq[Chunk], sampled: Seq[SampleResult], seconds: float) -> None:
        """Learn the cost of rows from a step of decoding sequences only.

        Steps with prompts are of another kind, and so are steps without drafts because the draft model had to read a
        prompt.
        """
        num_draft_tokens = sum(chunk.num_draft_tokens for chunk in batch)
        if num_draft_tokens == sum(answer.num_draft_tokens for answer in sampled):
            depth = max(chunk.num_drafts for chunk in batch)
            self._cost.learn(num_draft_tokens + sum(c.count for c in batch), seconds - depth * self.source.pass_s)

    def _most(self, chunk: Chunk, kv_cache: KVCacheManager, short: bool) -> int:
        """Return the number of drafts for which the sequence has use and blocks."""
        sequence = chunk.sequence
        if not sequence.decoding or sequence.sampling is None or sequence.sampling.beam is not None:
            return 0
        # the token sampled after the drafts is the last one then
        useful = sequence.max_num_tokens - sequence.num_tokens - 1
        return max(0, min(self._max_drafts, useful, self._room(chunk, kv_cache, short)))

    def _room(self, chunk: Chunk, kv_cache: KVCacheManager, short: bool) -> int:
        sequence = chunk.sequence
        spare = 0 if short else max(0, kv_cache.pool.num_available)
        num_blocks = len(sequence.blocks) + sequence.num_reserved + spare
        return max(0, num_blocks * kv_cache.layout.block_tokens - chunk.start - chunk.count)
