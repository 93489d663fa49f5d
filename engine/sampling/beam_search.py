"""Beam search over sequences that the engine computes.

Pure: log probabilities go in, moves of beams come out.

The search has `width` slots. Each live slot is a sequence whose likeliest next tokens are awaited (`hear`). When all
are known (`ready`), `advance` compares the candidates of all:

    among the best (1 + number of end tokens) * width       so that width of them can continue
        an end token, and it is among the best width  ──▶  finished, kept while it is among the best width by score
        not an end token                              ──▶  the best width continue, in the slots

A sequence continues in its own slot; where it continues in two ways, the second takes a slot whose sequence does not
continue. All sequences are equally long, so at `max_tokens` all end. The search is over then, or when no continuing
sequence scores better than the worst of `width` finished ones, or with early stopping as soon as there are `width`.
These are the rules of transformers' beam search, with its `early_stopping` of False or True.
"""

import math
from dataclasses import dataclass

from engine.core_types import BeamParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """A beam: tokens after the prompt, and the sum of their log probabilities."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamMove:
    """The sequence of `slot` becomes that of `parent` plus `token_id`."""

    slot: int
    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A finished beam."""

    beam: Beam
    score: float
    stopped: bool
    """Whether it ended by an end token, and not by max_tokens."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    slot: int
    token_id: int
    logprob: float
    """Log probability of the whole beam."""


class BeamSearch:
    """One beam search."""

    def __init__(self, params: BeamParams, max_tokens: int, end_token_ids: frozenset[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._ends = end_token_ids
        self._live = dict.fromkeys(range(params.width), Beam())
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._finished: list[FinishedBeam] = []
        self.over = False

    @property
    def num_candidates(self) -> int:
        """Number of likeliest tokens needed from each sequence."""
        return (1 + len(self._ends)) * self._params.width

    @property
    def ready(self) -> bool:
        """Whether `advance` has all candidates it needs."""
        return len(self._logprobs) == len(self._live) and not self.over

    def add_logprobs(self, slot: int, logprobs: TokenLogprobs) -> None:
        """Set a slot's candidates, likeliest first.

        A recomputed sequence may report them again.
        """
        assert slot in self._live
        self._logprobs[slot] = logprobs

    def advance(self) -> list[BeamMove]:
        """Choose the continuing beams.

        Slots in no move have no sequence any more; no moves means the search is over.
        """
        assert self.ready
        candidates = self._candidates()
        length = len(next(iter(self._live.values())).token_ids) + 1
        at_limit = length == self._max_tokens
        going_on: list[_Candidate] = []
        for rank, candidate in enumerate(candidates):
            stops = candidate.token_id in self._ends
            if not (stops or at_limit):
                going_on.append(candidate)
            elif rank < self._params.width:
                self._finish(candidate, length, stops)
        going_on = going_on[: self._params.width]
        self._logprobs.clear()
        self.over = not going_on or self._cannot_improve(going_on[0].logprob, length)
        moves = [] if self.over else self._seat(going_on)
        chosen = {(move.parent, move.token_id): move.slot for move in moves}
        self._live = {
            chosen[c.slot, c.token_id]: Beam((*self._live[c.slot].token_ids, c.token_id), c.logprob)
            for c in going_on
            if (c.slot, c.token_id) in chosen
        }
        return moves

    def found(self) -> list[FinishedBeam]:
        """Return finished beams, best first."""
        return list(self._finished)

    def _candidates(self) -> list[_Candidate]:
        """Return the best candidates of all sequences, best first; ties by slot and by rank within the slot."""
        first_round = not next(iter(self._live.values())).token_ids
        candidates = [
            _Candidate(slot, token_id, beam.logprob + logprob)
            for slot, beam in sorted(self._live.items())
            for token_id, logprob in zip(
                self._logprobs[slot].top_token_ids, self._logprobs[slot].top_logprobs, strict=True
            )
            if slot == 0 or not first_round  # in the first round all slots hold the same sequence
        ]
        best = sorted(candidates, key=lambda candidate: -candidate.logprob)[: self.num_candidates]
        if not first_round:
            return best
        ends = self._ends
        places = iter(range(self._params.width))
        # The beams diverge here, each in a slot that has computed the same prefix.
        return [c if c.token_id in ends else _Candidate(next(places, 0), c.token_id, c.logprob) for c in best]

    def _finish(self, candidate: _Candidate, length: int, stops: bool) -> None:
        beam = Beam((*self._live[candidate.slot].token_ids, candidate.token_id), candidate.logprob)
        self._finished.append(FinishedBeam(beam, self._score(candidate.logprob, length), stops))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._params.width :]

    def _cannot_improve(self, best_logprob: float, length: int) -> bool:
        if len(self._finished) < self._params.width:
            return False
        return self._params.early_stopping or self._score(best_logprob, length) <= self._finished[-1].score

    def _seat(self, going_on: list[_Candidate]) -> list[BeamMove]:
        parents = {candidate.slot for candidate in going_on}
        empty = iter(slot for slot in range(self._params.width) if slot not in parents)
        seated: set[int] = set()
        moves: list[BeamMove] = []
        for candidate in going_on:
            slot = next(empty) if candidate.slot in seated else candidate.slot
            seated.add(slot)
            moves.append(BeamMove(slot, candidate.slot, candidate.token_id))
        return moves

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._params.length_penalty)
