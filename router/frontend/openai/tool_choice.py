"""Reading of `tool_choice`, whose forms that name tools differ by API.

Pure.
"""

import json
from typing import Any, Literal, Protocol

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import IgnoredFields, Model, shown, typed
from router.models.output.output_plan import ANY_CALL, AUTO_CHOICES, NO_CALLS, forces_call

Word = Literal["", "auto", "none", "required"]
"""Choices that name no tool."""


class Allowed(Model):
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class AllowedTools(Allowed, tag_field="type", tag="allowed_tools"):
    """Choice that leaves some of the tools."""

    allowed_tools: Allowed | None = None
    """The fields of chats, which are one level deeper."""


class NamesTool(Protocol):
    """Struct that names one tool."""

    @property
    def tool_name(self) -> str: ...


Choice = Word | AllowedTools | NamesTool | None


def read_tool_choice(
    choice: Choice,
    request: pb.GenerateRequest,
    kinds: tuple[str, ...],
    named: type[NamesTool],
    ignored: IgnoredFields,
) -> None:
    """Read the choice, once the request has its tools; `named` is what names an allowed tool of one of `kinds`.

    Raises InvalidRequest for one that forces a call without tools.
    """
    if isinstance(choice, str):
        request.tool_choice = choice
    elif isinstance(choice, AllowedTools):
        _read_allowed(choice, request, kinds, named, ignored)
    elif choice is not None:
        request.tool_choice = choice.tool_name
        if request.tool_choice in (*AUTO_CHOICES, NO_CALLS, ANY_CALL):  # it would be read as that choice
            reason = f"cannot force a tool with the reserved name {shown(request.tool_choice)}"
            raise InvalidRequest("tool_choice", reason)
    if forces_call(request.tool_choice) and not request.tools:
        raise InvalidRequest("tool_choice", "forces a call, but the request has no tools")


def _read_allowed(
    choice: AllowedTools,
    request: pb.GenerateRequest,
    kinds: tuple[str, ...],
    named: type[NamesTool],
    ignored: IgnoredFields,
) -> None:
    """Leave the request only its allowed tools: no model calls a tool that it never heard of."""
    allowed, path = choice.allowed_tools or choice, "tool_choice"
    path += "" if allowed is choice else ".allowed_tools"
    if allowed.mode is None:
        raise InvalidRequest(f"{path}.mode", "is missing")
    if not allowed.tools:
        raise InvalidRequest(f"{path}.tools", "must name at least one tool")
    of_name = {json.loads(tool)["function"]["name"]: tool for tool in request.tools}
    tools: dict[str, str] = {}
    for place, each in enumerate(allowed.tools):
        if is_skipped(each, kinds, f"{path}.tools[{place}]", ignored):
            continue
        name = typed(each, named, f"{path}.tools[{place}]", ignored).tool_name
        if name not in of_name:
            raise InvalidRequest(f"{path}.tools[{place}]", f"{shown(name)} is not among the request's tools")
        tools[name] = of_name[name]
    del request.tools[:]
    request.tools.extend(tools.values())
    request.single_tool_call = request.single_tool_call and bool(tools)
    request.tool_choice = ANY_CALL if allowed.mode == ANY_CALL else ""


def is_skipped(tool: dict[str, Any], kinds: tuple[str | None, ...], path: str, ignored: IgnoredFields) -> bool:
    """Return whether a tool is of a kind of which the model never hears; it is noted."""
    kind = tool.get("type")
    if kind in kinds or (not isinstance(kind, str) and None not in kinds):
        return False
    ignored.add(f"{path}.type={kind}"[:64])
    return True
