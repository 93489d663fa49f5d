"""POST /v1/messages: from its body to a GenerateRequest.

Pure.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import msgspec

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import (
    INT32,
    INT64,
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
from router.frontend.http.body.media import Given, GivenMedium, read_data, read_file, read_url, set_content
from router.frontend.http.errors import Caller
from router.frontend.http.generation import Generation
from router.frontend.openai.chat import is_skipped
from router.validation import MAX_MESSAGES

EFFORTS = {"disabled": "none", "enabled": "high", "adaptive": "medium"}
"""Effort to reason by the type of `thinking`."""
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}
"""Seconds by `ttl` of cache_control."""
ERROR = "Error"
"""First word of a tool's result that is an error."""
CLIENT_TOOLS = (None, "custom")
"""Types of tools that a client defines; all others run at Anthropic."""
PARTS = ("text", "image", "document")
"""Types of blocks that a user's message may have, and a tool's result."""
NO_CITATIONS = {"enabled": False}
"""Value of `citations` that asks for nothing."""
NAMES = {
    "stop": "stop_sequences",
    "request_id": "x-request-id",
    "tenant": "x-tenant",
    "structured": "output_config",
    "continue_final_message": "messages",
}


@dataclass(slots=True)
class MessagesRequest(Generation):
    """One request of the Messages API."""


# ---------------------------------------------------------------------------------------------------- bodies


class CacheControl(Model):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Source(Model):
    """Content of an image or of a document."""

    type: Literal["text", "content", "base64", "url", "file"]
    data: str | None = None
    url: str | None = None
    file_id: str | None = None
    content: Optional["Content"] = None
    media_type: Any = None
    """Seen in the file itself, except of texts."""


class Block(Model):
    """Part of a content, of any type; a mark on it keeps the prompt."""

    type: str
    text: str | None = None
    source: Source | None = None
    title: str | None = None
    context: str | None = None
    citations: Any = None
    tool_use_id: str | None = None
    content: Optional["Content"] = None
    is_error: bool | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    signature: Any = None
    data: Any = None
    """Thoughts that are not shown."""


Content = str | list[Block]


class Message(Model):
    role: Literal["user", "assistant", "system"]
    content: Content | None = None


class Tool(Model):
    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    cache_control: CacheControl | None = None
    strict: Any = None
    eager_input_streaming: Any = None


class ToolChoice(Model):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    type: Literal["disabled", "enabled", "adaptive"] | None = None
    budget_tokens: Annotated[int, msgspec.Meta(ge=-INT64, le=INT64 - 1)] | None = None
    """Upper bound, of which a model here does not know."""


class OutputFormat(Model):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Model):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(Model):
    """Body of POST /v1/messages/count_tokens."""

    messages: list[Message]
    model: str | None = None
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(PromptBody, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Positive
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=INT32 - 1)] | None = None
    stop_sequences: Texts | None = None
    stream: bool | None = None


# -------------------------------------------------------------------------------------------------- requests


