"""Reading of `tool_choice`, whose forms that name tools differ by API.

Pure.
"""

import json
from typing import Any, Literal

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import IgnoredFields, Model, needed, shown, typed
from router.models.output.output_plan import ANY_CALL, AUTO_CHOICES, NO_CALLS, forces_call

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
