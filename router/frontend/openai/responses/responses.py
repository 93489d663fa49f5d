"""POST /v1/responses: from its body to a GenerateRequest.

Pure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import (
    BodyReader,
    IgnoredFields,
    Model,
    Positive,
    Texts,
    given,
    needed,
    shown,
    texts_of,
    typed,
)
from router.frontend.http.body.media import Content, Given, read_parts, set_content
from router.frontend.http.errors import Caller
from router.frontend.http.generation import Generation
from router.frontend.openai.chat import Choice, Word, is_skipped, read_tool_choice
from router.frontend.openai.request import Retention, retention_s
from router.models.output.output_plan import forces_call
from router.validation import MAX_LOGPROBS, MAX_MESSAGES

CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool, whose input is a text."""
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log probabilities."""
REFUSED = ("background", "conversation", "prompt")
"""Fields that need more than a generation, unless these are empty."""
ECHOED = {
    "temperature": 1.0,
    "top_p": 1.0,
    "metadata": {},
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
}
"""Fields of the body that an answer repeats, with their defaults."""


NAMES = {
    "max_tokens": "max_output_tokens",
    "request_id": "x-request-id",
    "tenant": "x-tenant",
    "structured": "text.format",
}


# ---------------------------------------------------------------------------------------------------- bodies


TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
PARTS = (*TEXTS, "input_image", "input_file", "input_audio")


class Item(Model):
    """Item of an input, of any type; answers' fields that are not read come back unchanged."""

    type: str | None = None
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: Content | None = None
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content | None = None
    summary: Content | None = None
    id: Any = None
    status: Any = None
    phase: Any = None
    encrypted_content: Any = None
    internal_chat_message_metadata_passthrough: Any = None


class Reference(Model):
    """Item that only names an earlier one."""

    id: str
    type: Literal["item_reference"] | None = None


