"""Sampling: one uniform number per token, keyed by (seed, position), and the inverse of the distribution.

The same seed, tokens and options give the same next token on any worker, whoever else is in the batch. Everything
that depends on what came before (penalties, min_tokens) is derived from the tokens themselves, so a request that
moves to another worker goes on as if nothing had happened.

In order: logit bias, penalties, min_tokens; then temperature, min-p, top-k, top-p. Log probabilities are of the model
itself, before all of them.
"""

import struct
from collections import Counter
from collections.abc import Sequence as Seq
from hashlib import blake2b

import torch
from torch import Tensor

from engine.vocabulary import Sampled, SamplingParams, Sequence, TokenLogprobs


def uniform(seed: int, position: int, purpose: bytes = b"token") -> float:
    """A number in [0, 1) that depends on nothing else."""
    digest = blake2b(struct.pack("<QQ", seed, position), key=purpose, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, sequences: Seq[Sequence], eos_token_ids: frozenset[int]) -> list[Sampled]:
    """The next token of each sequence. `logits` is [sequences, vocab] in any float dtype."""
    logits = logits.float()
    params = [_params(sequence) for sequence in sequences]
    adjusted = _adjust(logits, sequences, params, eos_token_ids)
    tokens = adjusted.argmax(-1)
    drawing = [row for row, sampling in enumerate(params) if sampling.temperature > 0]
    if drawing:
        targets = [uniform(params[row].seed, sequences[row].num_tokens) for row in drawing]
        tokens[drawing] = _draw(adjusted[drawing], [params[row] for row in drawing], targets)
    return [
        Sampled(token, _logprobs(logits[row], token, sampling.logprobs))
        for row, (token, sampling) in enumerate(zip(tokens.tolist(), params, strict=True))
    ]


def _params(sequence: Sequence) -> SamplingParams:
    assert sequence.sampling is not None
    return sequence.sampling


def _adjust(
    logits: Tensor, sequences: Seq[Sequence], params: Seq[SamplingParams], eos_token_ids: frozenset[int]
) -> Tensor:
    """Bias, penalties and min_tokens; `logits` itself when nobody asks for any."""
    adjusted = logits
    for row, (sequence, sampling) in enumerate(zip(sequences, params, strict=True)):
        changed = _adjust_row(logits[row], sequence, sampling, eos_token_ids)
        if changed is not None:
            if adjusted is logits:
                adjusted = logits.clone()
            adjusted[row] = changed
    return adjusted


def _adjust_row(
    logits: Tensor, sequence: Sequence, sampling: SamplingParams, eos_token_ids: frozenset[int]
) -> Tensor | None:
    """One row, [vocab]; None when nothing changes."""
    penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    early = sequence.num_sampled < sampling.min_tokens
    if not (sampling.logit_bias or sampling.repetition_penalty != 1 or penalised or early):
        return None
    row = logits.clone()
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        row[list(token_ids)] += torch.tensor(biases, dtype=row.dtype)
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.token_ids)))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if penalised and (counts := Counter(sequence.output_token_ids)):
        seen, times = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=row.dtype)
        row[seen] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if early:
        ends = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids
        row[sorted(ends)] = -torch.inf
    return row


def _draw(logits: Tensor, params: Seq[SamplingParams], targets: Seq[float]) -> Tensor:
    """One token a row, [rows]. `logits` is [rows, vocab]."""
    temperatures = torch.tensor([sampling.temperature for sampling in params], dtype=torch.float64)
    scaled = logits.double() / temperatures[:, None]
    target = torch.tensor(targets, dtype=torch.float64)
    tokens = torch.empty(len(params), dtype=torch.long)
    filtered = [row for row, sampling in enumerate(params) if _filters(sampling)]
    plain = [row for row, sampling in enumerate(params) if not _filters(sampling)]
    if plain:
        tokens[plain] = _invert(scaled[plain].softmax(-1), target[plain])
    if filtered:
        ordered, token_ids = scaled[filtered].sort(dim=-1, descending=True, stable=True)
        probs = _filter(ordered.softmax(-1), [params[row] for row in filtered])
        places = _invert(probs, target[filtered])
        tokens[filtered] = token_ids.gather(-1, places[:, None])[:, 0]
    return tokens


def _filters(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _filter(probs: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Zero what min-p, top-k and then top-p leave out. `probs` is [rows, vocab] in falling order."""
    vocab = probs.shape[-1]
    min_p = torch.tensor([[sampling.min_p] for sampling in params], dtype=probs.dtype)
    top_k = torch.tensor([[sampling.top_k or vocab] for sampling in params])
    top_p = torch.tensor([[sampling.top_p] for sampling in params], dtype=probs.dtype)
    kept = (probs >= min_p * probs[:, :1]) & (torch.arange(vocab) < top_k)
    probs = probs.masked_fill(~kept, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    return probs.masked_fill((top_p < 1) & (before >= top_p), 0.0)


def _invert(probs: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulated share exceeds `target`, by row; never one of probability zero."""
    cumulated = probs.cumsum(-1)
    wanted = (target * cumulated[:, -1])[:, None]
    found = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    last_possible = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.minimum(found, last_possible)


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
