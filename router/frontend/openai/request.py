"""Fields common to both endpoints' requests.

Sampling options common to both endpoints, from OpenAI's and vLLM's names to ours.

Limits are checked for every request in `router/validation.py`; here only types are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import INT32, INT64, Count, Model, Texts, TokenId, given, needed, shown, texts_of
from router.frontend.http.errors import Caller, check_name
from router.frontend.http.generation import Generation

KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
"""Kinds of structured output: vLLM's names, and ours."""
GUIDED = {f"guided_{kind}": kind for kind in KINDS}
"""Kinds by their older fields."""
SAME_OF_SAMPLING = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n"),
    *("min_tokens", "prompt_logprobs", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
)
"""Fields that have the same name here."""
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""llguidance's option, within a schema, for JSON without whitespace."""


class CommonBody(Model):
    """Fields of all requests that end in an engine."""

    model: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=1 - INT32, le=INT32 - 1)] | None = None
    """Lower ones go first, as in vLLM; ours the other way round."""
    request_id: str | None = None
    cache_salt: str | None = None
    timeout_ms: Annotated[float, msgspec.Meta(gt=0, le=INT32)] | None = None

    def request(self, caller: Caller, **more: Any) -> pb.GenerateRequest:
        """Return a request with these fields and `more` of its own.

        Raises InvalidRequest.
        """
        return pb.GenerateRequest(
            priority=-(self.priority or 0),
            tenant=caller.tenant,
            request_id=check_name(self.request_id or "", "request_id") or caller.request_id,
            **given(self, ("model", "cache_salt")),
            **more,
        )

    def deadline_s(self) -> float | None:
        return None if self.timeout_ms is None else self.timeout_ms / 1e3


class JsonSchema(Model):
    schema: str | dict[str, Any] | None = None
    name: Any = None
    description: Any = None
    strict: Any = None
    """Whether the schema is enforced. It is not read, since it always is."""


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Model):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class SamplingBody(CommonBody):
    """Fields of completions and chats that set how tokens are chosen."""

    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: Count | None = None
    min_tokens: Count | None = None
    prompt_logprobs: Count | None = None
    top_k: Count | None = None
    seed: Annotated[int, msgspec.Meta(ge=-INT64, le=INT64 - 1)] | None = None
    stop: Texts | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None


def read_sampling(
    body: SamplingBody, max_tokens: int | None, logprobs: int | None, names: dict[str, str]
) -> pb.Sampling:
    """Read the options, and add the client's names of fields that we call otherwise.

    Raises InvalidRequest.
    """
    sampling = pb.Sampling(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=texts_of(body.stop),
        logit_bias=_biases(body.logit_bias) if body.logit_bias else None,
        keep_special_tokens=body.skip_special_tokens is False,
        **given(body, SAME_OF_SAMPLING),
    )
    if body.top_k is not None:
        sampling.top_k = 0 if body.top_k == -1 else body.top_k  # vLLM's value for off
    if body.seed is not None:
        sampling.seed = body.seed % (1 << 64)
    if (named := _structured(body)) is not None:
        names["structured"] = named[0]
        sampling.structured.CopyFrom(named[1])
    return sampling


def _biases(biases: dict[str, float]) -> dict[int, float]:
    """Return a map from token ids, which JSON has as strings, to numbers."""
    for token_id in biases:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 10 and int(token_id) < 1 << 32):
            raise InvalidRequest("logit_bias", f"{shown(token_id)} is not a token id")
    return {int(token_id): bias for token_id, bias in biases.items()}


def _structured(body: SamplingBody) -> tuple[str, pb.StructuredOutput] | None:
    """Read `response_format`, vLLM's `structured_outputs`, or its older guided_*: one of them at most."""
    forms: list[tuple[str, pb.StructuredOutput]] = []
    if (wanted := body.response_format) is not None and wanted.type == "json_object":
        forms.append(("response_format", pb.StructuredOutput(json_object=True)))
    elif wanted is not None and wanted.type == "json_schema":
        schema = needed(wanted.json_schema, "response_format.json_schema").schema
        forms.append(("response_format", _form("json", needed(schema, "response_format.json_schema.schema"))))
    if (outputs := body.structured_outputs) is not None:
        made = [_form(kind, value) for kind, value in given(outputs, tuple(KINDS)).items() if value is not False]
        if outputs.disable_any_whitespace:
            made = list(map(_without_whitespace, made))
        forms += [("structured_outputs", form) for form in made]
    guided = given(body, tuple(GUIDED)).items()
    forms += [(name, _form(GUIDED[name], value)) for name, value in guided if value is not False]
    if len(forms) > 1:
        raise InvalidRequest(forms[1][0], f"cannot be combined with {forms[0][0]}: each sets the form of the output")
    return forms[0] if forms else None


def _form(kind: str, value: Any) -> pb.StructuredOutput:
    """Return the form of vLLM's name `kind`; a schema is an object or JSON text."""
    if kind == "choice":
        value = texts_of(value)
    elif isinstance(value, dict):
        value = json.dumps(value)
    return pb.StructuredOutput(**{KINDS[kind]: value})


def _without_whitespace(form: pb.StructuredOutput) -> pb.StructuredOutput:
    if form.json_object:
        return pb.StructuredOutput(json_schema=json.dumps({"type": "object"} | COMPACT))
    if not form.HasField("json_schema"):
        raise InvalidRequest("structured_outputs.disable_any_whitespace", "needs json or json_object")
    try:
        schema = json.loads(form.json_schema)
    except ValueError:
        return form  # its compiler reports errors
    return pb.StructuredOutput(json_schema=json.dumps(schema | COMPACT)) if isinstance(schema, dict) else form


SAME_OF_REQUEST = ("session_id", "prompt_cache_key", "max_ttft_ms", "task", "min_quality")
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
    request = body.request(caller, sampling=sampling, cache_retention_s=kept_s, **given(body, SAME_OF_REQUEST))
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
