"""Sampling: one uniform number per token, keyed by (seed, choice, position), and the inverse of the distribution.

The same seed, choice, tokens and options give the same next token on any worker, whoever else is in the batch.
Everything that depends on what came before (penalties, min_tokens) is derived from the tokens themselves, so a request
that moves to another worker goes on as if nothing had happened.

In order: the grammar of a structured output; logit bias, penalties, min_tokens; then temperature, min-p, top-k, top-p.
Log probabilities are of the model itself, before all of them.

What the grammar forbids is impossible and nothing later brings it back: minus infinity stays that under a bias or a
penalty. It allows the model's end tokens only where the output is complete. min_tokens and ignore_eos hold an end back
while anything else may follow; where nothing may, it is sampled all the same, and the request finishes by it.
"""

import struct
from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from engine.backends.torch.device import read_back, staged
from engine.backends.torch.drawing import draw
from engine.core_types import (
    AnyPlace,
    Chunk,
    RequestFailure,
    SampleResult,
    SamplingParams,
    TokenLogprobs,
    verified,
)
from engine.sampling.grammar import Grammars, TokenMasks

LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: nothing else would be drawn, and quotients would leave float32."""
LEAST_REPETITION_PENALTY = 1e-6
"""What divides by less is no number any more in float32, and what is multiplied by less is none either."""
NO_NUMBERS = RequestFailure("model", "its logits are no finite numbers; dtype float16 may be too small for it")
_WORD = 32
LIKELIEST: Callable[[Tensor], Tensor] = partial(torch.argmax, dim=-1)


def uniform(seed: int, position: int, choice: int = 0, purpose: bytes = b"token") -> float:
    """A number in [0, 1) that depends on nothing else."""
    keyed = struct.pack("<QQ", seed, position) if choice == 0 else struct.pack("<QQQ", seed, position, choice)
    digest = blake2b(keyed, key=purpose, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_chunks(
    logits: Tensor,
    chunks: Seq[Chunk],
    eos_token_ids: frozenset[int],
    grammars: Grammars | None = None,
    argmax: Callable[[Tensor], Tensor] = LIKELIEST,
) -> list[SampleResult]:
    """The answer to each of these chunks, which all sample: the token at its end, and those after guesses that were
    right. `logits` is [places, vocab], of all their places in order; the rest as for `sample`.

    What is sampled after a guess is what would be sampled after the token itself, by the same number: so guesses change
    how soon tokens come, and not which.
    """
    places = [place for chunk in chunks for place in chunk.places]
    answers = iter(sample(logits, places, eos_token_ids, grammars, argmax))
    return [
        verified(chunk.draft_tokens, [next(answers) for _ in range(1 + len(chunk.draft_tokens))]) for chunk in chunks
    ]


def sample(
    logits: Tensor,
    places: Seq[AnyPlace],
    eos_token_ids: frozenset[int],
    grammars: Grammars | None = None,
    argmax: Callable[[Tensor], Tensor] = LIKELIEST,
) -> list[SampleResult | None]:
    """The next token at each place, or why there is none. `logits` is [places, vocab] in any float dtype.

    `grammars` holds the states of structured outputs; without it no sequence may ask for one. `argmax` gives
    the first largest of each contiguous row. None: at a place after a guess that the grammar did not allow.
    """
    params = [_params(place) for place in places]
    if all(_plain(place, sampling) for place, sampling in zip(places, params, strict=True)):
        return [_of_token(token) for token in read_back(_finite(argmax(logits), logits))]
    masks = _masks(places, params, grammars)  # first: a GPU is still busy with the logits meanwhile
    logits = logits.float()
    allowed = logits if masks is None else _mask(logits, masks)
    adjusted = _adjust(allowed, places, params, eos_token_ids)
    likeliest = argmax(adjusted)
    tokens = likeliest.clone()
    drawing = [row for row, sampling in enumerate(params) if not _greedy(sampling)]
    if drawing:
        targets = [uniform(params[row].seed, places[row].num_tokens, places[row].choice) for row in drawing]
        at = staged(drawing, torch.long, logits.device)
        rows = adjusted if len(drawing) == len(params) else adjusted[at]
        tokens[at] = draw(rows, [params[row] for row in drawing], targets)
    chosen = read_back(torch.where(_finite(likeliest, adjusted) < 0, -1, tokens))
    told = _logprobs(logits, chosen, params)
    sampled: list[SampleResult | None] = [
        _of_token(token) if token < 0 else SampleResult(token, told.get(row)) for row, token in enumerate(chosen)
    ]
    if masks is not None:
        for row, failure in masks.failures.items():
            sampled[row] = SampleResult(-1, failure=failure)
        for row in masks.unknown:
            sampled[row] = None
    return sampled


def _params(place: AnyPlace) -> SamplingParams:
    assert place.sampling is not None
    return place.sampling


def _greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < LEAST_TEMPERATURE


def _finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """The likeliest tokens of rows, [rows]; -1 where the logit of one is no finite number."""
    return torch.where(logits.gather(-1, tokens[:, None])[:, 0].isfinite(), tokens, -1)


def _of_token(token: int) -> SampleResult:
    return SampleResult(token) if token >= 0 else SampleResult(-1, failure=NO_NUMBERS)


def _plain(place: AnyPlace, sampling: SamplingParams) -> bool:
    """Nothing but the likeliest token is wanted, and nothing changes which that is."""
    changed = sampling.logit_bias or sampling.repetition_penalty != 1 or sampling.structured is not None
    penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    early = place.num_sampled < sampling.min_tokens
    return _greedy(sampling) and sampling.logprobs is None and not (changed or penalised or early)


def _masks(places: Seq[AnyPlace], params: Seq[SamplingParams], grammars: Grammars | None) -> TokenMasks | None:
    if all(sampling.structured is None for sampling in params):
        return None
    assert grammars is not None
    return grammars.masks(places)


def _mask(logits: Tensor, masks: TokenMasks) -> Tensor:
    """A copy in which tokens that a row's grammar forbids are impossible; rows without one are as they were."""
    packed = torch.from_numpy(masks.bits).to(logits.device)
    bits = packed[:, :, None] >> torch.arange(_WORD, dtype=torch.int32, device=logits.device) & 1
    width = logits.shape[-1]
    allowed = torch.zeros(len(masks.rows), width, dtype=torch.bool, device=logits.device)
    known = bits.flatten(1)[:, :width]  # of more logits than there are tokens, the rest is padding
    allowed[:, : known.shape[-1]] = known.bool()
    masked = logits.clone()
    masked[masks.rows] = logits[masks.rows].masked_fill(~allowed, -torch.inf)
    return masked


