"""Draws one token from each distribution of a batch by inverting the cumulative distribution.

Sorting a whole vocabulary costs more than computing the logits did. So min-p, top-k and top-p look at the CANDIDATES
likeliest tokens first. Only rows whose cut may lie beyond the candidates are sorted as a whole. Both ways give the same
tokens: equal logits are ordered by token id.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.backends.torch.device import staged
from engine.core_types import SamplingParams

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
