"""Which trace a request belongs to: W3C's `traceparent`, as its client sent it in gRPC metadata or HTTP headers."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar

HEADER = "traceparent"
_HEX = frozenset("0123456789abcdef")
traceparent: ContextVar[str] = ContextVar(HEADER, default="")
"""Of the request that the current task serves; empty where the client sent none."""


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Of a gRPC call."""
    for name, value in metadata or ():
        if name == HEADER and isinstance(value, str):
            return value
    return ""


def from_headers(headers: Mapping[str, str]) -> str:
    """Of HTTP, names in lower case."""
    return headers.get(HEADER, "")


def trace_id() -> str:
    """Of the request that the current task serves; empty where its client sent none that can be read."""
    version, _, rest = traceparent.get().partition("-")
    found, _, rest = rest.partition("-")
    return found if len(version) == 2 and len(found) == 32 and rest and _HEX.issuperset(found) else ""
