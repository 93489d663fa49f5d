"""Reading of `tool_choice`, whose forms that name tools differ by API.

Pure.
"""

import json
from collections.abc import Callable
from typing import Any

from protos import inference_pb2 as pb
from router.frontend.http.body.fields import Fields, must_be_one_of, shown
from router.models.output.output_plan import ANY_CALL, AUTO_CHOICES, NO_CALLS, forces_call

ALLOWED = "allowed_tools"
"""Type of a choice that leaves some of the tools."""
NamesTool = Callable[[Fields], str]
"""Function that takes the name of a tool from an object that names it."""


def read_tool_choice(fields: Fields, request: pb.GenerateRequest, kinds: tuple[str, ...], read_name: NamesTool) -> None:
    """Read the choice, once the request has its tools; `read_name` reads the name of a choice of one of `kinds`.

    Raises InvalidRequest for an unknown choice, and for one that forces a call without tools.
    """
    choice = fields.take("tool_choice")
    known = (*AUTO_CHOICES, NO_CALLS, ANY_CALL)
    if isinstance(choice, str):
        if choice not in known:
            raise fields.refuse("tool_choice", f"must be auto, none, required or a function, not {shown(choice)}")
        request.tool_choice = choice
    elif choice is not None:
        wanted = fields.at("tool_choice", choice)
        kind = must_be_one_of(wanted, "type", (*kinds, ALLOWED))
        if kind == ALLOWED:
            _read_allowed(wanted, request, kinds, read_name)
        else:
            request.tool_choice = read_name(wanted)
            if request.tool_choice in known:  # it would be read as that choice
                raise fields.refuse(
                    "tool_choice", f"cannot force a tool with the reserved name {shown(request.tool_choice)}"
                )
        wanted.finish()
    if forces_call(request.tool_choice) and not request.tools:
        raise fields.refuse("tool_choice", "forces a call, but the request has no tools")


def _read_allowed(choice: Fields, request: pb.GenerateRequest, kinds: tuple[str, ...], read_name: NamesTool) -> None:
    """Leave the request only its allowed tools: no model calls a tool that it never heard of."""
    nested = choice.nested(ALLOWED)  # chats have the fields one level deeper
    allowed = choice if nested is None else nested
    mode = must_be_one_of(allowed, "mode", ("auto", ANY_CALL))
    of_name = {json.loads(tool)["function"]["name"]: tool for tool in request.tools}
    tools: dict[str, str] = {}
    given: list[Any] = allowed.objects("tools")
    for place, each in enumerate(given):
        named = allowed.at(f"tools[{place}]", each)
        kind = named.text("type", required=True)
        if kind not in kinds:
            allowed.ignored.add(f"{allowed.path('tools')}[].type={kind}"[:64])  # the model never hears of it
            continue
        name = read_name(named)
        named.finish()
        if name not in of_name:
            raise allowed.refuse(f"tools[{place}]", f"{shown(name)} is not among the request's tools")
        tools[name] = of_name[name]
    if not given:
        raise allowed.refuse("tools", "must name at least one tool")
    del request.tools[:]
    request.tools.extend(tools.values())
    request.single_tool_call = request.single_tool_call and bool(tools)
    request.tool_choice = ANY_CALL if mode == ANY_CALL else ""
    if nested is not None:
        nested.finish()
