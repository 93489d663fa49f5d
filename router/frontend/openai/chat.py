"""POST /v1/chat/completions: from its body to a GenerateRequest.

Pure.
"""

import json
from typing import Any

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.caller import Caller
from router.frontend.http.fields import Fields, one_of, shown
from router.frontend.openai.forced_calls import Function, call_grammar
from router.frontend.openai.request import ApiRequest, check_choices, common
from router.frontend.openai.sampling import INT32, GenerationOptions, read_sampling
from router.frontend.openai.tool_calls import CLOSE
from router.validation import MAX_MESSAGES

ROLES = ("developer", "system", "user", "assistant", "tool")


def read_chat(body: dict[str, Any], caller: Caller) -> ApiRequest:
    """Read a chat request.

    Raises InvalidRequest naming the field at fault.
    """
    fields = Fields(body)
    options = read_sampling(fields, ("max_completion_tokens", "max_tokens"), None)
    _read_logprobs(fields, options)
    messages = fields.objects("messages")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be a list of 1 to {MAX_MESSAGES}")
    tools, functions = _read_tools(fields)
    _read_tool_choice(fields, options, functions)
    request, asked = common(fields, caller, options)
    if (variables := fields.nested("chat_template_kwargs")) is not None:
        request.chat_template_kwargs = variables.rest()
    fields.finish()
    request.messages.extend(_message(message, f"messages[{place}]") for place, message in enumerate(messages))
    request.tools.extend(tools)
    asked.requests.append(request)
    asked.tools, asked.forced_calls = bool(tools) and options.parse_calls, options.forced_calls
    check_choices(asked, "n")
    return asked


def _read_logprobs(fields: Fields, options: GenerationOptions) -> None:
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", -INT32, INT32 - 1)
    options.names["logprobs"] = "top_logprobs"
    if wanted:
        options.sampling.logprobs = top or 0
    elif top:
        raise fields.refuse("top_logprobs", "means nothing without logprobs")


# ------------------------------------------------------------------------------------------------ messages


def _message(values: Any, where: str) -> pb.ChatMessage:
    fields = Fields(values, where)
    role = one_of(fields, "role", ROLES)
    if role is None:
        raise fields.refuse("role", "is missing")
    message = pb.ChatMessage(role=role, name=fields.text("name"))
    if role == "assistant":
        message.tool_calls.extend(
            _made_call(call, fields.path(f"tool_calls[{place}]"))
            for place, call in enumerate(fields.objects("tool_calls"))
        )
        _check_nothing_else(fields)
    if role == "tool":
        message.tool_call_id = fields.text("tool_call_id", required=True)
    message.content = _content(fields, required=not message.tool_calls)
    fields.finish()
    return message


def _check_nothing_else(fields: Fields) -> None:
    """Accept fields of OpenAI's own answers when clients send these back unchanged."""
    for name in ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"):
        if fields.take(name) not in (None, "", []):
            raise fields.refuse(name, "is not supported")


def _content(fields: Fields, required: bool) -> str:
    """Return a text, or the joined parts where all are texts."""
    content = fields.take("content")
    if isinstance(content, str):
        return content
    if content is None and not required:
        return ""
    if not isinstance(content, list):
        raise fields.refuse("content", f"must be a text or a list of parts, not {shown(content)}")
    return "".join(_part(part, fields.path(f"content[{place}]")) for place, part in enumerate(content))


def _part(values: Any, where: str) -> str:
    fields = Fields(values, where)
    kind = fields.take("type")
    if kind != "text":
        raise fields.refuse("type", f"must be text, not {shown(kind)}")
    text = fields.text("text", required=True)
    fields.finish()
    return text


def _made_call(values: Any, where: str) -> pb.ToolCall:
    fields = Fields(values, where)
    one_of(fields, "type", ("function",))
    call_id = fields.text("id")
    function = fields.nested("function")
    if function is None:
        raise fields.refuse("function", "is missing")
    call = pb.ToolCall(id=call_id, name=function.text("name", required=True))
    call.arguments = function.text("arguments", required=True)
    function.finish()
    fields.take("index")  # from a call that was assembled from a stream
    fields.finish()
    return call


# --------------------------------------------------------------------------------------------------- tools


def _read_tools(fields: Fields) -> tuple[list[str], list[Function]]:
    """Return each tool as JSON for the chat template, and as a Function."""
    texts, functions = [], []
    for place, tool in enumerate(fields.objects("tools")):
        where = f"tools[{place}]"
        known = Fields(tool, where)
        if one_of(known, "type", ("function",)) is None:
            raise known.refuse("type", "is missing")
        function = known.nested("function")
        if function is None:
            raise known.refuse("function", "is missing")
        known.finish()
        functions.append(_function(function))
        texts.append(json.dumps(tool, ensure_ascii=False))
    return texts, functions


def _function(fields: Fields) -> Function:
    name = fields.text("name", required=True)
    fields.text("description")
    fields.boolean("strict")  # arguments follow the schema where tool_choice forces the call
    parameters = fields.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise fields.refuse("parameters", f"must be a JSON schema, not {shown(parameters)}")
    fields.finish()
    return Function(name, parameters)


def _read_tool_choice(fields: Fields, options: GenerationOptions, functions: list[Function]) -> None:
    """Read tool_choice; a forced call becomes structured output."""
    choice = fields.take("tool_choice")
    several = fields.take("parallel_tool_calls")
    if several is not None and not isinstance(several, bool):
        raise fields.refuse("parallel_tool_calls", f"must be true or false, not {shown(several)}")
    if choice == "none" or not functions:
        if choice not in (None, "none", "auto"):
            raise fields.refuse("tool_choice", "forces a call, and there are no tools")
        options.parse_calls = False
        return
    if choice in (None, "auto"):
        if several is False:
            options.sampling.stop.append(CLOSE)  # nothing follows the first call
        return
    candidates = functions if choice == "required" else [_named(Fields(choice, "tool_choice"), functions)]
    if options.sampling.HasField("structured"):
        raise fields.refuse("tool_choice", f"and {options.names['structured']} cannot both say what is generated")
    single = several is False or choice != "required"
    options.sampling.structured.grammar = call_grammar(candidates, single)
    options.names["structured"] = "tools"
    options.forced_calls = True


def _named(fields: Fields, functions: list[Function]) -> Function:
    if one_of(fields, "type", ("function",)) is None:
        raise fields.refuse("type", "is missing")
    wanted = fields.nested("function")
    if wanted is None:
        raise fields.refuse("function", "is missing")
    name = wanted.text("name", required=True)
    wanted.finish()
    fields.finish()
    for function in functions:
        if function.name == name:
            return function
    raise InvalidRequest("tool_choice.function.name", f"{shown(name)} is not among the tools")
