"""Who asks: what a request's headers say of it."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import InvalidRequest
from router.security.api_keys import ANYBODY, ApiKeys, Principal
from router.validation import MAX_NAME_CHARS


@dataclass(frozen=True, slots=True)
class Caller:
    """Of one request."""

    tenant: str
    """Whose fair share, limits and quota it counts against; empty: nobody's in particular."""
    request_id: str
    """Drawn where the client gave none."""
    principal: Principal = ANYBODY


def caller_of(headers: Mapping[str, str], keys: ApiKeys) -> Caller:
    """Raises InvalidRequest for a header that is no name, Unauthenticated, and Forbidden for another's tenant."""
    principal = keys.principal(headers.get("authorization"))
    tenant = principal.tenant_for(check_name(headers.get("x-tenant", ""), "x-tenant"))
    return Caller(
        tenant, check_name(headers.get("x-request-id", ""), "x-request-id") or secrets.token_hex(16), principal
    )


def check_name(value: str, field: str) -> str:
    """A header, or what becomes one: a line's end in it would begin another header. Raises InvalidRequest."""
    if not (value.isascii() and value.isprintable()):
        raise InvalidRequest(field, "must be printable ASCII")
    if len(value) > MAX_NAME_CHARS:
        raise InvalidRequest(field, f"longer than {MAX_NAME_CHARS} characters")
    return value
