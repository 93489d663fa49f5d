"""Beam search over chains that somebody else computes. Pure: told of log probabilities, it says who goes on from whom.

The search has `width` slots. Each live one is a chain whose next token's likeliest candidates are awaited (`hear`).
When all were heard (`ready`), `advance` compares the candidates of all:

    among the best (1 + number of end tokens) * width       so that width of them can go on
        an end token, and it is among the best width  ──▶  finished, kept while it is among the best width by score
        not an end token                              ──▶  the best width go on, in the slots

A chain goes on in the slot it is in; where it goes on in two ways, the other takes a slot whose chain goes on in none.
All chains are equally long, so at `max_tokens` all end. The search is over then, or when no chain that goes on scores
better than the worst of `width` finished ones, or with early stopping as soon as there are `width`. These are the rules
of transformers' beam search, with its `early_stopping` of False or True.
"""

import math
from dataclasses import dataclass

from engine.core.core_types import BeamParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """A chain: what was chosen after the prompt, and the sum of the log probabilities of that."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamMove:
    """The chain of `slot` is now that of `parent` and then `token_id`."""

    slot: int
    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A finished chain."""

    beam: Beam
    score: float
    stopped: bool
    """By an end token, and not by max_tokens."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    slot: int
    token_id: int
    logprob: float
    """Of the whole chain."""


class BeamSearch:
    """One search."""

    def __init__(self, params: BeamParams, max_tokens: int, end_token_ids: frozenset[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._ends = end_token_ids
        self._live = dict.fromkeys(range(params.width), Beam())
        self._heard: dict[int, TokenLogprobs] = {}
        self._found: list[FinishedBeam] = []
        self.over = False

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens must be heard of each chain."""
        return (1 + len(self._ends)) * self._params.width

    @property
    def ready(self) -> bool:
        """Everything is known that `advance` needs."""
        return len(self._heard) == len(self._live) and not self.over

    def hear(self, slot: int, logprobs: TokenLogprobs) -> None:
        """What may come next in a slot, likeliest first. The same may be heard again of a chain computed anew."""
        assert slot in self._live
        self._heard[slot] = logprobs

    def advance(self) -> list[BeamMove]:
        """Choose. Slots that no move names have no chain any more. When the search is over nothing moves."""
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
        self._heard.clear()
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
        """Finished chains, the best first."""
        return list(self._found)

    def _candidates(self) -> list[_Candidate]:
        """The best of all chains, best first. Equal ones are in order of slots and of what each slot prefers."""
        first_round = not next(iter(self._live.values())).token_ids
        candidates = [
            _Candidate(slot, token_id, beam.logprob + logprob)
            for slot, beam in sorted(self._live.items())
            for token_id, logprob in zip(self._heard[slot].top_token_ids, self._heard[slot].top_logprobs, strict=True)
            if slot == 0 or not first_round  # at the beginning all are the same chain
        ]
        best = sorted(candidates, key=lambda candidate: -candidate.logprob)[: self.num_candidates]
        if not first_round:
            return best
        ends = self._ends
        places = iter(range(self._params.width))
        # They part here, each in a slot that has computed the same already.
        return [c if c.token_id in ends else _Candidate(next(places, 0), c.token_id, c.logprob) for c in best]

    def _finish(self, candidate: _Candidate, length: int, stops: bool) -> None:
        beam = Beam((*self._live[candidate.slot].token_ids, candidate.token_id), candidate.logprob)
        self._found.append(FinishedBeam(beam, self._score(candidate.logprob, length), stops))
        self._found.sort(key=lambda found: -found.score)
        del self._found[self._params.width :]

    def _cannot_improve(self, best_logprob: float, length: int) -> bool:
        if len(self._found) < self._params.width:
            return False
        return self._params.early_stopping or self._score(best_logprob, length) <= self._found[-1].score

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
