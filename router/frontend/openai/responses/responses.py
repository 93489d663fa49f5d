"""POST /v1/responses: from its body to a GenerateRequest.

Pure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import INT32, Fields, must_be_one_of, one_of, shown
from router.frontend.http.body.media import Given, read_document, read_file, read_url, set_content
from router.frontend.http.caller import Caller
from router.frontend.http.generation import Generation
from router.frontend.openai.chat import read_input_audio
from router.frontend.openai.request import retention_s
from router.frontend.openai.tool_choice import read_tool_choice
from router.models.output.output_plan import forces_call
from router.validation import MAX_LOGPROBS, MAX_MESSAGES

ROLES = ("developer", "system", "user", "assistant")
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


def read_response(fields: Fields, caller: Caller) -> ResponsesRequest:
    """Read a request.

    Raises InvalidRequest naming the field at fault.
    """
    for name in REFUSED:
        if fields.take(name) not in (None, False, ""):
            raise fields.refuse(name, "is not supported")
    request = pb.GenerateRequest(
        model=fields.text("model"),
        tenant=caller.tenant,
        request_id=caller.request_id,
        parse_output=True,
        prompt_cache_key=fields.text("prompt_cache_key"),
        cache_retention_s=retention_s(fields),
    )
    api_request = ResponsesRequest(request.request_id, [request], dict(NAMES))
    api_request.echoed = _echoed(fields)
    _read_options(fields, request)
    instructions = fields.take("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise fields.refuse("instructions", f"must be a text, not {shown(instructions)}")
    api_request.instructions = instructions
    _read_tools(fields, request, api_request)
    _read_input(fields, api_request)
    api_request.previous_id = fields.text("previous_response_id")
    api_request.is_stored = fields.boolean("store", default=True)
    api_request.stream = fields.boolean("stream")
    fields.take("parallel_tool_calls")  # read with the options
    if not api_request.references:
        complete(api_request, [])
    fields.finish()
    return api_request


NAMES = {
    "max_tokens": "max_output_tokens",
    "request_id": "x-request-id",
    "tenant": "x-tenant",
    "structured": "text.format",
}


def complete(api_request: ResponsesRequest, earlier: list[pb.ChatMessage]) -> None:
    """Set the request's messages: instructions, earlier turns, and its own."""
    request = api_request.requests[0]
    del request.messages[:]
    if api_request.instructions:
        request.messages.add(role="system", content=api_request.instructions)
    request.messages.extend([*earlier, *api_request.own_messages])
    if not request.messages:
        raise InvalidRequest("input", "is missing")


def _echoed(fields: Fields) -> dict[str, Any]:
    values = {name: fields.peek(name) for name in ("tools", "tool_choice", "parallel_tool_calls", "reasoning", "user")}
    echoed = {name: value if (value := fields.peek(name)) is not None else default for name, default in ECHOED.items()}
    return echoed | {
        "tools": values["tools"] or [],
        "tool_choice": values["tool_choice"] or "auto",
        "parallel_tool_calls": values["parallel_tool_calls"] is not False,
        "reasoning": values["reasoning"] or {"effort": None, "summary": None},
        "user": values["user"],
        "max_output_tokens": fields.peek("max_output_tokens"),
        "top_logprobs": fields.peek("top_logprobs") or 0,
    }


def _read_options(fields: Fields, request: pb.GenerateRequest) -> None:
    sampling = request.sampling
    if (most := fields.integer("max_output_tokens", 1, INT32 - 1)) is not None:
        sampling.max_tokens = most
    for name in ("temperature", "top_p"):
        if (number := fields.number(name)) is not None:
            setattr(sampling, name, number)
    if (several := fields.peek("parallel_tool_calls")) is not None and not isinstance(several, bool):
        raise fields.refuse("parallel_tool_calls", f"must be true or false, not {shown(several)}")
    request.single_tool_call = several is False
    if (reasoning := fields.nested("reasoning")) is not None:
        request.reasoning_effort = reasoning.text("effort")
        for name in ("summary", "generate_summary"):
            reasoning.take(name)
        reasoning.finish()
    if (text := fields.nested("text")) is not None:
        if (form := text.nested("format")) is not None:
            _read_form(form, sampling)
        text.finish()
    fields.take("metadata")
    _read_logprobs(fields, sampling)


