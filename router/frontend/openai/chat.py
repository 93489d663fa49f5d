"""POST /v1/chat/completions: from its body to a GenerateRequest.

Pure.
"""

import json

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import INT32, Fields, must_be_one_of, one_of, shown
from router.frontend.http.body.media import Given, read_data, read_document, read_url, set_content
from router.frontend.http.caller import Caller
from router.frontend.openai.request import ApiRequest, check_choices, common
from router.frontend.openai.sampling import GenerationOptions, read_sampling
from router.frontend.openai.tool_choice import read_tool_choice
from router.models.output.output_plan import forces_call
from router.validation import MAX_MESSAGES

URLS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
"""Kinds of media by the type of a part that has a URL."""
ROLES = ("developer", "system", "user", "assistant", "tool")


def read_chat(fields: Fields, caller: Caller) -> ApiRequest:
    """Read a chat request.

    Raises InvalidRequest naming the field at fault.
    """
    options = read_sampling(fields, ("max_completion_tokens", "max_tokens"), None)
    _read_logprobs(fields, options)
    media: Given = []
    messages = read_messages(fields, media)
    request, api_request = common(fields, caller, options)
    api_request.media = media
    read_tools(fields, request)
    if forces_call(request.tool_choice):
        api_request.names["structured"] = "tools"
    if (variables := fields.nested("chat_template_kwargs")) is not None:
        request.chat_template_kwargs = variables.rest()
    request.reasoning_effort = fields.text("reasoning_effort")
    api_request.include_reasoning = fields.boolean("include_reasoning", default=True)
    request.messages.extend(messages)
    read_prompt_end(fields, request)
    if request.continue_final_message or request.no_generation_prompt:
        api_request.role = messages[-1].role
    request.parse_output = True
    fields.finish()
    api_request.requests.append(request)
    check_choices(api_request, "n")
    return api_request


def read_prompt_end(fields: Fields, request: pb.GenerateRequest) -> None:
    """Read `add_generation_prompt`, by default true, and `continue_final_message`, which takes its place."""
    is_given = fields.given("add_generation_prompt")
    adds, continues = fields.boolean("add_generation_prompt"), fields.boolean("continue_final_message")
    if adds and continues:
        reason = "cannot be true beside add_generation_prompt: the prompt ends within the last message or after it"
        raise fields.refuse("continue_final_message", reason)
    request.continue_final_message = continues
    request.no_generation_prompt = is_given and not adds and not continues


def _read_logprobs(fields: Fields, options: GenerationOptions) -> None:
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", -INT32, INT32 - 1)
    options.names["logprobs"] = "top_logprobs"
    if wanted:
        options.sampling.logprobs = top or 0
    elif top:
        raise fields.refuse("top_logprobs", "needs logprobs")


# ------------------------------------------------------------------------------------------------ messages


def read_messages(fields: Fields, media: Given) -> list[pb.ChatMessage]:
    """Read `messages`, and add what is said of their media.

    Raises InvalidRequest.
    """
    messages = fields.objects("messages")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be a list of 1 to {MAX_MESSAGES}")
    return [_message(fields.at(f"messages[{place}]", message), media) for place, message in enumerate(messages)]


def _message(fields: Fields, media: Given) -> pb.ChatMessage:
    role = must_be_one_of(fields, "role", ROLES)
    message = pb.ChatMessage(role=role, name=fields.text("name"))
    if role == "assistant":
        calls = enumerate(fields.objects("tool_calls"))
        message.tool_calls.extend(_made_call(fields.at(f"tool_calls[{place}]", call)) for place, call in calls)
        message.reasoning = fields.text("reasoning_content") or fields.text("reasoning")
        _skip_own_fields(fields)
    if role == "tool":
        message.tool_call_id = fields.text("tool_call_id", required=True)
    _read_content(fields, message, media, may_lack=role in ("assistant", "tool"))
    fields.finish()
    return message


def _skip_own_fields(fields: Fields) -> None:
    """Drop fields of our own answers when clients send these back unchanged."""
    for name in ("refusal", "annotations", "reasoning", "reasoning_content"):
        fields.take(name)
    for name in ("audio", "function_call"):
        if fields.take(name) not in (None, ""):
            raise fields.refuse(name, "is not supported")


def _read_content(fields: Fields, message: pb.ChatMessage, media: Given, may_lack: bool) -> None:
    """Read a text, or parts; null is an empty text where the content `may_lack`.

    Agents send null for an assistant's turn after a refusal, and for a tool's empty result.
    """
    content = fields.take("content")
    if isinstance(content, str):
        message.content = content
    elif isinstance(content, list):
        parts = [_part(fields.at(f"content[{place}]", part), media) for place, part in enumerate(content)]
        set_content(message, parts)
    elif content is not None or not may_lack:
        raise fields.refuse("content", f"must be a text or a list of parts, not {shown(content)}")


def _part(fields: Fields, media: Given) -> str | pb.Media:
    kind = fields.take("type")
    part: str | pb.Media
    if kind == "refusal":
        part = fields.text("refusal")
    elif kind == "text":
        part = fields.text("text", required=True)
    elif isinstance(kind, str) and kind in URLS:
        part = _medium_of_url(fields, kind, media)
    elif kind == "input_audio":
        part = read_input_audio(fields, media)
    elif kind == "file":
        file = fields.required("file")
        part = read_document(file, media)
        file.finish()
    else:
        known = ", ".join(("text", *URLS, "input_audio", "file"))
        raise fields.refuse("type", f"must be one of {known}, not {shown(kind)}")
    fields.finish()
    return part


def _medium_of_url(fields: Fields, name: str, media: Given) -> pb.Media:
    """Read a URL, which is in an object or by itself."""
    if not isinstance(fields.peek(name), dict):
        return read_url(fields, name, URLS[name], fields.take(name), media)
    within = fields.at(name, fields.take(name))
    medium = read_url(within, "url", URLS[name], within.take("url"), media)
    within.finish()
    return medium


def read_input_audio(fields: Fields, media: Given) -> pb.Media:
    """Read the sound of a part; its format is seen in the file itself.

    Raises InvalidRequest.
    """
    sound = fields.required("input_audio")
    medium = read_data(sound, "data", "audio", media)
    sound.take("format")
    sound.finish()
    return medium


def _made_call(fields: Fields) -> pb.ToolCall:
    one_of(fields, "type", ("function",))
    call_id = fields.text("id")
    function = fields.required("function")
    call = pb.ToolCall(id=call_id, name=function.text("name", required=True))
    call.arguments = function.text("arguments", required=True)
    function.finish()
    fields.take("index")  # from a call that was assembled from a stream
    fields.finish()
    return call


# --------------------------------------------------------------------------------------------------- tools


def read_tools(fields: Fields, request: pb.GenerateRequest) -> None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`."""
    for place, tool in enumerate(fields.objects("tools")):
        known = fields.at(f"tools[{place}]", tool)
        must_be_one_of(known, "type", ("function",))
        _check_function(known.required("function"))
        known.finish()
        request.tools.append(json.dumps(tool, ensure_ascii=False))
    several = fields.boolean("parallel_tool_calls", default=True)
    request.single_tool_call = not several and bool(request.tools)
    read_tool_choice(fields, request, ("function",), _function_name)


def _check_function(fields: Fields) -> None:
    fields.text("name", required=True)
    if fields.given("parameters"):
        fields.schema("parameters")
    for name in ("description", "strict"):  # a forced call follows its schema in any case
        fields.take(name)
    fields.finish()


def _function_name(choice: Fields) -> str:
    function = choice.required("function")
    name = function.text("name", required=True)
    function.finish()
    return name
