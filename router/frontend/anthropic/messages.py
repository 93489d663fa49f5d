"""POST /v1/messages: from its body to a GenerateRequest.

Pure.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

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
    texts_of,
    typed,
)
from router.frontend.http.body.media import Given, GivenMedium, read_data, read_file, read_url, set_content
from router.frontend.http.caller import Caller
from router.frontend.http.generation import Generation
from router.frontend.openai.tool_choice import is_skipped
from router.validation import MAX_MESSAGES

EFFORTS = {"disabled": "none", "enabled": "high", "adaptive": "medium"}
"""Effort to reason by the type of `thinking`."""
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}
"""Seconds by `ttl` of cache_control."""
ERROR = "Error"
"""First word of a tool's result that is an error."""
CLIENT_TOOLS = (None, "custom")
"""Types of tools that a client defines; all others run at Anthropic."""
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


class Block(Model, tag_field="type"):
    """Part of a content; a mark on it keeps the prompt."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text", kw_only=True):
    text: str
    citations: Any = None


class Base64Source(Model, tag_field="type", tag="base64"):
    data: str
    media_type: Any = None
    """Not read: it is seen in the file itself."""


class UrlSource(Model, tag_field="type", tag="url"):
    url: str


class FileSource(Model, tag_field="type", tag="file"):
    file_id: str


class ImageBlock(Block, tag="image", kw_only=True):
    source: Base64Source | UrlSource | FileSource


class TextSource(Model, tag_field="type", tag="text"):
    data: str
    media_type: Literal["text/plain"]


class ContentSource(Model, tag_field="type", tag="content"):
    content: str | list[TextBlock | ImageBlock] | None = None


class DocumentBlock(Block, tag="document", kw_only=True):
    source: TextSource | ContentSource
    """No model here reads PDFs: send text, or pages as images."""
    title: str | None = None
    context: str | None = None
    citations: Any = None


Content = str | list[TextBlock | ImageBlock | DocumentBlock]


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


class ThinkingBlock(Model, tag_field="type", tag="thinking"):
    thinking: str | None = None
    signature: Any = None


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    name: str
    input: dict[str, Any]
    id: str | None = None


class RedactedThinkingBlock(Model, tag_field="type", tag="redacted_thinking"):
    data: Any = None


class UserMessage(Model, tag_field="role", tag="user"):
    content: str | list[TextBlock | ImageBlock | DocumentBlock | ToolResultBlock]


class SystemMessage(UserMessage, tag="system"): ...


class AssistantMessage(Model, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | RedactedThinkingBlock] | None = None


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

    messages: list[UserMessage | AssistantMessage | SystemMessage]
    model: str | None = None
    system: str | list[TextBlock] | None = None
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
    if body.system and (text := reader.text(body.system)):
        request.messages.add(role="system", content=text)
    if not 0 < len(body.messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be a list of 1 to {MAX_MESSAGES}")
    for place, message in enumerate(body.messages):
        if isinstance(message, AssistantMessage):
            reader.add_assistant(message)
        else:
            role = "system" if isinstance(message, SystemMessage) else "user"
            reader.add_user(role, message, f"messages[{place}].content")
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
    sampling = pb.Sampling(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=texts_of(body.stop_sequences),
    )
    request.sampling.MergeFrom(sampling)
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

    def add_assistant(self, given: AssistantMessage) -> None:
        message = self._request.messages.add(role="assistant")
        if given.content is None or isinstance(given.content, str):
            message.content = given.content or ""
            return
        for block in given.content:
            if isinstance(block, TextBlock):
                message.content += self._block_text(block)
            elif isinstance(block, ThinkingBlock):
                message.reasoning += block.thinking or ""
            elif isinstance(block, ToolUseBlock):
                arguments = json.dumps(block.input, ensure_ascii=False)
                message.tool_calls.add(id=block.id, name=block.name, arguments=arguments)
                self._keep(block.cache_control)

    def add_user(self, role: str, given: UserMessage, path: str) -> None:
        """Add a message, and before it the results of tools that it has."""
        if isinstance(given.content, str):
            self._request.messages.add(role=role, content=given.content)
            return
        if not given.content:
            raise InvalidRequest(path, "must have a block")
        own, own_media = pb.ChatMessage(role=role), list[GivenMedium]()
        parts: list[str | pb.Media] = []
        for place, block in enumerate(given.content):
            if isinstance(block, ToolResultBlock):
                self._add_tool_result(block, f"{path}[{place}]")
            else:
                parts += self._block(block, f"{path}[{place}]", own_media)
        if parts:
            set_content(own, parts)
            self._request.messages.append(own)
            self.media += own_media

    def text(self, content: str | list[TextBlock]) -> str:
        return content if isinstance(content, str) else "".join(map(self._block_text, content))

    def read_tools(self, body: PromptBody) -> None:
        request = self._request
        for place, given in enumerate(body.tools or ()):
            path = f"tools[{place}]"
            if is_skipped(given, CLIENT_TOOLS, path, self._ignored):
                continue
            tool = typed(given, Tool, path, self._ignored)
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
        if choice.type == "tool" and choice.name is None:
            raise InvalidRequest("tool_choice.name", "is missing")
        named = choice.name if choice.type == "tool" else ""
        request.tool_choice = named or {"auto": "", "any": "required", "none": "none"}[choice.type]
        request.single_tool_call = bool(choice.disable_parallel_tool_use) and bool(request.tools)

    def _add_tool_result(self, block: ToolResultBlock, path: str) -> None:
        message = self._request.messages.add(role="tool", tool_call_id=block.tool_use_id)
        parts = self._parts(block.content, f"{path}.content", self.media)
        text = next((part for part in parts if isinstance(part, str) and part), "")
        if block.is_error and not text.lstrip().casefold().startswith(ERROR.casefold()):
            parts.insert(0, f"{ERROR}: " if text else ERROR)  # no chat template knows of errors
        set_content(message, parts)
        self._keep(block.cache_control)

    def _block(self, block: TextBlock | ImageBlock | DocumentBlock, path: str, media: Given) -> list[str | pb.Media]:
        if isinstance(block, TextBlock):
            return [self._block_text(block)]
        self._keep(block.cache_control)
        return [_image(block, path, media)] if isinstance(block, ImageBlock) else self._document(block, path, media)

    def _document(self, block: DocumentBlock, path: str, media: Given) -> list[str | pb.Media]:
        """Return a document's title, context and content, apart from what follows; nothing here reads pages."""
        head = "".join(f"{text}\n" for text in (block.title, block.context) if text)
        if isinstance(block.source, TextSource):
            parts: list[str | pb.Media] = [block.source.data]
        elif not (parts := self._parts(block.source.content, f"{path}.source.content", media)):
            raise InvalidRequest(f"{path}.source.content", "is missing or empty")
        if block.citations != NO_CITATIONS:  # answers cite nothing
            self._ignored.unread(path, "citations", block.citations)
        return [*([head] if head else []), *parts, "\n\n"]

    def _parts(
        self, content: Content | str | list[TextBlock | ImageBlock] | None, path: str, media: Given
    ) -> list[str | pb.Media]:
        """Return a text, or the texts and pictures of blocks."""
        if content is None or isinstance(content, str):
            return [content] if content else []
        blocks = enumerate(content)
        return [part for place, block in blocks for part in self._block(block, f"{path}[{place}]", media)]

    def _block_text(self, block: TextBlock) -> str:
        self._keep(block.cache_control)
        return block.text

    def _keep(self, mark: CacheControl | None) -> None:
        """Keep the prompt as long as the longest mark in it asks; it is kept whole, wherever the mark stands."""
        if mark is not None:
            seconds = CACHE_TTLS[mark.ttl or "5m"]
            self._request.cache_retention_s = max(self._request.cache_retention_s, seconds)


def _image(block: ImageBlock, path: str, media: Given) -> pb.Media:
    source, path = block.source, f"{path}.source"
    if isinstance(source, Base64Source):
        return read_data(f"{path}.data", "image", source.data, media)
    if isinstance(source, UrlSource):
        return read_url(f"{path}.url", "image", source.url, media)
    return read_file(f"{path}.file_id", "image", source.file_id, media)
