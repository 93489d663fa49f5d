"""POST /v1/messages: from its body to a GenerateRequest.

Pure.
"""

import json
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import INT32, Fields, must_be_one_of, one_of, shown
from router.frontend.http.body.media import Given, GivenMedium, read_data, read_file, read_url, set_content
from router.frontend.http.caller import Caller
from router.frontend.http.generation import Generation
from router.validation import MAX_MESSAGES

EFFORTS = {"disabled": "none", "enabled": "high", "adaptive": "medium"}
"""Effort to reason by the type of `thinking`."""
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}
"""Seconds by `ttl` of cache_control."""
ERROR = "Error"
"""First word of a tool's result that is an error."""
CLIENT_TOOLS = (None, "custom")
"""Types of tools that a client defines; all others run at Anthropic."""


@dataclass(slots=True)
class MessagesRequest(Generation):
    """One request of the Messages API."""


def read_messages(fields: Fields, caller: Caller) -> MessagesRequest:
    """Read a request.

    Raises InvalidRequest naming the field at fault.
    """
    max_tokens = fields.integer("max_tokens", 1, INT32 - 1)
    if max_tokens is None:
        raise fields.refuse("max_tokens", "is missing")
    media: Given = []
    request = read_prompt(fields, caller, media)
    sampling = request.sampling
    sampling.max_tokens = max_tokens
    for name in ("temperature", "top_p"):
        if (number := fields.number(name)) is not None:
            setattr(sampling, name, number)
    if (top_k := fields.integer("top_k", 0, INT32 - 1)) is not None:
        sampling.top_k = top_k
    sampling.stop.extend(fields.strings("stop_sequences"))
    stream = fields.boolean("stream")
    api_request = MessagesRequest(request.request_id, [request], dict(NAMES), stream=stream, media=media)
    if request.tool_choice not in ("", "auto", "none"):
        api_request.names["structured"] = "tools"
    fields.finish()
    return api_request


NAMES = {
    "stop": "stop_sequences",
    "request_id": "x-request-id",
    "tenant": "x-tenant",
    "structured": "output_config",
    "continue_final_message": "messages",
}


def read_prompt(fields: Fields, caller: Caller, media: Given) -> pb.GenerateRequest:
    """Read what the prompt is made of: system, messages, tools and thinking; and add what is said of its media.

    Raises InvalidRequest.
    """
    request = pb.GenerateRequest(
        model=fields.text("model"), tenant=caller.tenant, request_id=caller.request_id, parse_output=True
    )
    system = fields.take("system")
    if system is not None and (text := _text(fields, "system", system, request)):
        request.messages.add(role="system", content=text)
    messages = fields.objects("messages")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be a list of 1 to {MAX_MESSAGES}")
    for place, message in enumerate(messages):
        _add_message(fields.at(f"messages[{place}]", message), request, media)
    _read_begun_answer(fields, request, len(messages) - 1)
    _read_tools(fields, request)
    if (thinking := fields.nested("thinking")) is not None:
        request.reasoning_effort = EFFORTS[one_of(thinking, "type", tuple(EFFORTS)) or "disabled"]
        thinking.integer("budget_tokens")  # an upper bound that a model here does not know
        thinking.finish()
    if (config := fields.nested("output_config")) is not None:
        _read_output(config, request)
    return request


def _read_output(config: Fields, request: pb.GenerateRequest) -> None:
    request.reasoning_effort = config.text("effort") or request.reasoning_effort
    if (form := config.nested("format")) is not None:
        must_be_one_of(form, "type", ("json_schema",))
        request.sampling.structured.json_schema = json.dumps(form.schema("schema"))
        form.finish()
    config.finish()


# -------------------------------------------------------------------------------------------------- messages


def _add_message(fields: Fields, request: pb.GenerateRequest, media: Given) -> None:
    role = must_be_one_of(fields, "role", ("user", "assistant", "system"))
    content = fields.take("content")
    if role == "assistant":
        _add_assistant(fields, content, request)
    else:
        _add_user(fields, role, content, request, media)
    fields.finish()


