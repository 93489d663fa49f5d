"""POST /v1/chat/completions: from its body to a GenerateRequest.

Reading of `tool_choice`, whose forms that name tools differ by API.

Pure.
"""

import json
from typing import Any, Literal

import msgspec

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import BodyReader, Count, IgnoredFields, Model, needed, shown, typed
from router.frontend.http.body.media import Content, Given, read_parts, set_content
from router.frontend.http.errors import Caller
from router.frontend.openai.request import ApiRequest, GenerationBody, check_choices, common, read_sampling
from router.models.output.output_plan import ANY_CALL, AUTO_CHOICES, NO_CALLS, forces_call
from router.validation import MAX_MESSAGES

ALLOWED = "allowed_tools"
"""Type of a choice that leaves some of the tools."""
Word = Literal["", "auto", "none", "required"]
"""Choices that name no tool."""


class Name(Model):
    name: str


class Allowed(Model):
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class Choice(Allowed):
    """Choice of a tool by its name, or of those that a request leaves; also one of these."""

    type: str | None = None
    name: str | None = None
    function: Name | None = None
    """The name in chats."""
    allowed_tools: Allowed | None = None
    """The fields of `allowed_tools` in chats."""


def read_tool_choice(
    given: Word | Choice | None, request: pb.GenerateRequest, kinds: tuple[str, ...], ignored: IgnoredFields
) -> None:
    """Read the choice of tools of these `kinds`, once the request has its tools.

    Raises InvalidRequest for one that forces a call without tools.
    """
    if isinstance(given, str):
        request.tool_choice = given
    elif given is not None and given.type == ALLOWED:
        _read_allowed(given, request, kinds, ignored)
    elif given is not None:
        if given.type not in kinds:
            known = ", ".join((*kinds, ALLOWED))
            raise InvalidRequest("tool_choice.type", f"must be one of {known}, not {shown(given.type)}")
        request.tool_choice = name = _name(given, "tool_choice")
        if name in (*AUTO_CHOICES, NO_CALLS, ANY_CALL):  # it would be read as that choice
            raise InvalidRequest("tool_choice", f"cannot force a tool with the reserved name {shown(name)}")
    if forces_call(request.tool_choice) and not request.tools:
        raise InvalidRequest("tool_choice", "forces a call, but the request has no tools")


def _read_allowed(choice: Choice, request: pb.GenerateRequest, kinds: tuple[str, ...], ignored: IgnoredFields) -> None:
    """Leave the request only its allowed tools: no model calls a tool that it never heard of."""
    allowed, path = choice.allowed_tools or choice, "tool_choice"
    path += "" if allowed is choice else f".{ALLOWED}"
    mode = needed(allowed.mode, f"{path}.mode")
    if not allowed.tools:
        raise InvalidRequest(f"{path}.tools", "must name at least one tool")
    of_name = {json.loads(tool)["function"]["name"]: tool for tool in request.tools}
    tools: dict[str, str] = {}
    for place, each in enumerate(allowed.tools):
        where = f"{path}.tools[{place}]"
        if is_skipped(each, kinds, where, ignored):
            continue
        name = _name(typed(each, Choice, where, ignored), where)
        if name not in of_name:
            raise InvalidRequest(where, f"{shown(name)} is not among the request's tools")
        tools[name] = of_name[name]
    del request.tools[:]
    request.tools.extend(tools.values())
    request.single_tool_call = request.single_tool_call and bool(tools)
    request.tool_choice = ANY_CALL if mode == ANY_CALL else ""


def _name(choice: Choice, path: str) -> str:
    return choice.function.name if choice.function is not None else needed(choice.name, f"{path}.name")


def is_skipped(tool: dict[str, Any], kinds: tuple[str | None, ...], path: str, ignored: IgnoredFields) -> bool:
    """Return whether a tool is of a kind of which the model never hears; it is noted."""
    kind = tool.get("type")
    if kind in kinds or (not isinstance(kind, str) and None not in kinds):
        return False
    ignored.add(f"{path}.type={kind}"[:64])
    return True


# ------------------------------------------------------------------------------------------------ messages


PARTS = ("text", "refusal", "image_url", "audio_url", "video_url", "input_audio", "file")


class Spoken(Model, tag_field="role"):
    content: Content
    name: str | None = None


class Developer(Spoken, tag="developer"): ...


class System(Spoken, tag="system"): ...


class User(Spoken, tag="user"): ...


class MadeFunction(Model):
    name: str
    arguments: str


class MadeCall(Model):
    function: MadeFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: Any = None
    """Left by clients that assemble a call from a stream."""


