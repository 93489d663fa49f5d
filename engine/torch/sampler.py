"""Sampling: one uniform number per token, keyed by (seed, position), and the inverse of the distribution.

The same seed, tokens and options give the same next token on any worker, whoever else is in the batch.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from engine.vocabulary import Sampled, SamplingParams, TokenLogprobs


def uniform(seed: int, position: int, purpose: bytes = b"token") -> float:
    """A number in [0, 1) that depends on nothing else."""
    digest = blake2b(struct.pack("<QQ", seed, position), key=purpose, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[Sampled]:
    """The next token of each row. `logits` [rows, vocab] in any float dtype; rows give options and position."""
    logits = logits.float()
    greedy = logits.argmax(-1).tolist()
    tokens = [
        greedy[row] if sampling.temperature == 0 else _draw(logits[row], sampling, position)
        for row, (sampling, position) in enumerate(rows)
    ]
    return [
        Sampled(token, _logprobs(logits[row], token, sampling.logprobs))
        for row, (token, (sampling, _)) in enumerate(zip(tokens, rows, strict=True))
    ]


def _draw(logits: Tensor, sampling: SamplingParams, position: int) -> int:
    """One row, [vocab]."""
    target = uniform(sampling.seed, position)
    scaled = logits.double() / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return _invert(scaled.softmax(-1), target)
    if 0 < sampling.top_k < scaled.shape[-1]:
        ordered, token_ids = scaled.topk(sampling.top_k)
    else:
        ordered, token_ids = scaled.sort(descending=True, stable=True)
    probs = ordered.softmax(-1)
    if sampling.top_p < 1.0:
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    return int(token_ids[_invert(probs, target)])


def _invert(probs: Tensor, target: float) -> int:
    """The first index whose cumulated share exceeds `target`; never one of probability zero."""
    cumulated = probs.cumsum(-1)
    index = int(torch.searchsorted(cumulated, target * float(cumulated[-1]), right=True))
    last = int(probs.nonzero()[-1]) if index >= probs.shape[-1] else index
    return min(index, last)


def _logprobs(logits: Tensor, token: int, num_top: int | None) -> TokenLogprobs | None:
    if num_top is None:
        return None
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(num_top, logprobs.shape[-1])) if num_top else None
    return TokenLogprobs(
        logprob=float(logprobs[token]),
        top_token_ids=tuple(top.indices.tolist()) if top else (),
        top_logprobs=tuple(top.values.tolist()) if top else (),
    )