class Tool(Model):
    """Tool that is a function, or has a text as its input."""

    type: Literal["function", "custom"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: Any = None
    strict: Any = None
    defer_loading: Any = None


class TextForm(Model):
    type: Literal["text", "json_object", "json_schema"] | None = None
    schema: dict[str, Any] | None = None
    name: Any = None
    description: Any = None
    strict: Any = None
    """Whether the schema is enforced. It is not read, since it always is."""


class TextOptions(Model):
    format: TextForm | None = None


class Reasoning(Model):
    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseBody(Model):
    """Body of POST /v1/responses; what the answer repeats is not typed yet."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    cache_retention_s: float | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Texts | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Word | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: Any = None
    truncation: Any = None
    user: Any = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None


# -------------------------------------------------------------------------------------------------- requests


@dataclass(slots=True)
class ResponsesRequest(Generation):
    """One request of the Responses API."""

    previous_id: str = ""
    """Response whose conversation goes on; empty: none."""
    is_stored: bool = True
    instructions: str | None = None
    own_messages: list[pb.ChatMessage] = field(default_factory=list)
    """Messages of this request without instructions and earlier turns."""
    input_items: list[Any] = field(default_factory=list)
    """Items of this request's input as the client gave them; references are replaced by what these name."""
    references: dict[int, str] = field(default_factory=dict)
    """Ids of earlier items, by the places of the input items that only refer to these."""
    custom_tools: frozenset[str] = frozenset()
    """Names of tools whose input is a text."""
    kept_messages: list[pb.ChatMessage] | None = None
    """Messages to store, with the pictures that the request itself loses when it starts; None: the request's own."""
    echoed: dict[str, Any] = field(default_factory=dict)
    """Fields of the body that the answer repeats."""


def _request(body: ResponseBody, caller: Caller, ignored: IgnoredFields) -> ResponsesRequest:
    for name in REFUSED:
        if getattr(body, name) not in (None, False, ""):
            raise InvalidRequest(name, "is not supported")
    request = pb.GenerateRequest(
        tenant=caller.tenant,
        request_id=caller.request_id,
        parse_output=True,
        cache_retention_s=retention_s(body.cache_retention_s, body.prompt_cache_retention),
        **given(body, ("model", "prompt_cache_key")),
        sampling=pb.Sampling(max_tokens=body.max_output_tokens, temperature=body.temperature, top_p=body.top_p),
    )
    api_request = ResponsesRequest(request.request_id, [request], dict(NAMES))
    api_request.echoed = _echoed(body)
    if body.reasoning is not None:
        request.reasoning_effort = typed(body.reasoning, Reasoning, "reasoning", ignored).effort or ""
    if body.text is not None and (form := typed(body.text, TextOptions, "text", ignored).format) is not None:
        _set_form(form, request.sampling)
    _read_logprobs(body, request.sampling, ignored)
    api_request.instructions = body.instructions
    _read_tools(body, request, api_request, ignored)
    _read_input(body.input, api_request, ignored)
    api_request.previous_id = body.previous_response_id or ""
    api_request.is_stored = body.store is not False
    api_request.stream = bool(body.stream)
    if not api_request.references:
        complete(api_request, [])
    for name in ("truncation", "user"):  # the answer repeats these, and nothing else does
        ignored.unread("", name, getattr(body, name))
    return api_request


read_response = BodyReader(ResponseBody, _request)


def complete(api_request: ResponsesRequest, earlier: list[pb.ChatMessage]) -> None:
    """Set the request's messages: instructions, earlier turns, and its own."""
    request = api_request.requests[0]
    del request.messages[:]
    if api_request.instructions:
        request.messages.add(role="system", content=api_request.instructions)
    request.messages.extend([*earlier, *api_request.own_messages])
    if not request.messages:
        raise InvalidRequest("input", "is missing")


def _echoed(body: ResponseBody) -> dict[str, Any]:
    echoed = {
        name: value if (value := getattr(body, name)) is not None else default for name, default in ECHOED.items()
    }
    return echoed | {
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "user": body.user,
        "max_output_tokens": body.max_output_tokens,
        "top_logprobs": body.top_logprobs or 0,
    }


def _read_logprobs(body: ResponseBody, sampling: pb.Sampling, ignored: IgnoredFields) -> None:
    """Read `top_logprobs`, which needs LOGPROBS among `include`; its other values have no effect."""
    included = texts_of(body.include)
    if LOGPROBS in included:
        sampling.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequest("top_logprobs", f"needs {LOGPROBS} in include")
    if any(name != LOGPROBS for name in included):
        if ignored.strict:
            raise InvalidRequest("include", f"may have {LOGPROBS} only")
        ignored.add("include")


def _set_form(form: TextForm, sampling: pb.Sampling) -> None:
    if form.type == "json_object":
        sampling.structured.json_object = True
    elif form.type == "json_schema":
        if form.schema is None:
            raise InvalidRequest("text.format.schema", "is missing")
        sampling.structured.json_schema = json.dumps(form.schema)


# ----------------------------------------------------------------------------------------------------- input


def _read_input(
    wanted: str | list[dict[str, Any]] | None, api_request: ResponsesRequest, ignored: IgnoredFields
) -> None:
    if isinstance(wanted, str):
        api_request.own_messages = [pb.ChatMessage(role="user", content=wanted)]
        api_request.input_items = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": wanted}]}
        ]
    elif wanted is not None:
        if len(wanted) > MAX_MESSAGES:
            raise InvalidRequest("input", f"at most {MAX_MESSAGES} items, not {len(wanted)}")
        api_request.input_items = wanted
        for place, item in enumerate(wanted):
            if _is_reference(item):
                api_request.references[place] = typed(item, Reference, f"input[{place}]", ignored).id
            else:
                _add_item(item, f"input[{place}]", api_request.own_messages, api_request.media, ignored)


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Return whether an item only names an earlier one; its type may be absent."""
    if item.get("type") == "item_reference":
        return True
    return item.get("id") is not None and all(item.get(name) is None for name in ("type", "role", "content"))


def refer(api_request: ResponsesRequest, items: Mapping[int, Any]) -> None:
    """Replace the references by these items, given by their places in the input.

    Raises InvalidRequest.
    """
    found = [items.get(place, item) for place, item in enumerate(api_request.input_items)]
    api_request.input_items, api_request.own_messages, api_request.media = found, [], []
    for place, item in enumerate(found):
        _add_item(item, f"input[{place}]", api_request.own_messages, api_request.media, IgnoredFields())


def _add_item(
    values: dict[str, Any], path: str, messages: list[pb.ChatMessage], media: Given, ignored: IgnoredFields
) -> None:
    item = typed(values, Item, path, ignored)
    kind = item.type or "message"

    def text_of(name: str) -> str:
        content: Content | None = getattr(item, name)
        parts = read_parts(content, f"{path}.{name}", TEXTS, media)
        return "".join(part for part in parts if isinstance(part, str))

    if kind == "message":
        role = needed(item.role, f"{path}.role")
        if role != "assistant":
            messages.append(pb.ChatMessage(role=role))
            needed(item.content, f"{path}.content")
            set_content(messages[-1], read_parts(item.content, f"{path}.content", PARTS, media))
        elif not (last := _assistant(messages)).content and not last.tool_calls:
            last.content = text_of("content")
        else:
            messages.append(pb.ChatMessage(role=role, content=text_of("content")))
    elif kind in ("function_call", "custom_tool_call"):
        name, call_id = needed(item.name, f"{path}.name"), needed(item.call_id, f"{path}.call_id")
        is_function = kind == "function_call"
        arguments = (
            needed(item.arguments, f"{path}.arguments") if is_function else json.dumps({"input": item.input or ""})
        )
        _assistant(messages).tool_calls.add(id=call_id, name=name, arguments=arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append(pb.ChatMessage(role="tool", tool_call_id=needed(item.call_id, f"{path}.call_id")))
        set_content(messages[-1], read_parts(item.output, f"{path}.output", PARTS, media))
    elif kind == "reasoning":
        messages.append(pb.ChatMessage(role="assistant", reasoning=text_of("content") or text_of("summary")))
    else:
        raise InvalidRequest(f"{path}.type", f"{shown(kind)} is not supported")


def _assistant(messages: list[pb.ChatMessage]) -> pb.ChatMessage:
    """Return the assistant's message at the end; one is added where another role spoke last."""
    if not messages or messages[-1].role != "assistant":
        messages.append(pb.ChatMessage(role="assistant"))
    return messages[-1]


