"""Pieces of parsed outputs, put together."""

import json

from router.models.output.call_reading import CallArguments, CallBegun, ToolCall
from router.models.output.output_format import OutputParser, Piece, Reasoning

WEATHER = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
)
"""A tool."""


def parse_with(parser: OutputParser, *pieces: str) -> list[Piece]:
    """Neighbouring texts joined, and calls whole: what came of one before is the same."""
    found = [item for piece in pieces for item in parser.push(piece)] + parser.finish()
    joined: list[Piece] = []
    begun: CallBegun | None = None
    arguments = ""
    for item in found:
        if isinstance(item, CallBegun):
            assert begun is None
            begun, arguments = item, ""
            continue
        if isinstance(item, CallArguments):
            assert begun is not None
            assert item.text
            arguments += item.text
            continue
        if begun is not None:
            assert isinstance(item, ToolCall), "nothing stands between the parts of a call"
            assert (item.name, item.id, item.arguments) == (begun.name, begun.id, arguments)
            begun = None
        last = joined[-1] if joined else None
        if isinstance(item, str) and isinstance(last, str):
            joined[-1] = last + item
        elif isinstance(item, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + item.text)
        else:
            joined.append(item)
    return joined