def _add_assistant(fields: Fields, content: Any, request: pb.GenerateRequest) -> None:
    message = request.messages.add(role="assistant")
    if content is None or isinstance(content, str):
        message.content = content or ""
        return
    texts, thoughts = [], []
    for block in _blocks(fields, content):
        kind = block.text("type", required=True)
        if kind == "text":
            texts.append(_block_text(block, request))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
            block.take("signature")
        elif kind == "tool_use":
            arguments = block.take("input")
            if not isinstance(arguments, dict):
                raise block.refuse("input", f"must be an object, not {shown(arguments)}")
            name = block.text("name", required=True)
            message.tool_calls.add(id=block.text("id"), name=name, arguments=json.dumps(arguments, ensure_ascii=False))
            _read_cache_control(block, request)
        elif kind == "redacted_thinking":
            block.take("data")
        else:
            raise block.refuse("type", f"{shown(kind)} is not supported in an assistant's message")
        block.finish()
    message.content, message.reasoning = "".join(texts), "".join(thoughts)


def _read_begun_answer(fields: Fields, request: pb.GenerateRequest, place: int) -> None:
    """Continue the last message where it is the assistant's; an empty one begins a new answer."""
    last = request.messages[-1]
    if last.role != "assistant":
        return
    if last.tool_calls:
        raise fields.refuse(f"messages[{place}]", "calls tools: their results must follow in a message of the user")
    if last.content != last.content.rstrip():
        raise fields.refuse(f"messages[{place}].content", "final assistant content cannot end with trailing whitespace")
    if last.content:
        request.continue_final_message = True
    elif last.reasoning:
        raise fields.refuse(f"messages[{place}].content", "the last block of the last message cannot be thinking")
    else:
        del request.messages[-1]
        if not request.messages:
            raise fields.refuse("messages", "must have a message that is not empty")


def _add_user(fields: Fields, role: str, content: Any, request: pb.GenerateRequest, media: Given) -> None:
    """Add a message, and before it the results of tools that it has."""
    if isinstance(content, str):
        request.messages.add(role=role, content=content)
        return
    if content == []:
        raise fields.refuse("content", "must have a block")
    own, own_media = pb.ChatMessage(role=role), list[GivenMedium]()
    parts: list[str | pb.Media] = []
    for block in _blocks(fields, content):
        kind = block.text("type", required=True)
        if kind == "text":
            parts.append(_block_text(block, request))
        elif kind == "image":
            parts.append(_image(block, request, own_media))
        elif kind == "document":
            parts += _document(block, request, own_media)
        elif kind == "tool_result":
            _add_tool_result(block, request, media)
        else:
            raise block.refuse("type", f"must be text, image, document or tool_result, not {shown(kind)}")
        block.finish()
    if parts:
        set_content(own, parts)
        request.messages.append(own)
        media += own_media


def _add_tool_result(block: Fields, request: pb.GenerateRequest, media: Given) -> None:
    message = request.messages.add(role="tool", tool_call_id=block.text("tool_use_id", required=True))
    parts = _parts(block, "content", block.take("content"), request, media)
    text = next((part for part in parts if isinstance(part, str) and part), "")
    if block.boolean("is_error") and not text.lstrip().casefold().startswith(ERROR.casefold()):
        parts.insert(0, f"{ERROR}: " if text else ERROR)  # no chat template knows of errors
    set_content(message, parts)
    _read_cache_control(block, request)


def _image(block: Fields, request: pb.GenerateRequest, media: Given) -> pb.Media:
    source = block.required("source")
    kind = must_be_one_of(source, "type", ("base64", "url", "file"))
    if kind == "base64":
        medium = read_data(source, "data", "image", media)
        source.take("media_type")  # seen in the file itself
    elif kind == "url":
        medium = read_url(source, "url", "image", source.take("url"), media)
    else:
        medium = read_file(source, "file_id", "image", media)
    source.finish()
    _read_cache_control(block, request)
    return medium


