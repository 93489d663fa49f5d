"""Identity of a caller, from a request's headers."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import InvalidRequest
from router.security.api_keys import ANYBODY, ApiKeys, Principal
from router.validation import MAX_NAME_CHARS


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of one request."""

    tenant: str
    """Tenant whose fair share, limits and quota the request counts against; empty: none in particular."""
    request_id: str
    """Request id, drawn here where the client gave none."""
    principal: Principal = ANYBODY


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