def _prompt(body: PromptBody, caller: Caller, ignored: IgnoredFields) -> tuple[pb.GenerateRequest, Given]:
    """Return a request with a prompt of system, messages, tools and thinking; and what is said of its media."""
    request = pb.GenerateRequest(
        model=body.model or "", tenant=caller.tenant, request_id=caller.request_id, parse_output=True
    )
    reader = _PromptReader(request, ignored)
    if text := reader.text(body.system, "system"):
        request.messages.add(role="system", content=text)
    if not 0 < len(body.messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be a list of 1 to {MAX_MESSAGES}")
    for place, message in enumerate(body.messages):
        add = reader.add_assistant if message.role == "assistant" else reader.add_user
        add(message, f"messages[{place}].content")
    _read_begun_answer(request, f"messages[{len(body.messages) - 1}]")
    reader.read_tools(body)
    if body.thinking is not None:
        request.reasoning_effort = EFFORTS[body.thinking.type or "disabled"]
    if (config := body.output_config) is not None:
        request.reasoning_effort = config.effort or request.reasoning_effort
        if config.format is not None:
            request.sampling.structured.json_schema = json.dumps(config.format.schema)
    return request, reader.media


def _request(body: MessagesBody, caller: Caller, ignored: IgnoredFields) -> MessagesRequest:
    request, media = _prompt(body, caller, ignored)
    same = given(body, ("max_tokens", "temperature", "top_p", "top_k"))
    request.sampling.MergeFrom(pb.Sampling(stop=texts_of(body.stop_sequences), **same))
    names = dict(NAMES)
    if request.tool_choice not in ("", "auto", "none"):
        names["structured"] = "tools"
    return MessagesRequest(request.request_id, [request], names, stream=bool(body.stream), media=media)


read_prompt = BodyReader(PromptBody, _prompt)
read_messages = BodyReader(MessagesBody, _request)


def _read_begun_answer(request: pb.GenerateRequest, path: str) -> None:
    """Continue the last message where it is the assistant's; an empty one begins a new answer."""
    last = request.messages[-1]
    if last.role != "assistant":
        return
    if last.tool_calls:
        raise InvalidRequest(path, "calls tools: their results must follow in a message of the user")
    if last.content != last.content.rstrip():
        raise InvalidRequest(f"{path}.content", "final assistant content cannot end with trailing whitespace")
    if last.content:
        request.continue_final_message = True
    elif last.reasoning:
        raise InvalidRequest(f"{path}.content", "the last block of the last message cannot be thinking")
    else:
        del request.messages[-1]
        if not request.messages:
            raise InvalidRequest("messages", "must have a message that is not empty")


class _PromptReader:
    """Maker of a request's messages and tools."""

    def __init__(self, request: pb.GenerateRequest, ignored: IgnoredFields) -> None:
        self.media: Given = []
        self._request = request
        self._ignored = ignored

    def add_assistant(self, turn: Message, path: str) -> None:
        message = self._request.messages.add(role="assistant")
        if not isinstance(turn.content, list):
            message.content = turn.content or ""
            return
        for block, where in self._blocks(turn.content, path, "text", "thinking", "tool_use", "redacted_thinking"):
            if block.type == "text":
                message.content += needed(block.text, f"{where}.text")
            elif block.type == "thinking":
                message.reasoning += block.thinking or ""
            elif block.type == "tool_use":
                name, arguments = needed(block.name, f"{where}.name"), needed(block.input, f"{where}.input")
                message.tool_calls.add(
                    id=block.id or "", name=name, arguments=json.dumps(arguments, ensure_ascii=False)
                )

    def add_user(self, turn: Message, path: str) -> None:
        """Add a message, and before it the results of tools that it has."""
        own, own_media = pb.ChatMessage(role=turn.role), list[GivenMedium]()
        if not isinstance(turn.content, list):
            own.content = needed(turn.content, path)
            self._request.messages.append(own)
            return
        if not turn.content:
            raise InvalidRequest(path, "must have a block")
        parts: list[str | pb.Media] = []
        for block, where in self._blocks(turn.content, path, *PARTS, "tool_result"):
            if block.type == "tool_result":
                self._add_tool_result(block, where)
            else:
                parts += self._part(block, where, own_media)
        if parts:
            set_content(own, parts)
            self._request.messages.append(own)
            self.media += own_media

    def text(self, content: Content | None, path: str) -> str:
        if not isinstance(content, list):
            return content or ""
        return "".join(needed(block.text, f"{where}.text") for block, where in self._blocks(content, path, "text"))

    def read_tools(self, body: PromptBody) -> None:
        request = self._request
        for place, each in enumerate(body.tools or ()):
            path = f"tools[{place}]"
            if is_skipped(each, CLIENT_TOOLS, path, self._ignored):
                continue
            tool = typed(each, Tool, path, self._ignored)
            function: dict[str, Any] = {"name": tool.name}
            if tool.description:
                function["description"] = tool.description
            function["parameters"] = tool.input_schema
            self._keep(tool.cache_control)
            request.tools.append(msgspec.json.encode({"type": "function", "function": function}).decode())
        if (choice := body.tool_choice) is None:
            return
        if choice.type in ("any", "tool") and not request.tools:
            raise InvalidRequest("tool_choice", "forces a call, but the request has no tools")
        named = needed(choice.name, "tool_choice.name") if choice.type == "tool" else ""
        if choice.type != "tool":
            self._ignored.unread("tool_choice", "name", choice.name)
        request.tool_choice = named or {"auto": "", "any": "required", "none": "none"}[choice.type]
        request.single_tool_call = bool(choice.disable_parallel_tool_use) and bool(request.tools)

    def _add_tool_result(self, block: Block, path: str) -> None:
        call_id = needed(block.tool_use_id, f"{path}.tool_use_id")
        message = self._request.messages.add(role="tool", tool_call_id=call_id)
        parts = self._parts(block.content, f"{path}.content", self.media)
        text = next((part for part in parts if isinstance(part, str) and part), "")
        if block.is_error and not text.lstrip().casefold().startswith(ERROR.casefold()):
            parts.insert(0, f"{ERROR}: " if text else ERROR)  # no chat template knows of errors
        set_content(message, parts)

    def _parts(self, content: Content | None, path: str, media: Given) -> list[str | pb.Media]:
        """Return a text, or the texts and pictures of blocks."""
        if not isinstance(content, list):
            return [content] if content else []
        blocks = self._blocks(content, path, *PARTS)
        return [part for block, where in blocks for part in self._part(block, where, media)]

    def _part(self, block: Block, path: str, media: Given) -> list[str | pb.Media]:
        if block.type == "text":
            return [needed(block.text, f"{path}.text")]
        source, where = needed(block.source, f"{path}.source"), f"{path}.source"
        return [_image(source, where, media)] if block.type == "image" else self._document(block, source, path, media)

    def _document(self, block: Block, source: Source, path: str, media: Given) -> list[str | pb.Media]:
        """Return a document's title, context and content, apart from what follows; nothing here reads pages."""
        head = "".join(f"{text}\n" for text in (block.title, block.context) if text)
        where = f"{path}.source"
        if source.type == "text":
            if source.media_type != "text/plain":
                raise InvalidRequest(f"{where}.media_type", f"must be text/plain, not {shown(source.media_type)}")
            parts: list[str | pb.Media] = [needed(source.data, f"{where}.data")]
        elif source.type != "content":
            reason = "is not supported: no model here reads PDFs; send text, or pages as images"
            raise InvalidRequest(f"{where}.type", f"{source.type} {reason}")
        elif not (parts := self._parts(source.content, f"{where}.content", media)):
            raise InvalidRequest(f"{where}.content", "is missing or empty")
        if block.citations != NO_CITATIONS:  # answers cite nothing
            self._ignored.unread(path, "citations", block.citations)
        return [*([head] if head else []), *parts, "\n\n"]

    def _blocks(self, blocks: list[Block], path: str, *known: str) -> Iterator[tuple[Block, str]]:
        """Yield blocks, which have one of the `known` types, with their paths."""
        for place, block in enumerate(blocks):
            if block.type not in known:
                reason = f"must be one of {', '.join(known)}, not {shown(block.type)}"
                raise InvalidRequest(f"{path}[{place}].type", reason)
            self._keep(block.cache_control)
            yield block, f"{path}[{place}]"

    def _keep(self, mark: CacheControl | None) -> None:
        """Keep the prompt as long as the longest mark in it asks; it is kept whole, wherever the mark stands."""
        if mark is not None:
            seconds = CACHE_TTLS[mark.ttl or "5m"]
            self._request.cache_retention_s = max(self._request.cache_retention_s, seconds)


def _image(source: Source, path: str, media: Given) -> pb.Media:
    if source.type == "base64":
        return read_data(f"{path}.data", "image", source.data or "", media)
    if source.type == "url":
        return read_url(f"{path}.url", "image", source.url, media)
    if source.type == "file":
        return read_file(f"{path}.file_id", "image", source.file_id or "", media)
    raise InvalidRequest(f"{path}.type", f"must be one of base64, url, file, not {source.type}")
