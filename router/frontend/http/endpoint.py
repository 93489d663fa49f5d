"""A generating endpoint: from the body of an exchange to its answer."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from cluster import logs
from cluster.drain import Drain
from cluster.errors import DeadlineExceeded, InvalidRequest, ServiceError
from cluster.trace_context import from_headers, traceparent
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival, Arrivals
from router.frontend.http.caller import Caller, caller_of
from router.frontend.http.errors import error_answer
from router.frontend.http.exchange import ClientGone, Exchange
from router.frontend.http.fields import parse_object
from router.frontend.http.generation import Answer, Generation, PromptInfo
from router.frontend.http.merging import merged
from router.prepared_request import PreparedRequest
from router.request_path.request_handler import RequestHandler
from router.security.api_keys import ApiKeys
from router.validation import check_whole_answer

log = logging.getLogger(__name__)
Asked = TypeVar("Asked", bound=Generation)
INLINE_BYTES = 64 << 10
"""Size from which bodies are parsed on a thread, so that other streams wait less."""
SPARE_VALUES = 65_536
"""JSON values of a body besides a prompt of token ids as long as the longest context."""
GRACE_S = 1.0
"""Seconds after the deadline for the request itself to report it; then a client that does not read is given up."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a body."""

    max_bytes: int
    max_values: int
    """Largest number of JSON values: parsing holds the GIL, so that all other requests wait."""


class Endpoint(Generic[Asked]):
    """ASGI application of one path."""

    def __init__(
        self,
        handler: RequestHandler,
        drain: Drain,
        keys: ApiKeys,
        arrivals: Arrivals,
        limits: BodyLimits,
        default_deadline_s: float,
        read: Callable[[dict[str, Any], Caller], Asked],
        answer: Callable[[Asked, str], Answer],
    ) -> None:
        self._arrivals = arrivals
        self._limits = limits
        self._handler = handler
        self._drain = drain
        self._keys = keys
        self._read = read
        self._answer = answer
        self._default_deadline_s = default_deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        names: Mapping[str, str] = {"tenant": "x-tenant"}  # a tenant can be refused before the body is read
        try:
            traceparent.set(from_headers(exchange.headers))
            caller = caller_of(exchange.headers, self._keys)
            exchange.request_id = caller.request_id
            logs.request_id.set(caller.request_id)
            with self._arrivals.arriving(caller.tenant) as arrival:
                body = await exchange.body(self._limits.max_bytes, arrival)
                if len(body) <= INLINE_BYTES:
                    asked = self._asked(body, caller)
                else:
                    asked = await asyncio.to_thread(self._asked, body, caller)
                del body
                names = asked.names
                exchange.request_id = asked.request_id
                with exchange.lasting(self._drain):
                    await self._serve_in_time(exchange, asked, caller, arrival)
        except ClientGone:
            return
        except ServiceError as error:
            await self._arrivals.pace.wait(error)
            await exchange.fail(error_answer(error, names))
        except Exception:  # a bug here ends this request, with an error in the client's format
            log.exception("a request failed", extra=logs.of(exchange.request_id))
            await exchange.fail(error_answer(ServiceError("the router failed; its log says why"), names))

    def _asked(self, body: bytes, caller: Caller) -> Asked:
        try:
            return self._read(parse_object(body, self._limits.max_values), caller)
        except RecursionError:
            raise InvalidRequest("", "the body is nested too deeply") from None

    async def _serve_in_time(self, exchange: Exchange, asked: Asked, caller: Caller, arrival: Arrival) -> None:
        """Serve a request within its deadline, also when the client does not read."""
        deadline_s = self._default_deadline_s if asked.deadline_s is None else asked.deadline_s
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                await self._serve(exchange, asked, caller, arrival)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the client took the answer") from None

    async def _serve(self, exchange: Exchange, asked: Asked, caller: Caller, arrival: Arrival) -> None:
        if not asked.stream:
            check_whole_answer(asked.requests)
        answer = self._answer(asked, asked.request_id)
        streams = [
            self._handler.generate(
                request,
                asked.deadline_s,
                caller.principal,
                _beginner(answer, number, asked.echo),
                arrival if number == 0 else None,  # each further prompt is charged as a request of its own
            )
            for number, request in enumerate(asked.requests)
        ]
        if not asked.stream:
            async with aclosing(merged(streams)) as messages:
                async for number, raw in messages:
                    answer.absorb(number, pb.GenerateResponse.FromString(raw))
            await exchange.send_json(answer.whole())
            return
        last = b""
        async with aclosing(merged(streams)) as messages:
            async for number, raw in messages:
                events = answer.chunk(number, pb.GenerateResponse.FromString(raw))
                if answer.complete:
                    last += events  # sent once the request is accounted for: its client may ask again at once
                elif events:
                    await exchange.send_events(events)
        await exchange.end_events(last)


def _beginner(answer: Answer, number: int, echo: bool) -> Callable[[PreparedRequest], None]:
    def begin(prepared: PreparedRequest) -> None:
        encoder = prepared.model.encoder
        said = ""
        if echo:
            said = prepared.request.text if prepared.request.HasField("text") else encoder.decode(prepared.prompt)
        answer.begin(number, PromptInfo(prepared.model.name, prepared.prompt, said, encoder.token_text))

    return begin
