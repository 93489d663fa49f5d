"""Drawing from the likeliest candidates against sorting the whole vocabulary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.torch.sampling import sampler
from engine.backends.torch.sampling.sampler import draw
from engine.core_types import SamplingParams

CANDIDATES = 1024
VOCAB = 5 * CANDIDATES
Row = tuple[SamplingParams, float, float]
"""Options, target, how far logits are spread."""

options = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 5, CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, VOCAB]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.9]),
)
rows = st.tuples(options, st.floats(0, 1, exclude_max=True), st.sampled_from([0.1, 1.0, 4.0, 12.0]))


@settings(max_examples=150, deadline=None)
@given(st.lists(rows, min_size=1, max_size=6), st.integers(0, 2**31))
def test_candidates_give_what_sorting_everything_gives(drawn: list[Row], seed: int) -> None:
    """Logits of bfloat16, so that many are equal: which of them is cut off must not depend on the way."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([[spread] for _, _, spread in drawn])
    logits = (torch.randn(len(drawn), VOCAB, generator=generator) * spread).bfloat16().float()
    params, targets = [row[0] for row in drawn], [row[1] for row in drawn]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "CANDIDATES", (VOCAB,))
        sorted_all = draw(logits, params, targets)
        for counts in ((CANDIDATES,), (CANDIDATES, 3 * CANDIDATES)):
            patch.setattr(sampler, "CANDIDATES", counts)
            assert torch.equal(draw(logits, params, targets), sorted_all)


@pytest.mark.parametrize("target", [0.0, 0.25, 0.5, 0.999999999])
def test_impossible_tokens_are_never_drawn(target: float) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    possible = [3, 700, VOCAB - 2]
    logits[0, possible] = 0.0
    for params in (SamplingParams(1), SamplingParams(1, top_p=0.99), SamplingParams(1, top_k=50)):
        assert draw(logits, [params], [target]).item() == possible[int(3 * target)]
