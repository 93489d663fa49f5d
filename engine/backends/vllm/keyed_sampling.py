"""Tandem's own sampler as a logits processor of Model Runner V1.

It is keyed by (seed, choice, position) and derives grammars and penalties from the tokens themselves. So a stream that
continues on another worker draws the same tokens, of whichever engine. The processor leaves one possible token in each
row that it samples, and vLLM, asked for the likeliest token, takes it. Rows of requests that want the likeliest token,
with no option that changes it, are left to vLLM, and only checked for logits that are no numbers.

It needs the tokens of the step before, so an engine with it does not schedule asynchronously.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams as VllmParams
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality

from engine.backends.torch.sampler import NO_NUMBERS, is_plain, sample
from engine.backends.vllm.sampling import FILLS, Sampling, ends_of, scores_wanted
from engine.core_types import SampleResult, Sequence
from engine.sampling.grammar import Grammars

ARGUMENT = "tandem"
"""Name of vLLM's extra argument with a request's id in `KeyedSampling.sequences`."""


class KeyedSampling(Sampling):
    """Sequences that this process samples, and the samples of the last step.

    Written by the main thread between steps, and by the compute thread during one.
    """

    def __init__(self) -> None:
        self.sequences: dict[str, Sequence] = {}
        """Sequences by vLLM's request id."""
        self.samples: dict[str, SampleResult] = {}
        self.eos_token_ids: frozenset[int] = frozenset()
        self.grammars: Grammars | None = None

    def request(
        self, sequence: Sequence, request_id: str, arguments: dict[str, Any], wake: Callable[[], None]
    ) -> Request:
        wanted = sequence.sampling
        if wanted is None or sequence.only_fills:
            return Request(request_id, self.fill_tokens(sequence), FILLS, **arguments)
        self.sequences[request_id] = sequence
        params = VllmParams(
            temperature=0.0,
            max_tokens=wanted.max_tokens - sequence.num_sampled,
            stop_token_ids=ends_of(sequence, self.eos_token_ids),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=scores_wanted(sequence),
            extra_args={ARGUMENT: request_id},
        )
        return Request(request_id, list(sequence.token_ids), params, **arguments)

    def results(self, sequence: Sequence, request: Request, output: Any) -> Seq[SampleResult]:
        sampled = self.samples.pop(request.request_id, None)
        if sampled is not None and sampled.failure is not None:
            return [sampled]
        return [sampled or SampleResult(token_id) for token_id in output.new_token_ids]

    def forget(self, request_id: str) -> None:
        self.sequences.pop(request_id, None)
        self.samples.pop(request_id, None)


keyed_sampling = KeyedSampling()
"""State shared within this process, since vLLM constructs the processor itself."""


class TandemSampling(LogitsProcessor):
    """Processor of one model runner's batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, str] = {}
        """Request id by row of the batch."""

    @classmethod
    def validate_params(cls, sampling_params: VllmParams) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, _ in batch_update.added:
            request_id = (params.extra_args or {}).get(ARGUMENT)
            if request_id is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = request_id
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Leave one possible token in each row that Tandem samples.

        Rank 0 has the sequences and draws; every rank must go on with the same tokens, so it sends them to the others.
        """
        if (ranks := get_tp_group()).world_size == 1:
            return self._draw(logits)[0]
        if ranks.rank_in_group == 0:
            logits, drawn = self._draw(logits)
            ranks.broadcast(drawn, src=0)
            return logits
        drawn = ranks.broadcast(torch.empty(len(logits), dtype=torch.int64, device=logits.device), src=0)
        return _only(logits, drawn)

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the token drawn for each row: int64 [rows], -1 where vLLM takes the likeliest."""
        rows, places, plain = list[int](), list[Sequence](), list[int]()
        for row, request_id in self._rows.items():
            sequence = keyed_sampling.sequences.get(request_id)
            if sequence is None or row >= len(logits):
                continue
            if is_plain(sequence):
                plain.append(row)
            else:
                rows.append(row)
                places.append(sequence)
        drawn = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
        if plain:
            self._check(logits, plain)
        if not rows:
            return logits, drawn
        at = torch.tensor(rows, device=logits.device)
        results = sample(logits[at], places, keyed_sampling.eos_token_ids, keyed_sampling.grammars)
        for row, result in zip(rows, results, strict=True):
            assert result is not None  # only a place after a draft token has none
            keyed_sampling.samples[self._rows[row]] = result
        drawn[at] = torch.tensor([max(0, result.token_id) for result in results if result], device=logits.device)
        return _only(logits, drawn), drawn

    def _check(self, logits: Tensor, plain: list[int]) -> None:
        """Fail the requests whose likeliest logit is no finite number: vLLM would take the token of a NaN."""
        rows = logits if len(plain) == len(logits) else logits[torch.tensor(plain, device=logits.device)]
        finite = rows.amax(-1).isfinite().tolist()
        if not all(finite):
            order = range(len(logits)) if len(plain) == len(logits) else plain
            for row, is_finite in zip(order, finite, strict=True):
                if not is_finite:
                    keyed_sampling.samples[self._rows[row]] = SampleResult(-1, failure=NO_NUMBERS)


def _only(logits: Tensor, drawn: Tensor) -> Tensor:
    """Leave only the drawn token possible in each row that has one."""
    at = (drawn >= 0).nonzero().squeeze(1)
    logits[at] = float("-inf")
    logits[at, drawn[at]] = 0.0
    return logits