class _Edits:
    """Single logits that are to be changed: of which rows, of which tokens, and by what."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[int] = []
        self._values: list[float] = []

    def add(self, row: int, tokens: Collection[int], values: Seq[float]) -> None:
        """One value for all of the tokens, or one for each; the same kind in every call."""
        self.rows.append(row)
        self._counts.append(len(tokens))
        self._tokens += tokens
        self._values += values

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Where, and by what."""
        counts, total = staged(self._counts, torch.long, device), len(self._tokens)
        rows = staged(self.rows, torch.long, device).repeat_interleave(counts, output_size=total)
        values = staged(self._values, torch.float32, device)
        if len(values) != total:
            values = values.repeat_interleave(counts, output_size=total)
        return (rows, staged(self._tokens, torch.long, device)), values


def _adjust(
    logits: Tensor, places: Seq[AnyPlace], params: Seq[SamplingParams], eos_token_ids: frozenset[int]
) -> Tensor:
    """Bias, penalties and min_tokens; `logits` itself when nobody asks for any."""
    biased, repeated, penalised, held_back = _Edits(), _Edits(), _Edits(), _Edits()
    for row, (place, sampling) in enumerate(zip(places, params, strict=True)):
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            biased.add(row, tokens, biases)
        if sampling.repetition_penalty != 1:
            repeated.add(row, place.token_ids, [max(sampling.repetition_penalty, LEAST_REPETITION_PENALTY)])
        if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
            presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
            counts = Counter(place.output_token_ids)
            penalised.add(row, counts, [presence + frequency * times for times in counts.values()])
        if ends := _held_back(place, sampling, eos_token_ids):
            held_back.add(row, ends, [-torch.inf])
    if not (biased.rows or repeated.rows or penalised.rows or held_back.rows):
        return logits
    adjusted = logits.clone()
    if biased.rows:
        where, values = biased.on(logits.device)
        adjusted[where] += values
    if repeated.rows:
        where, values = repeated.on(logits.device)
        before = adjusted[where]  # of a token that was seen twice, twice the same
        adjusted[where] = torch.where(before > 0, before / values, before * values)
    if penalised.rows:
        where, values = penalised.on(logits.device)
        adjusted[where] -= values
    if held_back.rows:
        _hold_back(adjusted, held_back, params)
    return adjusted


def _hold_back(adjusted: Tensor, ends: _Edits, params: Seq[SamplingParams]) -> None:
    """Not where a grammar allows nothing but an end."""
    structured = sorted(row for row in set(ends.rows) if params[row].structured is not None)
    before = adjusted[structured]
    where, values = ends.on(adjusted.device)
    adjusted[where] = values
    if structured:
        at = staged(structured, torch.long, adjusted.device)
        possible = (adjusted[at] > -torch.inf).any(-1, keepdim=True)
        adjusted[at] = torch.where(possible, adjusted[at], before)


def _held_back(place: AnyPlace, sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Ends that may not come yet, by min_tokens, or while there is a choice, by ignore_eos with a grammar."""
    early = sampling.stop_token_ids if place.num_sampled < sampling.min_tokens else frozenset()
    if sampling.structured is not None and sampling.ignore_eos:
        return early | eos_token_ids
    return early if sampling.ignore_eos or place.num_sampled >= sampling.min_tokens else early | eos_token_ids


def _logprobs(logits: Tensor, tokens: Seq[int], params: Seq[SamplingParams]) -> dict[int, TokenLogprobs]:
    """Of the rows that want them and have a token. How many of the likeliest others want changes no row's: equal ones
    could come in another order."""
    by_count: dict[int, list[int]] = {}
    for row, (token, sampling) in enumerate(zip(tokens, params, strict=True)):
        if sampling.logprobs is not None and token >= 0:
            by_count.setdefault(sampling.logprobs, []).append(row)
    told: dict[int, TokenLogprobs] = {}
    for count, rows in by_count.items():
        logprobs = logits[staged(rows, torch.long, logits.device)].log_softmax(-1)
        wanted = staged([tokens[row] for row in rows], torch.long, logits.device)
        chosen: list[float] = logprobs.gather(-1, wanted[:, None])[:, 0].tolist()
        values, token_ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        likeliest = zip(token_ids.tolist(), values.tolist(), strict=True)
        for row, logprob, (top_token_ids, top_logprobs) in zip(rows, chosen, likeliest, strict=True):
            told[row] = TokenLogprobs(logprob, tuple(top_token_ids), tuple(top_logprobs))
    return told
