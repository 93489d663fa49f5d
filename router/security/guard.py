"""Authentication of gRPC calls before any handler, so that a new method is closed until it is opened here.

Handlers decide what a caller may do. HTTP has `router/frontend/http/server/guard.py`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from cluster.errors import ServiceError
from cluster.network.error_status import end_call
from cluster.network.rpc import OPEN_SERVICES
from router.security.api_keys import ApiKeys


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that refuses calls without a key before their messages are read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the handler of a call, or one that refuses it."""
        if not handler_call_details.method.startswith(OPEN_SERVICES):
            try:
                self._keys.principal(bearer_of(handler_call_details.invocation_metadata))
            except ServiceError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def bearer_of(metadata: Any) -> str | None:
    """Return the first `authorization` in a call's metadata."""
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else None
    return None


def _refusing(error: ServiceError) -> Any:
    async def refuse(_: Any, context: Any) -> AsyncIterator[bytes]:
        end_call(context, error)
        for nothing in tuple[bytes, ...]():
            yield nothing

    return grpc.stream_stream_rpc_method_handler(refuse)  # the messages are not read
