"""Reading of `tool_choice`, whose named form differs by API.

Pure.
"""

from collections.abc import Callable

from protos import inference_pb2 as pb
from router.frontend.http.fields import Fields, one_of, shown
from router.models.output_plan import ANY_CALL, AUTO_CHOICES, NO_CALLS, forces_call


def read_tool_choice(
    fields: Fields, request: pb.GenerateRequest, kinds: tuple[str, ...], read_name: Callable[[Fields], str]
) -> None:
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
        if one_of(wanted, "type", kinds) is None:
            raise wanted.refuse("type", "is missing")
        request.tool_choice = read_name(wanted)
        wanted.finish()
        if request.tool_choice in known:  # it would be read as that choice
            raise fields.refuse(
                "tool_choice", f"cannot force a tool with the reserved name {shown(request.tool_choice)}"
            )
    if forces_call(request.tool_choice) and not request.tools:
        raise fields.refuse("tool_choice", "forces a call, but the request has no tools")
