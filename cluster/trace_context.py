"""Trace context of a request: W3C `traceparent` from gRPC metadata or HTTP headers."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar

HEADER = "traceparent"
_HEX = frozenset("0123456789abcdef")
traceparent: ContextVar[str] = ContextVar(HEADER, default="")
"""Trace context of the request that the current task serves; empty where the client sent none."""


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the trace context in a gRPC call's metadata."""
    for name, value in metadata or ():
        if name == HEADER and isinstance(value, str):
            return value
    return ""


def from_headers(headers: Mapping[str, str]) -> str:
    """Return the trace context in HTTP headers, whose names are in lower case."""
    return headers.get(HEADER, "")


def trace_id() -> str:
    """Return the trace id of the current task's request; empty without a valid trace context."""
    version, _, rest = traceparent.get().partition("-")
    trace, _, rest = rest.partition("-")
    return trace if len(version) == 2 and len(trace) == 32 and rest and _HEX.issuperset(trace) else ""
