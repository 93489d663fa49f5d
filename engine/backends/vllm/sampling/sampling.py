"""Sampling of a vLLM engine: from Tandem's sequences to vLLM's requests, and from vLLM's outputs to results.

Model Runner V2 draws by (seed, position) itself, so `native_sampling.py` leaves all of it to vLLM. Model Runner V1
keeps a random generator for each request, which cannot continue elsewhere; there `keyed_sampling.py` draws, in the
processes that compute.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.v1.request import Request

from engine.core_types import EngineSequence, Pooler, RequestFailure, SampleResult
from engine.messages.to_engine import Generate

FILLS = VllmParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Parameters of a sequence without output: vLLM ends it with a token that nobody reads."""


class Sampling(ABC):
    """Way in which a vLLM engine samples."""

    num_beyond = 0
    """Least number of tokens that a sequence without output gets after its last one. Of windows and states vLLM keeps
    what a boundary needs that lies before the last token of a prompt, and draft layers read the next tokens."""

    def fill_tokens(self, sequence: EngineSequence) -> list[int]:
        """Return the prompt of a sequence without output."""
        count = max(self.num_beyond, sequence.num_tokens_with_items - sequence.num_tokens)
        beyond = sequence.tail[:count]
        return [*sequence.token_ids, *beyond, *[0] * (count - len(beyond))]

    pooler: Pooler | None = None
    """Pooler of an engine that answers with vectors only."""

    def mismatch(self, message: Generate) -> RequestFailure | None:
        """Return why a request is none for this engine's runner; None where it is one."""
        if message.sampling.pooling is None:
            return None
        return RequestFailure("embedding", "the model generates here: set vllm_args: --runner pooling")

    def refusal(self, message: Generate) -> str:
        """Return why a request cannot be sampled here, naming the field; empty where it can."""
        return ""

    @abstractmethod
    def request(
        self, sequence: EngineSequence, request_id: str, arguments: dict[str, Any], wake: Callable[[], None]
    ) -> Request:
        """Return vLLM's request for a sequence.

        `arguments` are those of vLLM's Request that do not depend on sampling. `wake` is called, on any thread, when
        vLLM can schedule a request that it could not schedule before.
        """

    @abstractmethod
    def results(self, sequence: EngineSequence, request: Request, output: Any) -> Sequence[SampleResult]:
        """Return the samples in vLLM's EngineCoreOutput of a request, in order; one with a failure is the last."""

    def forget(self, request_id: str) -> None:  # noqa: B027 - only one of them keeps anything
        """Forget a request that is over."""


def ends_of(sequence: EngineSequence, eos_token_ids: frozenset[int]) -> list[int]:
    """Return the tokens after which a sequence ends."""
    wanted = sequence.sampling
    assert wanted is not None
    ends = wanted.stop_token_ids
    if not wanted.ignore_eos or wanted.structured is not None:
        ends |= eos_token_ids
    return sorted(ends)


def scores_wanted(sequence: EngineSequence) -> int | None:
    """Return vLLM's `prompt_logprobs`: None where no score of the prompt is still to be returned."""
    wanted = sequence.sampling
    assert wanted is not None
    return wanted.prompt_logprobs if sequence.num_to_score > sequence.num_scored else None
