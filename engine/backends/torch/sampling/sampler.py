"""Sampling: one uniform number per token, keyed by (seed, choice, position), and the inverse of the distribution.

The same seed, choice, tokens and options give the same next token on any worker, whatever else is in the batch.
Penalties and min_tokens are derived from the tokens themselves, so a request that moves to another worker continues
identically.

The order is: the grammar of a structured output; logit bias, penalties, min_tokens; then temperature, min-p, top-k,
top-p. Log probabilities are the model's own, before all of these.

A token that the grammar forbids stays at minus infinity under any bias or penalty. The grammar allows the model's end
tokens only where the output is complete. min_tokens and ignore_eos hold an end back while another token may follow;
where none may, the end is sampled and the request finishes.

Draws one token from each distribution of a batch by inverting the cumulative distribution.

Sorting a whole vocabulary costs more than computing the logits did. So min-p, top-k and top-p look at the CANDIDATES
likeliest tokens first. Only rows whose cut may lie beyond the candidates are sorted as a whole. Both ways give the same
tokens: equal logits are ordered by token id.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.backends.torch.memory import read_back, staged
from engine.backends.torch.sampling.logit_edits import adjusted
from engine.core_types import (
    EngineSequence,
    RequestFailure,
    SampleResult,
    SamplingParams,
    TokenLogprobs,
)
from engine.sampling.grammar import Grammars, TokenMasks

CANDIDATES = 1024, 16_384
"""Numbers of likeliest tokens to look at, one after the other.

The second serves nearly flat distributions: it still takes a third of the time of sorting 150,000 tokens."""
BLOCK = 512
"""Weights summed at a time, so that the search for one token cumulates few of them."""


def draw(logits: Tensor, params: Sequence[SamplingParams], targets: Sequence[float]) -> Tensor:
    """Draw one token a row, int64 [rows].

    `logits` is float32 [rows, vocab]; `targets` are numbers in [0, 1).
    """
    device = logits.device
    temperatures = staged([sampling.temperature for sampling in params], torch.float32, device)
    scaled = logits / temperatures[:, None]
    target = staged(targets, torch.float64, device)
    tokens = torch.empty(len(params), dtype=torch.long, device=device)
    filtered = [row for row, sampling in enumerate(params) if _filters(sampling)]
    plain = [row for row, sampling in enumerate(params) if not _filters(sampling)]
    if plain:
        at = staged(plain, torch.long, device)
        tokens[at] = _invert(_weights(_rows(scaled, at)), target[at])
    if filtered:
        at = staged(filtered, torch.long, device)
        tokens[at] = _draw_filtered(_rows(scaled, at), [params[row] for row in filtered], target[at])
    return tokens


def _filters(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _rows(scaled: Tensor, rows: Tensor) -> Tensor:
    return scaled if len(rows) == len(scaled) else scaled[rows]


def _weights(scaled: Tensor) -> Tensor:
    """Return unnormalised probabilities, in which the likeliest token has weight 1."""
    return (scaled - scaled.amax(-1, keepdim=True)).exp_()


def _draw_filtered(
    scaled: Tensor, params: Sequence[SamplingParams], target: Tensor, counts: Sequence[int] | None = None
) -> Tensor:
    """Draw from the likeliest candidates, and again from the next number in `counts` where those are too few."""
    count, *more = counts or CANDIDATES
    if scaled.is_cuda or scaled.shape[-1] <= count:  # a GPU sorts faster than it would answer which way to take
        return _draw_ordered(scaled, params, target)
    values, token_ids = scaled.topk(count, dim=-1)
    token_ids, order = token_ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    token_ids = token_ids.gather(-1, order)
    most = values[:, :1]
    total = (scaled - most).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    probs, complete = _filter((values - most).double().exp(), total, params)
    # The cut must lie before the last candidate, and before other tokens as likely as it: which of equal tokens are
    # candidates is arbitrary.
    kept = (probs > 0).sum(-1, keepdim=True).clamp(min=1)
    covered = complete & (values.gather(-1, kept - 1) > values[:, -1:])[:, 0]
    tokens = token_ids.gather(-1, _invert(probs, target)[:, None])[:, 0]
    if not bool(covered.all()):
        beyond = (~covered).nonzero()[:, 0]
        others = [params[row] for row in beyond.tolist()]
        next_way = partial(_draw_filtered, counts=more) if more else _draw_ordered
        tokens[beyond] = next_way(scaled[beyond], others, target[beyond])
    return tokens


def _draw_ordered(scaled: Tensor, params: Sequence[SamplingParams], target: Tensor) -> Tensor:
    """Draw after sorting the whole vocabulary."""
    values, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    weights = (values - values[:, :1]).double().exp()
    probs, _ = _filter(weights, weights.sum(-1, keepdim=True), params)
    return token_ids.gather(-1, _invert(probs, target)[:, None])[:, 0]


def _filter(weights: Tensor, total: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Zero the weights that min-p, top-k and then top-p leave out.

    `weights` is [rows, n] in falling order: the first n weights of distributions whose weights sum to `total` [rows,
    1]. Also returns which rows need no weight beyond these n, [rows].
    """
    count, device = weights.shape[-1], weights.device
    min_p = staged([sampling.min_p for sampling in params], weights.dtype, device)[:, None]
    top_k = staged([sampling.top_k or 2**62 for sampling in params], torch.long, device)[:, None]
    top_p = staged([sampling.top_p for sampling in params], weights.dtype, device)[:, None]
    kept = (weights >= min_p * weights[:, :1]) & (torch.arange(count, device=device) < top_k)
    whole = ~kept[:, -1:]  # rows whose kept tokens, by min-p and top-k, end before the last candidate
    weights = weights.masked_fill(~kept, 0.0)
    total = torch.where(whole, weights.sum(-1, keepdim=True), total)
    before = weights.cumsum(-1) - weights
    cut = (top_p < 1) & (before >= top_p * total)
    # A min-p or top-k limit beyond the last candidate would also keep tokens whose weight is not known here.
    unlimited = (min_p == 0) & (top_k >= 2**62)
    complete = whole | (unlimited & cut[:, -1:])
    return weights.masked_fill(cut, 0.0), complete[:, 0]


