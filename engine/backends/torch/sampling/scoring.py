"""Scores of prompt tokens: log probabilities, or the hidden states that an embedding pools.

A step's forward gives logits only for the sampled tokens. Logits for every prompt token would take 600 KB each at a
vocabulary of 150,000. So the step's hidden states are kept, and the output layer is applied to a few rows at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.core_types import Chunk, SampleResult, TokenLogprobs

SLICE_LOGITS = 1 << 23
"""Logits computed at a time, at most: 32 MiB of float32."""


def wants_scores(batch: Sequence[Chunk]) -> bool:
    """Return whether any chunk asks for scores of its prompt tokens."""
    return any(len(chunk.scored) > 0 for chunk in batch)


def scored_rows(chunk: Chunk, first_row: int) -> range:
    """Return the rows of `chunk.scored` in a flattened batch where the chunk begins at `first_row`."""
    shift = first_row - chunk.start
    return range(chunk.scored.start + shift, chunk.scored.stop + shift)


class PromptScorer:
    """Scorer of prompt tokens for one forward of a causal language model of transformers."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        self._model = model
        self._body: Any = model.get_decoder()  # type: ignore[operator]
        self._slice_rows = max(1, SLICE_LOGITS // vocab_size)
        self._hidden: Any = None

    @contextmanager
    def keeping_hidden_states(self) -> Iterator[None]:
        """Keep the hidden states of the forward that runs within the block, for `score` to read."""
        forward = self._body.forward

        def keep(*args: Any, **options: Any) -> Any:
            self._hidden = forward(*args, **options)
            return self._hidden

        with self._replaced(keep):
            yield

    def score(self, batch: Sequence[Chunk], sampled: Sequence[SampleResult]) -> list[SampleResult]:
        """Return one result for each chunk that `answers`: its sampled result with the prompt scores.

        `sampled` has one result for each chunk that `samples`.
        """
        answers: list[SampleResult] = []
        tokens, first_row = iter(sampled), 0
        with self._replaced(lambda *args, **options: self._hidden):
            for chunk in batch:
                if chunk.answers:
                    token = next(tokens) if chunk.samples else SampleResult(-1)
                    rows = scored_rows(chunk, first_row)
                    if chunk.pools:
                        answers.append(self._pool(rows))
                    else:
                        answers.append(replace(token, prompt=tuple(self._score(chunk, rows))))
                first_row += chunk.count
        self._hidden = None
        return answers

    def _pool(self, rows: range) -> SampleResult:
        """Return the sum of the hidden states of `rows`."""
        hidden: Tensor = self._hidden.last_hidden_state[0, rows.start : rows.stop]
        total = hidden.sum(0, dtype=torch.float32).numpy()
        return SampleResult(-1, pooled=total.tobytes(), num_pooled=len(rows))

    def _score(self, chunk: Chunk, rows: range) -> Iterator[TokenLogprobs]:
        sampling = chunk.sequence.sampling
        num_top = (sampling.prompt_logprobs if sampling is not None else None) or 0
        following = chunk.sequence.token_ids[chunk.scored.start + 1 : chunk.scored.stop + 1]
        for first, logits in self._slices(rows):
            targets = torch.tensor(following[first : first + self._slice_rows])
            yield from _logprobs(logits, targets, num_top)

    def _slices(self, rows: range) -> Iterator[tuple[int, Tensor]]:
        """Yield logits [rows, vocab] of a few rows at a time, with the number of the first row."""
        for first in range(0, len(rows), self._slice_rows):
            part = torch.tensor(rows[first : first + self._slice_rows])
            yield first, self._model(input_ids=part[None], use_cache=False, logits_to_keep=part).logits[0]

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Replace the forward of the model's layers within the block."""
        self._body.forward = forward
        try:
            yield
        finally:
            del self._body.forward


def _logprobs(logits: Tensor, targets: Tensor, num_top: int) -> Iterator[TokenLogprobs]:
    """Yield the log probabilities of `targets` [rows] under the model's `logits` [rows, vocab]."""
    logprobs = logits.float().log_softmax(-1)
    chosen: list[float] = logprobs.gather(-1, targets[:, None])[:, 0].tolist()
    values, token_ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    for logprob, top_token_ids, top_logprobs in zip(chosen, token_ids.tolist(), values.tolist(), strict=True):
        yield TokenLogprobs(logprob, tuple(top_token_ids), tuple(top_logprobs))
