"""An endpoint that answers a body with one JSON object and generates nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from cluster.errors import ServiceError
from router.frontend.http.blocks import compact
from router.frontend.http.body.fields import BodyReader, IgnoredFields
from router.frontend.http.caller import Caller, caller_of
from router.frontend.http.endpoint import EndpointContext
from router.frontend.http.errors import Form, error_answer, openai_form
from router.frontend.http.exchange import ClientGone, Exchange

log = logging.getLogger(__name__)
RequestT = TypeVar("RequestT")
NO_NAMES: Mapping[str, str] = {}


class JsonEndpoint(Generic[RequestT]):
    """ASGI application of one path."""

    def __init__(
        self,
        context: EndpointContext,
        read: BodyReader[Any, RequestT],
        answer: Callable[[RequestT, Caller], Awaitable[dict[str, Any]]],
        error_form: Form = openai_form,
        names: Mapping[str, str] = NO_NAMES,
    ) -> None:
        """Create it; `names` has the client's names of fields that we call otherwise."""
        self._context = context
        self.read = read
        self._answer = answer
        self._error_form = error_form
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, exchange = self._context, Exchange(scope, receive, send)
        try:
            caller = caller_of(exchange.headers, context.keys)
            exchange.request_id = caller.request_id
            with context.arrivals.arriving(caller.tenant) as arrival:
                body = await exchange.body(context.limits.max_bytes, arrival)
                api_request, exchange.ignored = await asyncio.to_thread(self._parsed, body, caller)
                context.queries.count_ignored(exchange.ignored)
            with exchange.lasting(context.drain):
                reply = await self._answer(api_request, caller)
                await exchange.send_json(compact(reply).encode())
        except ClientGone:
            return
        except ServiceError as error:
            await context.arrivals.pace.wait(error)
            await exchange.fail(error_answer(error, self._names, self._error_form))
        except Exception:  # a bug here ends this request, with an error in the client's format
            log.exception("a request failed")
            failure = ServiceError("the router failed; its log says why")
            await exchange.fail(error_answer(failure, self._names, self._error_form))

    def _parsed(self, body: bytes, caller: Caller) -> tuple[RequestT, tuple[str, ...]]:
        ignored = IgnoredFields(self._context.strict_fields)
        return self.read.of_bytes(body, caller, ignored, self._context.limits.max_values), tuple(ignored.names)
