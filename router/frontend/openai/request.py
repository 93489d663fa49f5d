"""Fields common to both endpoints' requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import INT32, Fields, one_of
from router.frontend.http.caller import Caller, check_name
from router.frontend.http.generation import Generation
from router.frontend.openai.sampling import GenerationOptions

MAX_CHOICES = 1024
"""Largest number of choices of all prompts of a request together."""


@dataclass(slots=True)
class ApiRequest(Generation):
    """One request of a completion or a chat."""

    include_usage: bool = False
    continuous_usage: bool = False
    """Whether every event has the usage, and not only the last."""
    receipt: bool = False
    token_ids: bool = False
    """Whether the answer has the token ids of prompt and output."""
    tokens_as_ids: bool = False
    """Whether log probabilities name tokens by id."""
    echo_logprobs: bool = False
    """Whether log probabilities include those of the echoed prompt."""
    only_echo: bool = False
    """Whether only the prompt is wanted; the one token that an engine must generate is omitted."""
    include_reasoning: bool = True
    """Whether a chat's answer has the reasoning."""
    role: str = "assistant"
    """Role of a chat's answer."""

    @property
    def choices_per_prompt(self) -> int:
        sampling = self.requests[0].sampling
        return sampling.n if sampling.HasField("n") else 1


def common(fields: Fields, caller: Caller, options: GenerationOptions) -> tuple[pb.GenerateRequest, ApiRequest]:
    """Read the common fields; the prompt remains to be set.

    Raises InvalidRequest.
    """
    request = pb.GenerateRequest(
        model=fields.text("model"),
        sampling=options.sampling,
        # vLLM's lower priorities go first, ours the higher ones
        priority=-(fields.integer("priority", 1 - INT32, INT32 - 1) or 0),
        tenant=caller.tenant,
        session_id=fields.text("session_id"),
        prompt_cache_key=fields.text("prompt_cache_key"),
        request_id=check_name(fields.text("request_id"), "request_id") or caller.request_id,
        cache_salt=fields.text("cache_salt"),
        max_ttft_ms=fields.number("max_ttft_ms"),
        task=fields.text("task"),
        min_quality=fields.number("min_quality") or 0.0,
        cache_retention_s=retention_s(fields),
    )
    api_request = ApiRequest(
        request.request_id,
        [],
        {**NAMES, **options.names},
        stream=fields.boolean("stream"),
        receipt=fields.boolean("receipt"),
        token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        deadline_s=read_deadline_s(fields),
    )
    _read_stream_options(fields, api_request)
    if api_request.stream and options.sampling.HasField("prompt_logprobs"):
        raise fields.refuse("prompt_logprobs", "cannot be combined with stream")
    return request, api_request


def retention_s(fields: Fields) -> float | None:
    """Read how long the prompt's blocks are kept, in Tandem's field or in OpenAI's."""
    seconds = fields.number("cache_retention_s")
    wanted = one_of(fields, "prompt_cache_retention", tuple(RETENTIONS))
    return RETENTIONS[wanted] if seconds is None and wanted is not None else seconds


RETENTIONS: Mapping[str, float | None] = {"in_memory": None, "in-memory": None, "24h": 86_400.0}
"""Seconds by value of prompt_cache_retention; None: as long as there is room."""
NAMES: Mapping[str, str] = {
    "text": "prompt",
    "token_ids": "prompt",
    "request_id": "x-request-id",
    "tenant": "x-tenant",
}


def check_choices(api_request: ApiRequest, field_at_fault: str) -> None:
    """Check the number of choices.

    Raises InvalidRequest for too many.
    """
    num_choices = len(api_request.requests) * max(1, api_request.choices_per_prompt)
    if num_choices > MAX_CHOICES:
        raise InvalidRequest(field_at_fault, f"at most {MAX_CHOICES} choices over all prompts, not {num_choices}")


def read_deadline_s(fields: Fields) -> float | None:
    """Read the time limit, in seconds.

    Raises InvalidRequest.
    """
    timeout_ms = fields.number("timeout_ms")
    if timeout_ms is None:
        return None
    if not 0 < timeout_ms <= INT32:
        raise fields.refuse("timeout_ms", f"must be above 0 and at most {INT32}, not {timeout_ms:g}")
    return timeout_ms / 1e3


def _read_stream_options(fields: Fields, api_request: ApiRequest) -> None:
    options: Any = fields.nested("stream_options")
    if options is None:
        return
    if not api_request.stream:
        raise fields.refuse("stream_options", "needs stream")
    api_request.include_usage = options.boolean("include_usage")
    api_request.continuous_usage = options.boolean("continuous_usage_stats")
    options.boolean("include_obfuscation")  # padding against eavesdroppers, which changes no answer
    options.finish()


def requests_of(request: pb.GenerateRequest, prompts: Sequence[str | list[int]]) -> list[pb.GenerateRequest]:
    """Return a request like this one for each prompt; of several, each has its number in its id."""
    requests = []
    for number, prompt in enumerate(prompts):
        one = pb.GenerateRequest()
        one.CopyFrom(request)
        if isinstance(prompt, str):
            one.text = prompt
        else:
            one.token_ids.extend(prompt)
        if len(prompts) > 1:
            one.request_id = f"{request.request_id}-{number}"
        requests.append(one)
    return requests
