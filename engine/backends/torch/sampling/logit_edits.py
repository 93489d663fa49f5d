"""Changes of single logits before a token is sampled: bias, penalties, and ends that may not come yet.

They follow from the tokens of a sequence. What they need of its tokens is kept with the sequence and advanced by the
new ones, so that a step of a long context costs no more than that of a short one. A state that is missing is made anew
from the tokens, as after a move to another worker.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.torch.memory import staged
from engine.core_types import EngineSequence, SamplingParams

LEAST_REPETITION_PENALTY = 1e-6
"""Smallest repetition penalty: dividing or multiplying by less leaves float32."""
Tokens = NDArray[np.int64]
Values = NDArray[np.float32]


class DistinctTokens:
    """Distinct tokens of a list that grows, and how often each occurs."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        tokens, counts = np.unique(np.array(token_ids, np.int64), return_counts=True)
        self._at = {int(token): place for place, token in enumerate(tokens)}
        self._tokens = tokens
        self._counts = counts.astype(np.float32)
        self._size = len(tokens)
        self.num_seen = len(token_ids)

    @property
    def tokens(self) -> Tokens:
        return self._tokens[: self._size]

    @property
    def counts(self) -> Values:
        """Number of occurrences of each token."""
        return self._counts[: self._size]

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.num_seen += 1
            place = self._at.get(token_id)
            if place is None:
                place = self._at[token_id] = self._size
                if place == len(self._tokens):
                    self._grow()
                self._tokens[place], self._counts[place] = token_id, 0.0
                self._size += 1
            self._counts[place] += 1

    def _grow(self) -> None:
        room = max(16, len(self._tokens))
        self._tokens = np.concatenate((self._tokens, np.zeros(room, np.int64)))
        self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))


class _State:
    """State of one sequence."""

    __slots__ = ("all_tokens", "bias", "ends", "output")

    def __init__(self) -> None:
        self.all_tokens: DistinctTokens | None = None
        self.output: DistinctTokens | None = None
        self.bias: tuple[Tokens, Values] | None = None
        self.ends: tuple[frozenset[int], Tokens] | None = None


_states: WeakKeyDictionary[EngineSequence, _State] = WeakKeyDictionary()


def _counted(sequence: EngineSequence, known: DistinctTokens | None, start: int) -> DistinctTokens:
    """Return the distinct tokens of a sequence from position `start` on."""
    if known is None or known.num_seen > sequence.num_tokens - start:
        return DistinctTokens(sequence.token_ids[start:])
    known.add(sequence.token_ids[start + known.num_seen :])
    return known


@dataclass(slots=True)
class _Edits:
    """Changes of one kind: for each row some tokens, with one value for all of them or one for each."""

    rows: list[int]
    tokens: list[Tokens]
    values: list[Values]

    @classmethod
    def none(cls) -> "_Edits":
        return cls([], [], [])

    def add(self, row: int, tokens: Tokens, values: Values | float) -> None:
        self.rows.append(row)
        self.tokens.append(tokens)
        self.values.append(np.full(len(tokens), values, np.float32) if isinstance(values, float) else values)

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the indices (rows, tokens) and the values, on the device."""
        rows = np.repeat(np.array(self.rows, np.int64), [len(tokens) for tokens in self.tokens])
        tokens, values = np.concatenate(self.tokens), np.concatenate(self.values)
        where = staged(rows, torch.long, device), staged(tokens, torch.long, device)
        return where, staged(values, torch.float32, device)


def adjusted(
    logits: Tensor, sequences: Sequence[EngineSequence], params: Sequence[SamplingParams], eos_token_ids: frozenset[int]
) -> Tensor:
    """Apply bias, penalties and min_tokens to logits [sequences, vocab].

    Returns `logits` itself when no row asks for any, and a copy otherwise.
    """
    biased, repeated, penalised, held_back = (_Edits.none() for _ in range(4))
    for row, (sequence, sampling) in enumerate(zip(sequences, params, strict=True)):
        penalises = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        ends = _held_back(sequence, sampling, eos_token_ids)
        if not (sampling.logit_bias or sampling.repetition_penalty != 1 or penalises or ends):
            continue
        if (state := _states.get(sequence)) is None:
            state = _states[sequence] = _State()
        if sampling.logit_bias:
            if state.bias is None:
                tokens, biases = zip(*sampling.logit_bias, strict=True)
                state.bias = np.array(tokens, np.int64), np.array(biases, np.float32)
            biased.add(row, *state.bias)
        if sampling.repetition_penalty != 1:
            state.all_tokens = _counted(sequence, state.all_tokens, 0)
            penalty = max(sampling.repetition_penalty, LEAST_REPETITION_PENALTY)
            repeated.add(row, state.all_tokens.tokens, penalty)
        if penalises:
            state.output = _counted(sequence, state.output, sequence.num_prompt - sequence.num_emitted_before)
            counts = np.float32(sampling.frequency_penalty) * state.output.counts
            penalised.add(row, state.output.tokens, np.float32(sampling.presence_penalty) + counts)
        if ends:
            if state.ends is None or state.ends[0] != ends:
                state.ends = ends, np.array(sorted(ends), np.int64)
            held_back.add(row, state.ends[1], -float("inf"))
    if not (biased.rows or repeated.rows or penalised.rows or held_back.rows):
        return logits
    changed = logits.clone()
    if biased.rows:
        where, amounts = biased.on(logits.device)
        changed[where] += amounts
    if repeated.rows:
        where, amounts = repeated.on(logits.device)
        before = changed[where]
        changed[where] = torch.where(before > 0, before / amounts, before * amounts)
    if penalised.rows:
        where, amounts = penalised.on(logits.device)
        changed[where] -= amounts
    if held_back.rows:
        _hold_back(changed, held_back, params)
    return changed


def _hold_back(changed: Tensor, ends: _Edits, params: Sequence[SamplingParams]) -> None:
    """Make the held-back ends impossible, except where a grammar allows only an end."""
    structured = sorted(row for row in set(ends.rows) if params[row].structured is not None)
    before = changed[structured]
    where, amounts = ends.on(changed.device)
    changed[where] = amounts
    if structured:
        at = staged(structured, torch.long, changed.device)
        possible = (changed[at] > -torch.inf).any(-1, keepdim=True)
        changed[at] = torch.where(possible, changed[at], before)


def _held_back(sequence: EngineSequence, sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the ends that may not come yet.

    Ends are held back by min_tokens, and by ignore_eos with a grammar that still allows other tokens.
    """
    early = sampling.stop_token_ids if sequence.num_sampled < sampling.min_tokens else frozenset()
    if sampling.structured is not None and sampling.ignore_eos:
        return early | eos_token_ids
    return early if sampling.ignore_eos or sequence.num_sampled >= sampling.min_tokens else early | eos_token_ids