# ----------------------------------------------------------------------------------------------------- tools


def _read_tools(
    body: ResponseBody, request: pb.GenerateRequest, api_request: ResponsesRequest, ignored: IgnoredFields
) -> None:
    custom = set()
    for place, each in enumerate(body.tools or ()):
        path = f"tools[{place}]"
        if is_skipped(each, ("function", "custom"), path, ignored):
            continue
        tool = typed(each, Tool, path, ignored)
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.type == "custom":
            custom.add(tool.name)
            function["parameters"] = CUSTOM_PARAMETERS
            if tool.format != {"type": "text"}:  # any other form is not enforced
                ignored.unread(path, "format", tool.format)
        else:
            ignored.unread(path, "format", tool.format)
            function["parameters"] = tool.parameters or {"type": "object"}
        request.tools.append(msgspec.json.encode({"type": "function", "function": function}).decode())
    api_request.custom_tools = frozenset(custom)
    request.single_tool_call = body.parallel_tool_calls is False and bool(request.tools)
    given_choice = body.tool_choice
    choice = typed(given_choice, Choice, "tool_choice", ignored) if isinstance(given_choice, dict) else given_choice
    read_tool_choice(choice, request, ("function", "custom"), ignored)
    if forces_call(request.tool_choice):
        api_request.names["structured"] = "tools"
