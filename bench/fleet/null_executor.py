"""Executor of vLLM that computes nothing and takes the time of a GPU: scheduling, caches and HTTP are vLLM's own.

A step takes STEP_MS, and PREFILL_US for each prompt token in it. A token is a function of all tokens before it, so that
an answer which went on at another server can be checked.
"""

import os
import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from bench.fleet.tokens import FIRST, NUM, mixed

STEP_S = float(os.environ.get("NULL_STEP_MS", "5")) / 1e3
PREFILL_S = float(os.environ.get("NULL_PREFILL_US", "0")) / 1e6


class _Request:
    """Progress of one request, and the state of its tokens."""

    def __init__(self, tokens: list[int], num_computed: int) -> None:
        self.num_computed = num_computed
        self.num_known = len(tokens)
        self.state = 0
        for token_id in tokens:
            self.state = mixed(self.state, token_id)

    def sample(self) -> int:
        token_id = FIRST + self.state % NUM
        self.state = mixed(self.state, token_id)
        self.num_known += 1
        return token_id


class NullExecutor(UniProcExecutor):
    """Executor without computation, for vLLM's `--distributed-executor-backend`."""

    def _requests(self) -> dict[str, _Request]:
        requests: dict[str, _Request] = self.__dict__.setdefault("_null_requests", {})
        return requests

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._output = self._computed(scheduler_output)
        empty = not scheduler_output.total_num_scheduled_tokens
        return _done(EMPTY_MODEL_RUNNER_OUTPUT if empty else None, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _done(self._output, non_block)

    def _computed(self, scheduled: Any) -> ModelRunnerOutput:
        requests = self._requests()
        for request_id in scheduled.finished_req_ids:
            requests.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            tokens = list(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids)
            requests[new.req_id] = _Request(tokens, new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            requests[request_id].num_computed = num_computed
        num_prefill, ids, sampled = 0, [], []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = requests[request_id]
            num_prefill += num_tokens - 1
            ids.append(request_id)
            is_last = request.num_computed + num_tokens >= request.num_known
            sampled.append([request.sample()] if is_last else [])
        if ids:
            time.sleep(STEP_S + PREFILL_S * num_prefill)
        index = {request_id: row for row, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)


def _done(value: Any, non_block: bool) -> Any:
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future