def _read_logprobs(fields: Fields, sampling: pb.Sampling) -> None:
    """Read `top_logprobs`, which needs LOGPROBS among `include`; its other values have no effect."""
    top, included = fields.integer("top_logprobs", 0, MAX_LOGPROBS), fields.strings("include")
    if LOGPROBS in included:
        sampling.logprobs = top or 0
    elif top:
        raise fields.refuse("top_logprobs", f"needs {LOGPROBS} in include")
    if any(name != LOGPROBS for name in included):
        if fields.ignored.strict:
            raise fields.refuse("include", f"may have {LOGPROBS} only")
        fields.ignored.add("include")


def _read_form(form: Fields, sampling: pb.Sampling) -> None:
    kind = one_of(form, "type", ("text", "json_object", "json_schema"))
    if kind == "json_object":
        sampling.structured.json_object = True
    elif kind == "json_schema":
        sampling.structured.json_schema = json.dumps(form.schema("schema"))
    for name in ("name", "description", "strict"):  # the schema is enforced in any case
        form.take(name)
    form.finish()


# ----------------------------------------------------------------------------------------------------- input


def _read_input(fields: Fields, api_request: ResponsesRequest) -> None:
    value = fields.take("input")
    if value is None:
        return
    if isinstance(value, str):
        api_request.own_messages = [pb.ChatMessage(role="user", content=value)]
        api_request.input_items = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}
        ]
        return
    if not isinstance(value, list):
        raise fields.refuse("input", f"must be a text or a list of items, not {shown(value)}")
    if len(value) > MAX_MESSAGES:
        raise fields.refuse("input", f"at most {MAX_MESSAGES} items, not {len(value)}")
    api_request.input_items = value
    for place, item in enumerate(value):
        of_item = fields.at(f"input[{place}]", item)
        if _is_reference(of_item):
            api_request.references[place] = of_item.text("id", required=True)
            of_item.finish()
        else:
            _add_item(of_item, api_request.own_messages, api_request.media)


def _is_reference(item: Fields) -> bool:
    """Return whether an item only names an earlier one; its type, which may be absent, is taken then."""
    if item.peek("type") == "item_reference":
        item.take("type")
        return True
    return item.given("id") and not any(map(item.given, ("type", "role", "content")))


def refer(api_request: ResponsesRequest, items: Mapping[int, Any]) -> None:
    """Replace the references by these items, given by their places in the input.

    Raises InvalidRequest.
    """
    found = [items.get(place, item) for place, item in enumerate(api_request.input_items)]
    api_request.input_items, api_request.own_messages, api_request.media = found, [], []
    for place, item in enumerate(found):
        _add_item(Fields(item, f"input[{place}]"), api_request.own_messages, api_request.media)