def _invert(weights: Tensor, target: Tensor) -> Tensor:
    """Return each row's first index whose cumulative share exceeds `target` [rows], never one of weight zero."""
    rows, count = weights.shape
    blocks = pad(weights, (0, -count % BLOCK)).view(rows, -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    block, rest = _find(sums, target * sums.sum(-1))
    inside = blocks[torch.arange(rows, device=weights.device), block].double()
    place, _ = _find(inside, rest)
    return (block * BLOCK + place).clamp(max=count - 1)  # any valid index for a row of NaN


def _find(weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index at which the cumulative weights exceed `wanted` [rows], and the remainder within it."""
    cumulated = weights.cumsum(-1)
    positions = torch.searchsorted(cumulated, wanted[:, None], right=True)
    last_possible = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1, keepdim=True)
    positions = torch.minimum(positions, last_possible)
    before = cumulated.gather(-1, positions) - weights.gather(-1, positions)
    return positions[:, 0], wanted - before[:, 0]


LEAST_TEMPERATURE = 1e-5
"""Temperature below which the likeliest token is taken: sampling would draw nothing else, and quotients would leave
float32."""
NO_NUMBERS = RequestFailure("model", "its logits are not finite numbers; the range of dtype float16 may be too small")
_WORD = 32
LIKELIEST: Callable[[Tensor], Tensor] = partial(torch.argmax, dim=-1)


def uniform(seed: int, position: int, choice: int = 0) -> float:
    """Return a number in [0, 1) that depends only on the arguments."""
    keyed = struct.pack("<QQ", seed, position) if choice == 0 else struct.pack("<QQQ", seed, position, choice)
    digest = blake2b(keyed, key=b"token", digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits: Tensor,
    sequences: Sequence[EngineSequence],
    eos_token_ids: frozenset[int],
    grammars: Grammars | None = None,
    argmax: Callable[[Tensor], Tensor] = LIKELIEST,
) -> list[SampleResult]:
    """Return the next token of each sequence, or the reason why there is none.

    `logits` is [sequences, vocab] in any float dtype. `grammars` holds the states of structured outputs; without it no
    sequence may ask for one. `argmax` gives the first largest of each contiguous row.
    """
    params = [_params(sequence) for sequence in sequences]
    plain = [_plain(sequence, sampling) for sequence, sampling in zip(sequences, params, strict=True)]
    if all(plain):
        return [_of_token(token) for token in read_back(_finite(argmax(logits), logits))]
    if any(plain):  # requests with options cost the others nothing
        sampled: dict[int, SampleResult] = {}
        for kind in (True, False):
            part = [row for row, row_is_plain in enumerate(plain) if row_is_plain == kind]
            own = logits[staged(part, torch.long, logits.device)]
            drawn = sample(own, [sequences[row] for row in part], eos_token_ids, grammars, argmax)
            sampled |= zip(part, drawn, strict=True)
        return [sampled[row] for row in range(len(sequences))]
    masks = _masks(sequences, params, grammars)  # first: a GPU is still busy with the logits meanwhile
    logits = logits.float()
    allowed = logits if masks is None else _mask(logits, masks)
    changed = adjusted(allowed, sequences, params, eos_token_ids)
    likeliest = argmax(changed)
    tokens = likeliest.clone()
    drawing = [row for row, sampling in enumerate(params) if not _greedy(sampling)]
    if drawing:
        targets = [uniform(params[row].seed, sequences[row].num_tokens, sequences[row].choice) for row in drawing]
        at = staged(drawing, torch.long, logits.device)
        rows = changed if len(drawing) == len(params) else changed[at]
        tokens[at] = draw(rows, [params[row] for row in drawing], targets)
    chosen = read_back(torch.where(_finite(likeliest, changed) < 0, -1, tokens))
    logprobs = _logprobs(logits, chosen, params)
    results = [
        _of_token(token) if token < 0 else SampleResult(token, logprobs.get(row)) for row, token in enumerate(chosen)
    ]
    if masks is not None:
        for row, failure in masks.failures.items():
            results[row] = SampleResult(-1, failure=failure)
    return results


def _params(sequence: EngineSequence) -> SamplingParams:
    assert sequence.sampling is not None
    return sequence.sampling


def _greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < LEAST_TEMPERATURE


def _finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return the likeliest token of each row, [rows]; -1 where its logit is not finite.

    Every `argmax` gives the place of a NaN where a row has one.
    """
    return torch.where(logits.gather(-1, tokens[:, None])[:, 0].isfinite(), tokens, -1)


def _of_token(token: int) -> SampleResult:
    return SampleResult(token) if token >= 0 else SampleResult(-1, failure=NO_NUMBERS)


def is_plain(sequence: EngineSequence) -> bool:
    """Return whether the likeliest token is wanted and no option changes which one that is."""
    return _plain(sequence, _params(sequence))


def _plain(sequence: EngineSequence, sampling: SamplingParams) -> bool:
    changed = sampling.logit_bias or sampling.repetition_penalty != 1 or sampling.structured is not None
    penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    early = sequence.num_sampled < sampling.min_tokens
    return _greedy(sampling) and sampling.logprobs is None and not (changed or penalised or early)


def _masks(
    sequences: Sequence[EngineSequence], params: Sequence[SamplingParams], grammars: Grammars | None
) -> TokenMasks | None:
    if all(sampling.structured is None for sampling in params):
        return None
    assert grammars is not None
    return grammars.masks(sequences)


def _mask(logits: Tensor, masks: TokenMasks) -> Tensor:
    """Return a copy in which tokens that a row's grammar forbids are impossible.

    Rows without a grammar are unchanged.
    """
    packed = torch.from_numpy(masks.bits).to(logits.device)
    bits = packed[:, :, None] >> torch.arange(_WORD, dtype=torch.int32, device=logits.device) & 1
    width = logits.shape[-1]
    allowed = torch.zeros(len(masks.rows), width, dtype=torch.bool, device=logits.device)
    known = bits.flatten(1)[:, :width]  # logits beyond the vocabulary are padding
    allowed[:, : known.shape[-1]] = known.bool()
    masked = logits.clone()
    masked[masks.rows] = logits[masks.rows].masked_fill(~allowed, -torch.inf)
    return masked


def _logprobs(logits: Tensor, tokens: Sequence[int], params: Sequence[SamplingParams]) -> dict[int, TokenLogprobs]:
    """Return the log probabilities of the rows that ask for them and have a token.

    Rows that ask for the same number of top tokens are computed together. So another row's number cannot change the
    order of equal logits.
    """
    by_count: dict[int, list[int]] = {}
    for row, (token, sampling) in enumerate(zip(tokens, params, strict=True)):
        if sampling.logprobs is not None and token >= 0:
            by_count.setdefault(sampling.logprobs, []).append(row)
    by_row: dict[int, TokenLogprobs] = {}
    for count, rows in by_count.items():
        logprobs = logits[staged(rows, torch.long, logits.device)].log_softmax(-1)
        wanted = staged([tokens[row] for row in rows], torch.long, logits.device)
        chosen: list[float] = logprobs.gather(-1, wanted[:, None])[:, 0].tolist()
        values, token_ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        likeliest = zip(token_ids.tolist(), values.tolist(), strict=True)
        for row, logprob, (top_token_ids, top_logprobs) in zip(rows, chosen, likeliest, strict=True):
            by_row[row] = TokenLogprobs(logprob, tuple(top_token_ids), tuple(top_logprobs))
    return by_row
