"""Identity of a caller, from a request's headers, and errors in OpenAI's form.

The form: status, headers, and {"error": {"message", "type", "param", "code"}}.
"""

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import (
    Draining,
    InvalidRequest,
    Overloaded,
    ServiceError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from router.security.api_keys import ANYBODY, ApiKeys, Principal
from router.validation import MAX_NAME_CHARS

RETRY_AFTER_S = 1.0
"""Retry delay in seconds without a prediction."""
UNREAD = (408, 413, 415)
"""Statuses of refusals after which the rest of what the client sends is not read."""


class HttpRefusal(InvalidRequest):
    """A refused request for which HTTP has its own status."""

    def __init__(self, status: int, code: str, message: str, field: str = "") -> None:
        super().__init__(field, message)
        self.status = status
        self.http_code = code


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Answer for an error."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    """JSON bytes."""
    event: bytes
    """The error as the last event of a stream."""


Form = Callable[[int, str, str, str | None, str | None], tuple[dict[str, Any], bytes]]
"""Function of status, type, message, field and code that returns an error's body and its event's prefix."""


def openai_form(
    status: int, kind: str, message: str, param: str | None, code: str | None
) -> tuple[dict[str, Any], bytes]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}, b""


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    kind: str
    code: str | None


_KINDS = {
    "INVALID_ARGUMENT": _Kind(400, "invalid_request_error", "invalid_value"),
    "UNAUTHENTICATED": _Kind(401, "invalid_request_error", "invalid_api_key"),
    "PERMISSION_DENIED": _Kind(403, "invalid_request_error", "permission_denied"),
    "NOT_FOUND": _Kind(404, "invalid_request_error", "not_found"),
    "RESOURCE_EXHAUSTED": _Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    "UNAVAILABLE": _Kind(503, "server_error", "unavailable"),
    "FAILED_PRECONDITION": _Kind(503, "server_error", "unavailable"),
    "ABORTED": _Kind(503, "server_error", "revision_gone"),
    "DEADLINE_EXCEEDED": _Kind(504, "server_error", "deadline_exceeded"),
    "UNIMPLEMENTED": _Kind(501, "server_error", "not_configured"),
}
_WEB_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 431: "headers_too_large"}
_INTERNAL = _Kind(500, "server_error", "internal_error")
_NO_MODEL = _Kind(404, "invalid_request_error", "model_not_found")
_NEVER_FITS = _Kind(400, "invalid_request_error", "request_too_large")


def error_answer(error: ServiceError, names: Mapping[str, str], form: Form = openai_form) -> ErrorAnswer:
    """Return the answer for an error in an API's form.

    `names` maps our field names to the client's.
    """
    kind = _kind(error)
    param = client_field(error.field, names) or None
    message = f"{param}: {error.message}" if param else error.message
    return _answer(kind.status, _headers(error, kind), form(kind.status, kind.kind, message, param, kind.code))


def _answer(status: int, headers: Mapping[str, str], form: tuple[dict[str, Any], bytes]) -> ErrorAnswer:
    value, prefix = form
    body = json.dumps(value).encode()
    return ErrorAnswer(status, headers, body, prefix + b"data: " + body + b"\n\n")


def client_field(field: str, names: Mapping[str, str]) -> str:
    """Return the client's name of one of our fields."""
    field = field.removeprefix("sampling.")
    if field in names:
        return names[field]
    first, _, rest = field.partition(".")
    if first == "structured" and first in names:
        return names[first]
    return names.get(first, first) + (f".{rest}" if rest else "")


def error_of(status: int, message: str) -> ErrorAnswer:
    """Return the answer for an error of the web server itself: unknown path or method."""
    code = _WEB_CODES.get(status, "bad_request")
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _answer(status, {}, openai_form(status, kind, message, None, code))


def _kind(error: ServiceError) -> _Kind:
    if isinstance(error, HttpRefusal):
        return _Kind(error.status, "invalid_request_error", error.http_code)
    if isinstance(error, Overloaded) and error.permanent:
        return _NEVER_FITS
    if isinstance(error, UnknownModel):
        return _NO_MODEL
    return _KINDS.get(error.code, _INTERNAL)


def _headers(error: ServiceError, kind: _Kind) -> Mapping[str, str]:
    if isinstance(error, HttpRefusal):
        accepted = {"accept-encoding": "gzip, deflate"} if error.status == 415 else {}
        return {"connection": "close", **accepted} if error.status in UNREAD else {}
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if kind is _NEVER_FITS or not isinstance(error, Overloaded | Unavailable):
        return {}
    # The client asks again at another router then, not over its connection to this one.
    closing = {"connection": "close"} if isinstance(error, Draining) else {}
    wait_s = error.retry_after_s if isinstance(error, Overloaded) else None
    if wait_s is None or not math.isfinite(wait_s):
        wait_s = RETRY_AFTER_S
    after = {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(wait_s * 1e3)))}
    return after | closing


CALLER = "tandem.caller"
"""Key of an ASGI scope with the `Caller`, where another application found it out."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of one request."""

    tenant: str
    """Tenant whose fair share, limits and quota the request counts against; empty: none in particular."""
    request_id: str
    """Request id, drawn here where the client gave none."""
    principal: Principal = ANYBODY
    line_deadline_s: float | None = None
    """Seconds for a line of a batch, unless its body sets others; None where the request is none."""


def caller_of(headers: Mapping[str, str], keys: ApiKeys) -> Caller:
    """Return the caller.

    Raises InvalidRequest for a header that is no valid name, Unauthenticated, and Forbidden for another tenant.
    """
    principal = keys.principal(authorization_of(headers))
    tenant = principal.tenant_for(check_name(headers.get("x-tenant", ""), "x-tenant"))
    return Caller(
        tenant, check_name(headers.get("x-request-id", ""), "x-request-id") or secrets.token_hex(16), principal
    )


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """Return the key as `Bearer KEY`; Anthropic's clients send it in `x-api-key`."""
    header = headers.get("authorization")
    key = headers.get("x-api-key")
    return f"Bearer {key}" if header is None and key is not None else header


def check_name(value: str, field: str) -> str:
    """Check a value that is or becomes a header: a line break would begin another one.

    Raises InvalidRequest.
    """
    if not (value.isascii() and value.isprintable()):
        raise InvalidRequest(field, "must be printable ASCII")
    if len(value) > MAX_NAME_CHARS:
        raise InvalidRequest(field, f"is longer than {MAX_NAME_CHARS} characters")
    return value