def _document(block: Fields, request: pb.GenerateRequest, media: Given) -> list[str | pb.Media]:
    """Return a document's title, context and content, apart from what follows; nothing here reads pages."""
    source = block.required("source")
    kind = must_be_one_of(source, "type", ("text", "content", "base64", "url", "file"))
    if kind not in ("text", "content"):
        raise source.refuse("type", f"{kind} is not supported: no model here reads PDFs; send text, or pages as images")
    head = "".join(f"{text}\n" for name in ("title", "context") if (text := block.text(name)))
    if kind == "text":
        if (medium := source.text("media_type")) != "text/plain":
            raise source.refuse("media_type", f"must be text/plain, not {shown(medium)}")
        parts: list[str | pb.Media] = [source.text("data", required=True)]
    else:
        parts = _parts(source, "content", source.take("content"), request, media)
        if not parts:
            raise source.refuse("content", "is missing or empty")
    source.finish()
    _read_cache_control(block, request)
    if block.peek("citations") == {"enabled": False}:
        block.take("citations")  # any other value is named as ignored: answers cite nothing
    return [*([head] if head else []), *parts, "\n\n"]


def _blocks(fields: Fields, content: Any) -> list[Fields]:
    if not isinstance(content, list):
        raise fields.refuse("content", f"must be a text or a list of blocks, not {shown(content)}")
    return [fields.at(f"content[{place}]", block) for place, block in enumerate(content)]


def _block_text(block: Fields, request: pb.GenerateRequest) -> str:
    text = block.text("text", required=True)
    _read_cache_control(block, request)
    block.take("citations")
    return text


def _read_cache_control(block: Fields, request: pb.GenerateRequest) -> None:
    """Keep the prompt as long as the longest mark in it asks; the prompt is kept whole, wherever the mark stands."""
    if (control := block.nested("cache_control")) is None:
        return
    must_be_one_of(control, "type", ("ephemeral",))
    seconds = CACHE_TTLS[one_of(control, "ttl", tuple(CACHE_TTLS)) or "5m"]
    request.cache_retention_s = max(request.cache_retention_s, seconds)
    control.finish()


def _text(fields: Fields, name: str, value: Any, request: pb.GenerateRequest) -> str:
    """Return a text, or the joined texts of blocks."""
    return "".join(part for part in _parts(fields, name, value, request, None) if isinstance(part, str))


def _parts(
    fields: Fields, name: str, value: Any, request: pb.GenerateRequest, media: Given | None
) -> list[str | pb.Media]:
    """Return a text, or the texts and pictures of blocks; without `media` only texts are allowed."""
    if value is None or isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list):
        raise fields.refuse(name, f"must be a text or a list of blocks, not {shown(value)}")
    parts: list[str | pb.Media] = []
    for place, each in enumerate(value):
        block = fields.at(f"{name}[{place}]", each)
        kind = block.text("type", required=True)
        if kind == "text":
            parts.append(_block_text(block, request))
        elif kind == "image" and media is not None:
            parts.append(_image(block, request, media))
        elif kind == "document" and media is not None:
            parts += _document(block, request, media)
        else:
            known = "text" if media is None else "text, image or document"
            raise block.refuse("type", f"must be {known}, not {shown(kind)}")
        block.finish()
    return parts


# ----------------------------------------------------------------------------------------------------- tools


def _read_tools(fields: Fields, request: pb.GenerateRequest) -> None:
    for place, tool in enumerate(fields.objects("tools")):
        known = fields.at(f"tools[{place}]", tool)
        kind = known.take("type")
        if kind not in CLIENT_TOOLS:
            fields.ignored.add(f"tools[{place}].type={kind}"[:64])  # the model never hears of it
            continue
        function: dict[str, Any] = {"name": known.text("name", required=True)}
        if description := known.text("description"):
            function["description"] = description
        function["parameters"] = known.schema("input_schema")
        _read_cache_control(known, request)
        for name in ("strict", "eager_input_streaming"):
            known.take(name)
        known.finish()
        request.tools.append(json.dumps({"type": "function", "function": function}, ensure_ascii=False))
    if (choice := fields.nested("tool_choice")) is None:
        return
    kind = must_be_one_of(choice, "type", ("auto", "any", "tool", "none"))
    if kind in ("any", "tool") and not request.tools:
        raise fields.refuse("tool_choice", "forces a call, but the request has no tools")
    named = choice.text("name", required=True) if kind == "tool" else ""
    request.tool_choice = named or {"auto": "", "any": "required", "none": "none"}[kind]
    request.single_tool_call = choice.boolean("disable_parallel_tool_use") and bool(request.tools)
    choice.finish()