def _add_item(item: Fields, messages: list[pb.ChatMessage], media: Given) -> None:
    kind = item.text("type") or "message"
    for name in ("id", "status", "phase", "internal_chat_message_metadata_passthrough"):
        item.take(name)
    if kind == "message":
        role = must_be_one_of(item, "role", ROLES)
        content = item.take("content")
        if role != "assistant":
            messages.append(pb.ChatMessage(role=role))
            set_content(messages[-1], _parts(item, "content", content, media))
        else:
            text = _content(item, "content", content, may_lack=True)
            if not _assistant(messages).content and not _assistant(messages).tool_calls:
                _assistant(messages).content = text
            else:
                messages.append(pb.ChatMessage(role=role, content=text))
    elif kind in ("function_call", "custom_tool_call"):
        name, call_id = item.text("name", required=True), item.text("call_id", required=True)
        is_function = kind == "function_call"
        arguments = item.text("arguments", required=True) if is_function else json.dumps({"input": item.text("input")})
        _assistant(messages).tool_calls.add(id=call_id, name=name, arguments=arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        call_id = item.text("call_id", required=True)
        messages.append(pb.ChatMessage(role="tool", tool_call_id=call_id))
        set_content(messages[-1], _parts(item, "output", item.take("output"), media, may_lack=True))
    elif kind == "reasoning":
        thoughts = [_content(item, name, item.take(name) or []) for name in ("content", "summary")]
        item.take("encrypted_content")
        messages.append(pb.ChatMessage(role="assistant", reasoning=thoughts[0] or thoughts[1]))
    else:
        raise item.refuse("type", f"{shown(kind)} is not supported")
    item.finish()


def _assistant(messages: list[pb.ChatMessage]) -> pb.ChatMessage:
    """Return the assistant's message at the end; one is added where another role spoke last."""
    if not messages or messages[-1].role != "assistant":
        messages.append(pb.ChatMessage(role="assistant"))
    return messages[-1]


def _content(item: Fields, name: str, content: Any, may_lack: bool = False) -> str:
    """Return a text, or the joined texts of parts."""
    return "".join(part for part in _parts(item, name, content, None, may_lack) if isinstance(part, str))


def _parts(item: Fields, name: str, content: Any, media: Given | None, may_lack: bool = False) -> list[str | pb.Media]:
    """Return the texts and media of a content; without `media` only texts are allowed."""
    if isinstance(content, str):
        return [content]
    if content is None and may_lack:
        return []
    if not isinstance(content, list):
        raise item.refuse(name, f"must be a text or a list of parts, not {shown(content)}")
    parts: list[str | pb.Media] = []
    for place, each in enumerate(content):
        part = item.at(f"{name}[{place}]", each)
        kind = part.text("type", required=True)
        if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"):
            parts.append(part.text("refusal" if kind == "refusal" else "text"))
        elif kind in ("input_image", "input_file", "input_audio") and media is not None:
            parts.append(_medium(part, kind, media))
        else:
            raise part.refuse("type", f"{shown(kind)} is not supported here")
        for own in ("annotations", "logprobs"):
            part.take(own)
        part.finish()
    return parts


def _medium(part: Fields, kind: str, media: Given) -> pb.Media:
    if kind == "input_audio":
        return read_input_audio(part, media)
    if kind == "input_file":
        return read_document(part, media)
    if part.given("file_id"):
        return read_file(part, "file_id", "image", media)
    return read_url(part, "image_url", "image", part.take("image_url"), media)


# ----------------------------------------------------------------------------------------------------- tools


def _read_tools(fields: Fields, request: pb.GenerateRequest, api_request: ResponsesRequest) -> None:
    custom = set()
    for place, tool in enumerate(fields.objects("tools")):
        known = fields.at(f"tools[{place}]", tool)
        kind = known.text("type", required=True)
        if kind not in ("function", "custom"):
            fields.ignored.add(f"tools[{place}].type={kind}"[:64])  # the model never hears of it
            continue
        name = known.text("name", required=True)
        function: dict[str, Any] = {"name": name}
        if description := known.text("description"):
            function["description"] = description
        if kind == "custom":
            custom.add(name)
            known.take("parameters")
            function["parameters"] = CUSTOM_PARAMETERS
            if known.peek("format") == {"type": "text"}:  # any other form is not enforced, and named as ignored
                known.take("format")
        else:
            parameters = known.schema("parameters") if known.given("parameters") else {}
            function["parameters"] = parameters or {"type": "object"}
        for own in ("strict", "defer_loading"):
            known.take(own)
        known.finish()
        request.tools.append(json.dumps({"type": "function", "function": function}, ensure_ascii=False))
    api_request.custom_tools = frozenset(custom)
    request.single_tool_call = request.single_tool_call and bool(request.tools)
    read_tool_choice(fields, request, ("function", "custom"), lambda choice: choice.text("name", required=True))
    if forces_call(request.tool_choice):
        api_request.names["structured"] = "tools"
