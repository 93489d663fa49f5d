"""No key, no service: at the doors themselves, so that a method or a path that is added later is closed until somebody
opens it here. Who asks, and what they may, is for the handlers.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import ServiceError, to_status
from router.api_keys import ApiKeys
from router.openai.errors import error_answer

OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.v1alpha.")
OPEN_PATHS = frozenset({"/health", "/ready", "/console"})
"""The console's page says nothing by itself."""


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Of a gRPC server: refuses calls before their messages are read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The handler of a call, or one that refuses it."""
        if not handler_call_details.method.startswith(OPEN_SERVICES):
            try:
                self._keys.principal(bearer_of(handler_call_details.invocation_metadata))
            except ServiceError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def bearer_of(metadata: Any) -> str | None:
    """The first `authorization` in a call's metadata."""
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else None
    return None


def guarded(app: ASGIApp, keys: ApiKeys) -> ASGIApp:
    """The application, but for who has no key."""
    if not keys.required:
        return app

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            try:
                keys.principal(given[0].decode("latin-1") if given else None)
            except ServiceError as error:
                await _refuse(error, send)
                return
        await app(scope, receive, send)

    return guard


def _refusing(error: ServiceError) -> Any:
    async def refuse(_: Any, context: Any) -> None:
        await context.abort_with_status(to_status(error))

    return grpc.unary_unary_rpc_method_handler(refuse)


async def _refuse(error: ServiceError, send: Send) -> None:
    answer = error_answer(error, {})
    headers = {"content-type": "application/json", "content-length": str(len(answer.body)), **answer.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