class Assistant(Model, tag_field="role", tag="assistant"):
    """A turn of the model, or a message of an answer that comes back unchanged."""

    content: Content | None = None
    """Agents send null after a refusal."""
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Literal[""] | None = None
    function_call: Literal[""] | None = None


class ToolResult(Model, tag_field="role", tag="tool"):
    tool_call_id: str
    content: Content | None = None
    """Agents send null for an empty result."""
    name: str | None = None


Message = User | Assistant | ToolResult | System | Developer


def read_messages(messages: list[Message], media: Given) -> list[pb.ChatMessage]:
    """Return the messages, and add what is said of their media.

    Raises InvalidRequest.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be a list of 1 to {MAX_MESSAGES}")
    return [_message(message, f"messages[{place}]", media) for place, message in enumerate(messages)]


def _message(given: Message, path: str, media: Given) -> pb.ChatMessage:
    message = pb.ChatMessage(role=str(given.__struct_config__.tag), name=given.name or "")
    if isinstance(given, Assistant):
        for call in given.tool_calls or ():
            message.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
        message.reasoning = given.reasoning_content or given.reasoning or ""
    elif isinstance(given, ToolResult):
        message.tool_call_id = given.tool_call_id
    set_content(message, read_parts(given.content, f"{path}.content", PARTS, media))
    return message


# --------------------------------------------------------------------------------------------------- tools


class Function(Model):
    name: str
    description: Any = None
    parameters: dict[str, Any] | None = None
    strict: Any = None
    """Whether a call follows its schema. It is not read, since a forced call always does."""


class Tool(Model):
    type: Literal["function"]
    function: Function


class ToolsBody(Model):
    """Fields besides the messages that make a prompt."""

    tools: list[dict[str, Any]] | None = None
    """Tools as the template gets them, with fields that no struct has."""
    tool_choice: Word | Choice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    # the fields of ToolsBody: a struct has one base with fields
    tools: list[dict[str, Any]] | None = None
    tool_choice: Word | Choice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def read_tools(body: ToolsBody | ChatBody, request: pb.GenerateRequest, ignored: IgnoredFields) -> None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`."""
    for place, tool in enumerate(body.tools or ()):
        typed(tool, Tool, f"tools[{place}]", ignored)
        request.tools.append(msgspec.json.encode(tool).decode())
    request.single_tool_call = body.parallel_tool_calls is False and bool(request.tools)
    read_tool_choice(body.tool_choice, request, ("function",), ignored)


def read_prompt_end(body: ToolsBody | ChatBody, request: pb.GenerateRequest) -> None:
    """Read `add_generation_prompt`, by default true, and `continue_final_message`, which takes its place."""
    adds, continues = body.add_generation_prompt, bool(body.continue_final_message)
    if adds and continues:
        reason = "cannot be true beside add_generation_prompt: the prompt ends within the last message or after it"
        raise InvalidRequest("continue_final_message", reason)
    request.continue_final_message = continues
    request.no_generation_prompt = adds is False and not continues


def template_variables(body: ToolsBody | ChatBody) -> str:
    """Return the variables of the template as JSON; empty: there are none."""
    if (given := body.chat_template_kwargs) is None:
        return ""
    return msgspec.json.encode({name: value for name, value in given.items() if value is not None}).decode()


# -------------------------------------------------------------------------------------------------- requests


def _request(body: ChatBody, caller: Caller, ignored: IgnoredFields) -> ApiRequest:
    if not body.logprobs and body.top_logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs")
    most, older = body.max_completion_tokens, body.max_tokens
    if most is not None and older is not None and most != older:
        raise InvalidRequest("max_completion_tokens", "differs from max_tokens: set one of them")
    names = {"logprobs": "top_logprobs"}
    names["max_tokens"] = "max_completion_tokens" if older is None or most is not None else "max_tokens"
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = read_sampling(body, older if most is None else most, logprobs, names)
    media: Given = []
    messages = read_messages(body.messages, media)
    request, api_request = common(body, caller, sampling, names)
    api_request.media = media
    read_tools(body, request, ignored)
    if forces_call(request.tool_choice):
        api_request.names["structured"] = "tools"
    request.chat_template_kwargs = template_variables(body)
    request.reasoning_effort = body.reasoning_effort or ""
    api_request.include_reasoning = body.include_reasoning is not False
    request.messages.extend(messages)
    read_prompt_end(body, request)
    if request.continue_final_message or request.no_generation_prompt:
        api_request.role = messages[-1].role
    request.parse_output = True
    api_request.requests.append(request)
    check_choices(api_request, "n")
    return api_request


read_chat = BodyReader(ChatBody, _request)
