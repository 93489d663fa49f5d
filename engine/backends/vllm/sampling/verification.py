"""Coupled verification of draft tokens, for Model Runner V2.

vLLM's own verification accepts a draft by a random number of its own, so the tokens of a seeded stream depend on where
drafts begin, and a stream that continues on another worker has other tokens. Coupled verification draws the token of
each position from the noise of (seed, position), as without drafts, and accepts a draft if it is that token. A greedy
draft is accepted as often as by vLLM's, and the tokens are those of a stream without speculation.

Drafts that are sampled themselves (`draft_sample_method: probabilistic`), and the methods `block` and `synthetic` of
`rejection_sample_method`, keep vLLM's own verification: the distribution is right, the tokens of a seed are not.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


class CoupledVerification(RejectionSampler):
    """Sampler of batches with drafts, whose tokens are those of batches without."""

    def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Verify the drafts of a batch; `logits` are [positions, vocabulary], of all requests in turn."""
        output = super().__call__(logits, input_batch, *args, **kwargs)
        if output.num_nans is not None and len(output.num_nans) != input_batch.num_reqs:
            # vLLM counts them by position, and reads them by request
            output.num_nans = sums_of(output.num_nans, input_batch.cu_num_logits)
        return output

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if draft_logits is not None or self.use_block_verification or self.synthetic_conditional_rates is not None:
            return super()._verify(  # type: ignore[no-any-return]
                logits,
                draft_logits,
                draft_sampled,
                pos,
                cu_num_logits,
                idx_mapping,
                idx_mapping_np,
                expanded_idx_mapping,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                *(() if verify_draft_sampled is None else (verify_draft_sampled,)),
            )
        states = self.sampler.sampling_states
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        drawn = gumbel_sample(
            processed,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        drafts = draft_sampled if verify_draft_sampled is None else verify_draft_sampled  # vLLM 0.31 has one of them
        return processed, *accepted(drawn, drafts, cu_num_logits, self.num_speculative_steps)


def accepted(drawn: Tensor, drafts: Tensor, ends: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of each request's positions, [requests, 1 + num_drafts], and how many of them count.

    `drawn` and `drafts` are [positions]: the token drawn at a position, and the one that the model read there. A
    request's positions are [ends[i], ends[i + 1]); the first one read no draft. -1 is never drawn.
    """
    at = ends[:-1, None].long() + torch.arange(num_drafts + 1, device=drawn.device)
    last = len(drawn) - 1
    tokens = drawn[at.clamp(max=last)]
    # the draft of a position's own token is what the position after it read
    guesses = drafts[(at + 1).clamp(max=last)]
    is_right = (at + 1 < ends[1:, None]) & (tokens == guesses)
    return tokens, is_right.int().cumprod(1).sum(1).int() + 1


def sums_of(values: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of each range [ends[i], ends[i + 1]) of `values`, as int32."""
    before = torch.nn.functional.pad(values.cumsum(0), (1, 0))
    bounds = before[ends.long()]
    return (bounds[1:] - bounds[:-1]).int()


def couple_verification() -> None:
    """Let vLLM's model runners of this process verify drafts by `CoupledVerification`."""
    model_runner.RejectionSampler = CoupledVerification
