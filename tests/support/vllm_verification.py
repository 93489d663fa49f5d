"""Random checks of coupled verification against its definition: `python -m support.vllm_verification`.

It runs in vLLM's environment with Model Runner V2, see `support/vllm_v2`.
"""

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from vllm.v1.worker.gpu import model_runner

from engine.backends.vllm.sampling.speculation import set_up_speculation
from engine.backends.vllm.sampling.verification import CoupledVerification, accepted, couple_verification, sums_of
from engine.errors import EngineStartError


def right(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the tokens of one request: those drawn until one differs from its draft, this one included."""
    tokens = []
    for at, token in enumerate(drawn):
        tokens.append(token)
        if at + 1 == len(drawn) or drafts[at + 1] != token:
            break
    return tokens


def main() -> None:
    rng = random.Random(5)
    for _ in range(500):
        most = rng.randint(1, 5)
        sizes = [rng.randint(1, most + 1) for _ in range(rng.randint(1, 6))]
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        drawn = [rng.randrange(3) for _ in range(ends[-1])]
        drafts = [rng.randrange(-1, 3) for _ in range(ends[-1])]
        bounds = torch.tensor(ends, dtype=torch.int32)
        tokens, counts = accepted(torch.tensor(drawn), torch.tensor(drafts), bounds, most)
        for row, (first, end) in enumerate(itertools.pairwise(ends)):
            assert tokens[row][: counts[row]].tolist() == right(drawn[first:end], drafts[first:end])
        sums = sums_of(torch.tensor(drawn, dtype=torch.int32), bounds)
        assert sums.tolist() == [sum(drawn[first:end]) for first, end in itertools.pairwise(ends)]
        assert sums.dtype is torch.int32
    refused = SimpleNamespace(speculative_config=SimpleNamespace(method="suffix"), use_v2_model_runner=True)
    reason = ""
    try:
        set_up_speculation(refused)
    except EngineStartError as error:
        reason = error.reason
    assert "method 'suffix' does not run on Model Runner V2" in reason
    couple_verification()
    assert model_runner.RejectionSampler is CoupledVerification


if __name__ == "__main__":
    main()
