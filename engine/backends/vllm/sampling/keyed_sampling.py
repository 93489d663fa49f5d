"""Tandem's own sampler as a logits processor of Model Runner V1.

It is keyed by (seed, choice, position) and derives penalties from the tokens themselves. So a stream that continues on
another worker draws the same tokens, of whichever engine. The processor leaves one possible token in each row that it
samples, and vLLM, asked for the likeliest token, takes it. Rows of requests that want the likeliest token, with no
option that changes it, are left to vLLM. So are grammars, log probabilities and the check for logits that are no
numbers.

It needs the tokens of the step before, so an engine with it does not schedule asynchronously.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams as VllmParams
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality

from engine.backends.torch.sampling.sampler import is_plain, sample
from engine.backends.vllm.sampling.native_sampling import NativeSampling, ends_of, scores_wanted
from engine.core_types import EngineSequence, SamplingParams
from engine.messages.to_engine import Generate
from engine.model.model_dir import ModelDir

ARGUMENT = "tandem"
"""Name of vLLM's extra argument with a request's `Keys`."""


class Keys(NamedTuple):
    """Facts about a request that sampling needs beside its tokens.

    They travel with the request into the process that samples.
    """

    sampling: SamplingParams
    num_prompt: int
    num_emitted_before: int
    choice: int


class KeyedSampling(NativeSampling):
    """Sampling by `TandemSampling`, in the processes of vLLM's workers, with vLLM's structured output."""

    continues_output = False

    def refusal(self, message: Generate) -> str:
        return self._refused_structure(message.sampling)

    def _params(self, sequence: EngineSequence) -> VllmParams:
        wanted = sequence.sampling
        assert wanted is not None
        bare = wanted._replace(structured=None, logprobs=None, prompt_logprobs=None)
        keys = Keys(bare, sequence.num_prompt, sequence.num_emitted_before, sequence.choice)
        is_drawn = not is_plain(_sequence(keys, sequence.token_ids))
        return VllmParams(
            temperature=0.0,
            max_tokens=wanted.max_tokens - sequence.num_sampled,
            stop_token_ids=ends_of(sequence, self._eos_token_ids),
            ignore_eos=True,  # its end tokens are among the ones above
            logprobs=wanted.logprobs,
            prompt_logprobs=scores_wanted(sequence),
            structured_outputs=self._structured(wanted.structured),
            detokenize=False,
            extra_args={ARGUMENT: keys} if is_drawn else None,
        )


def _sequence(keys: Keys, token_ids: Sequence[int]) -> EngineSequence:
    return EngineSequence(
        request_id="",
        token_ids=list(token_ids),
        num_prompt=keys.num_prompt,
        root=b"",
        sampling=keys.sampling,
        priority=0,
        arrival=0,
        num_emitted_before=keys.num_emitted_before,
        choice=keys.choice,
    )


class _Row(NamedTuple):
    """A row of the batch that Tandem samples."""

    sequence: EngineSequence
    output: list[int]
    """vLLM's list of the request's output tokens, which it extends."""

    def place(self) -> EngineSequence:
        """Return the sequence with all its tokens so far."""
        num_known = self.sequence.num_tokens - self.sequence.num_prompt
        self.sequence.token_ids += self.output[num_known:]
        return self.sequence


class TandemSampling(LogitsProcessor):
    """Processor of one model runner's batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        """Rows of the batch that it samples."""
        self._eos_token_ids = ModelDir.open(Path(vllm_config.model_config.model)).eos_token_ids

    @classmethod
    def validate_params(cls, sampling_params: VllmParams) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            keys = (params.extra_args or {}).get(ARGUMENT)
            if keys is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = _Row(_sequence(keys, prompt), output)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Leave one possible token in each row that Tandem samples.

        Every rank must go on with the same tokens, so rank 0 sends its own to the others.
        """
        rows = [row for row in sorted(self._rows) if row < len(logits)]
        if not rows:  # the same on every rank
            return logits
        at = torch.tensor(rows, device=logits.device)
        ranks = get_tp_group()
        if ranks.rank_in_group == 0:
            results = sample(logits[at], [self._rows[row].place() for row in rows], self._eos_token_ids)
            # a row without finite numbers has no token; vLLM counts its NaNs, and the request fails
            drawn = torch.tensor([max(0, result.token_id) for result in results], device=logits.device)
        else:
            drawn = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        if ranks.world_size > 1:
            ranks.broadcast(drawn, src=0)
        logits[at] = float("-inf")
        logits[at, drawn] = 0.0
        return logits
