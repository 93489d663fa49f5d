"""Authentication of HTTP requests: a new path is closed until it is opened here."""

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import ServiceError
from router.frontend.http.caller import authorization_of
from router.frontend.http.errors import error_answer
from router.security.api_keys import ApiKeys

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/console", "/version", "/openapi.json", "/docs"})
"""Paths without authentication; the console's page itself contains no data."""


def guarded(app: ASGIApp, keys: ApiKeys) -> ASGIApp:
    """Wrap the application so that requests without a key are refused."""
    if not keys.required:
        return app

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            names = (b"authorization", b"x-api-key")
            headers = {name: value for name, value in scope["headers"] if name in names}
            try:
                keys.principal(
                    authorization_of({name.decode(): value.decode("latin-1") for name, value in headers.items()})
                )
            except ServiceError as error:
                await _refuse(error, send)
                return
        await app(scope, receive, send)

    return guard


async def _refuse(error: ServiceError, send: Send) -> None:
    answer = error_answer(error, {})
    headers = {"content-type": "application/json", "content-length": str(len(answer.body)), **answer.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
