"""A line of a batch: its input, its answer, and the line of an output file. Pure."""

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.errors import InvalidRequest

MAX_CUSTOM_ID_CHARS = 512
FRAME_BYTES = 8 << 10
"""Bytes of a line besides its request's body."""

Parse = Callable[[bytes], dict[str, Any]]
"""Parser of a JSON object. Raises InvalidRequest."""


class LineFault(Exception):
    """A line that is no request of its batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request of a line."""

    endpoint: str
    """Path at the router."""
    body: bytes
    """JSON bytes, as they are in the input."""
    request_id: str
    tenant: str
    key: str
    """Name of the API key with which the batch was made; empty where none is needed."""
    deadline_s: float
    """Seconds for the request, unless its body sets others."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """Answer to a line, as the HTTP endpoint would give it."""

    status: int
    body: bytes
    """JSON bytes."""

    @property
    def failed(self) -> bool:
        return self.status != 200


Handle = Callable[[LineRequest], Awaitable[LineAnswer]]
"""Answer a line. Raises Overloaded or Unavailable where the line should be tried again (`retries.py`)."""


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


def taken_apart(raw: bytes) -> tuple[str, bytes]:
    """Return the custom_id and the body of a line that was checked, the body as it stands there."""
    line = msgspec.json.decode(raw, type=_Line)
    return line.custom_id, bytes(line.body)


def read_line(raw: bytes, endpoint: str, parse: Parse) -> tuple[str, dict[str, Any]]:
    """Return a line's custom_id and body.

    Raises LineFault.
    """
    try:
        values = parse(raw)
    except (InvalidRequest, RecursionError) as error:
        raise LineFault("invalid_json_line", f"The line is not a valid JSON object: {error}") from None
    for name, kind, called in (("custom_id", str, "a string"), ("url", str, "a string"), ("body", dict, "an object")):
        if values.get(name) is None:
            raise LineFault("missing_required_parameter", f"The line has no {name!r}.", name)
        if not isinstance(values[name], kind):
            raise LineFault("invalid_type", f"{name!r} must be {called}.", name)
    if not 0 < len(values["custom_id"]) <= MAX_CUSTOM_ID_CHARS:
        raise LineFault("invalid_value", f"'custom_id' must have 1 to {MAX_CUSTOM_ID_CHARS} characters.", "custom_id")
    if values.get("method") != "POST":
        raise LineFault("invalid_method", "'method' must be 'POST'.", "method")
    if values["url"] != endpoint:
        raise LineFault("mismatched_url", f"'url' must be the batch's endpoint, {endpoint!r}.", "url")
    return values["custom_id"], values["body"]


def answered(batch_id: str, number: int, custom_id: str, request_id: str, answer: LineAnswer) -> bytes:
    """Return the output line of an answered line."""
    # The body is JSON already. Its strings have no line breaks, so one is a space between values.
    body = answer.body.replace(b"\n", b" ").replace(b"\r", b" ")
    head = _head(batch_id, number, custom_id)
    status = f'"status_code": {answer.status}, "request_id": {json.dumps(request_id)}, "body": '
    return head.encode() + b'"response": {' + status.encode() + body + b'}, "error": null}'


def unanswered(batch_id: str, number: int, custom_id: str, outcome: str) -> bytes:
    """Return the output line of a line that was not answered before its batch ended."""
    why = {
        "expired": "This request could not be executed before the completion window expired.",
        "cancelled": "This request was not executed, because the batch was cancelled.",
    }[outcome]
    error = json.dumps({"code": f"batch_{outcome}", "message": why})
    return f'{_head(batch_id, number, custom_id)}"response": null, "error": {error}}}'.encode()


def _head(batch_id: str, number: int, custom_id: str) -> str:
    drawn = hashlib.sha256(f"{batch_id} {number}".encode()).hexdigest()[:24]
    return f'{{"id": "batch_req_{drawn}", "custom_id": {json.dumps(custom_id)}, '
