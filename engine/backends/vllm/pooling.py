"""Requests of a vLLM engine that runs vLLM's pooling runner: it answers with vectors and samples nothing.

The pooler is vLLM's own, with its projection, activation and scaling. A vector that depends on all hidden states of a
prompt is made of one step, so such a prompt is neither cut into chunks nor begun after cached blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.pooling_params import PoolingParams
from vllm.v1.request import Request

from engine.backends.vllm.sampling.sampling import Sampling
from engine.core_types import EngineSequence, Pooler, RequestFailure, SampleResult
from engine.errors import EngineStartError
from engine.messages.to_engine import Generate

TASKS = ("embed", "classify")


class PoolingRequests(Sampling):
    """Way in which a vLLM engine makes vectors."""

    def __init__(self, engine: Any, eos_token_ids: frozenset[int]) -> None:
        """Create it for vLLM's EngineCore.

        Raises EngineStartError for a model that makes other vectors than one for each prompt.
        """
        config = engine.vllm_config.model_config
        task = config.get_pooling_task(engine.get_supported_tasks())
        if task not in TASKS:
            raise EngineStartError("model", f"its task in vLLM is {task}; {' and '.join(TASKS)} are served")
        self._params = PoolingParams(task=task)
        self._params.verify(config)
        self._params.skip_reading_prefix_cache = not config.is_prefix_caching_supported
        classifies = task == "classify"
        self.pooler = Pooler(
            pooling="last" if config.is_prefix_caching_supported else "mean",
            normalize=not classifies and bool(self._params.use_activation),
            dimensions=int(config.hf_config.num_labels if classifies else config.embedding_size),
            classifies=classifies,
        )

    def mismatch(self, message: Generate) -> RequestFailure | None:
        if message.sampling.pooling is not None or message.sampling.max_tokens == 0:
            return None
        return RequestFailure("model", "it runs on vLLM's pooling runner here, which answers with vectors only")

    def request(
        self, sequence: EngineSequence, request_id: str, arguments: dict[str, Any], wake: Callable[[], None]
    ) -> Request:
        fills = sequence.sampling is None or sequence.only_fills
        tokens = self.fill_tokens(sequence) if fills else list(sequence.token_ids)
        return Request(request_id, tokens, None, **arguments | {"pooling_params": self._params.clone()})

    def results(self, sequence: EngineSequence, request: Request, output: Any) -> Sequence[SampleResult]:
        return []
