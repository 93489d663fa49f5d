"""Fields common to both endpoints' requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import Model, given
from router.frontend.http.caller import Caller
from router.frontend.http.generation import Generation
from router.frontend.openai.sampling import SamplingBody

SAME = ("session_id", "prompt_cache_key", "max_ttft_ms", "task", "min_quality")
"""Fields that have the same name here."""
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


class StreamOptions(Model):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against eavesdroppers, which changes no answer."""


Retention = Literal["in_memory", "in-memory", "24h"]
"""OpenAI's names of how long a prompt's blocks are kept."""


class GenerationBody(SamplingBody):
    """Fields of completions and chats."""

    session_id: str | None = None
    prompt_cache_key: str | None = None
    max_ttft_ms: float | None = None
    task: str | None = None
    min_quality: float | None = None
    cache_retention_s: float | None = None
    prompt_cache_retention: Retention | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    receipt: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


def common(
    body: GenerationBody, caller: Caller, sampling: pb.Sampling, names: Mapping[str, str]
) -> tuple[pb.GenerateRequest, ApiRequest]:
    """Read the common fields; the prompt remains to be set.

    Raises InvalidRequest.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "cannot be combined with stream")
    streaming = body.stream_options or StreamOptions()
    kept_s = retention_s(body.cache_retention_s, body.prompt_cache_retention)
    request = body.request(caller, sampling=sampling, cache_retention_s=kept_s, **given(body, SAME))
    api_request = ApiRequest(
        request.request_id,
        [],
        {**NAMES, **names},
        stream=bool(body.stream),
        receipt=bool(body.receipt),
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        deadline_s=body.deadline_s(),
        include_usage=bool(streaming.include_usage),
        continuous_usage=bool(streaming.continuous_usage_stats),
    )
    return request, api_request


def retention_s(seconds: float | None, named: Retention | None) -> float | None:
    """Return how long the prompt's blocks are kept, by Tandem's field or by OpenAI's."""
    return RETENTIONS[named] if seconds is None and named is not None else seconds


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
