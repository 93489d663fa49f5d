"""Endpoints of HTTP APIs: one that generates, from the body of an exchange to its answer, and one of a JSON object.

A generating one may serve several streams, which are merged.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from cluster import logs
from cluster.errors import InvalidRequest, ServiceError
from cluster.logs import from_headers, traceparent
from cluster.process.life import Drain
from cluster.process.tasks import Tasks
from router.admission.arrivals import Arrival, Arrivals
from router.frontend.http.blocks import compact
from router.frontend.http.body.fields import BodyReader, IgnoredFields
from router.frontend.http.body.media import MediaFiles, media_names
from router.frontend.http.errors import Caller, Form, caller_of, error_answer, openai_form
from router.frontend.http.exchange import ClientGone, Exchange
from router.frontend.http.generation import Answer, Generation, PromptInfo
from router.models.media import sources_of
from router.prepared_request import PreparedRequest
from router.request_path.late_messages import joined
from router.request_path.queries import Queries
from router.request_path.request_handler import RequestHandler
from router.security.api_keys import ApiKeys
from router.validation import check_whole_answer

log = logging.getLogger(__name__)


async def merged(
    streams: Sequence[AsyncGenerator[Sequence[bytes]]], max_open: int | None = None
) -> AsyncGenerator[tuple[int, Sequence[bytes]]]:
    """Yield the items of all streams with the streams' numbers, as they come.

    At most `max_open` streams are open at a time, in order; None: all. Raises the first failure; closing it closes all
    streams. At most one item per stream is buffered.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for messages in only:
                yield 0, messages
        return
    queue: asyncio.Queue[tuple[int, Sequence[bytes] | BaseException | None]] = asyncio.Queue(len(streams))

    rest = iter(enumerate(streams))

    async def feed() -> None:
        for number, stream in rest:  # one iterator for all tasks: each takes the next stream
            end: BaseException | None = None
            try:
                async with aclosing(stream):
                    async for messages in stream:
                        await queue.put((number, messages))
            except Exception as error:  # any error, raised below
                end = error
            await queue.put((number, end))

    async with Tasks() as tasks:
        for _ in range(min(len(streams), max_open or len(streams))):
            tasks.spawn(feed())
        num_open = len(streams)
        while num_open:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield number, item


RequestT = TypeVar("RequestT", bound=Generation)
AnswerT = TypeVar("AnswerT", bound=Answer)
INLINE_BYTES = 64 << 10
"""Size from which bodies are parsed on a thread, so that other streams wait less."""
SPARE_VALUES = 65_536
"""JSON values of a body besides a prompt of token ids as long as the longest context."""
LINE_PRIORITY = -1
"""Highest priority of a line of a batch: interactive requests have 0, and those of `tandem batch` the same."""
GRACE_S = 1.0
"""Seconds after the deadline for the request itself to report it; then a client that does not read is given up."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a body."""

    max_bytes: int
    max_values: int
    """Largest number of JSON values: parsing holds the GIL, so that all other requests wait."""


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """Parts of the router that every endpoint uses."""

    handler: RequestHandler
    queries: Queries
    drain: Drain
    """Drain that holds requests in flight."""
    keys: ApiKeys
    arrivals: Arrivals
    files: MediaFiles
    limits: BodyLimits
    default_deadline_s: float
    strict_fields: bool
    """Whether a field that nobody reads is refused."""
    heartbeat_s: float | None = None
    """Seconds between comments of a stream before its first event; None: there are none."""


class Hooks(Generic[RequestT, AnswerT]):
    """Steps of an API around a generation, for what it keeps."""

    async def before(self, api_request: RequestT, caller: Caller) -> None:
        """Complete a request by what is kept.

        Raises ServiceError.
        """

    def ready(self, api_request: RequestT) -> None:
        """Note a request with pictures that is complete: its files are dropped while it is served."""

    async def after(self, api_request: RequestT, caller: Caller, answer: AnswerT) -> None:
        """Keep a complete answer, before its client has all of it."""


class Endpoint(Generic[RequestT, AnswerT]):
    """ASGI application of one path."""

    def __init__(
        self,
        context: EndpointContext,
        read: BodyReader[Any, RequestT],
        answer: Callable[[RequestT, str], AnswerT],
        error_form: Form = openai_form,
        hooks: "Hooks[RequestT, AnswerT] | None" = None,
    ) -> None:
        """Create the application of an API's reader, its maker of answers and its form of errors."""
        self.error_form = error_form
        self._hooks: Hooks[RequestT, AnswerT] = hooks or Hooks()
        self._context = context
        self._arrivals = context.arrivals
        self._handler = context.handler
        self.read = read
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        names: Mapping[str, str] = {"tenant": "x-tenant"}  # a tenant can be refused before the body is read
        try:
            traceparent.set(from_headers(exchange.headers))
            caller = exchange.caller or caller_of(exchange.headers, self._context.keys)
            exchange.request_id = caller.request_id
            logs.request_id.set(caller.request_id)
            with self._arrivals.arriving(caller.tenant) as arrival:
                body = await exchange.body(self._context.limits.max_bytes, arrival)
                if len(body) <= INLINE_BYTES:
                    api_request = self._parsed(body, caller)
                else:
                    api_request = await asyncio.to_thread(self._parsed, body, caller)
                del body
                names = api_request.names
                if caller.line_deadline_s is not None:
                    run_below(api_request, caller.line_deadline_s)
                self._context.queries.count_ignored(api_request.ignored)
                exchange.ignored = api_request.ignored
                exchange.request_id = api_request.request_id
                async with exchange.lasting(self._context.drain, self._limit_s(api_request)):
                    await self._serve(exchange, api_request, caller, arrival)
        except ClientGone:
            return
        except ServiceError as error:
            await self._arrivals.pace.wait(error)
            await exchange.fail(error_answer(error, names, self.error_form))
        except Exception:  # a bug here ends this request, with an error in the client's format
            log.exception("a request failed", extra=logs.of(exchange.request_id))
            failure = ServiceError("the router failed; its log says why")
            await exchange.fail(error_answer(failure, names, self.error_form))

    def _parsed(self, body: bytes, caller: Caller) -> RequestT:
        ignored = IgnoredFields(self._context.strict_fields)
        api_request = self.read.of_bytes(body, caller, ignored, self._context.limits.max_values)
        api_request.ignored = tuple(ignored.names)
        return api_request

    def _limit_s(self, api_request: RequestT) -> float:
        """Return the seconds after which a request is given up, also when the client does not read."""
        deadline_s = self._context.default_deadline_s if api_request.deadline_s is None else api_request.deadline_s
        return deadline_s + GRACE_S

    def _streams(
        self, api_request: RequestT, answer: Answer, caller: Caller, arrival: Arrival
    ) -> AsyncGenerator[tuple[int, Sequence[bytes]]]:
        """Return the messages of all prompts of a request."""
        streams = [
            self._handler.generate(
                request,
                api_request.deadline_s,
                caller.principal,
                _beginner(answer, number, api_request.echo),
                arrival if number == 0 else None,  # each further prompt is charged as a request of its own
            )
            for number, request in enumerate(api_request.requests)
        ]
        return merged(streams, api_request.max_open)

    async def _before(self, api_request: RequestT, caller: Caller, arrival: Arrival) -> None:
        """Complete a request by what is kept, and by files that it names."""
        await self._hooks.before(api_request, caller)
        if len(api_request.requests) != 1 or not sources_of(api_request.requests[0]):
            return
        await self._context.files.load(api_request.requests[0], api_request.media, caller, arrival)
        api_request.names.update(media_names(api_request.requests[0].messages, api_request.media))
        self._hooks.ready(api_request)

    async def _whole(self, api_request: RequestT, caller: Caller, arrival: Arrival) -> bytes:
        check_whole_answer(api_request.requests)
        await self._before(api_request, caller, arrival)
        answer = self._answer(api_request, api_request.answer_id)
        async with aclosing(self._streams(api_request, answer, caller, arrival)) as messages:
            async for number, batch in messages:
                for message in joined(batch):
                    answer.absorb(number, message)
        await self._hooks.after(api_request, caller, answer)
        return answer.whole()

    async def _serve(self, exchange: Exchange, api_request: RequestT, caller: Caller, arrival: Arrival) -> None:
        if not api_request.stream:
            await exchange.send_json(await self._whole(api_request, caller, arrival))
            return
        async with exchange.heartbeats(self._context.heartbeat_s):
            await self._before(api_request, caller, arrival)
            answer = self._answer(api_request, api_request.answer_id)
            last = b""
            async with aclosing(self._streams(api_request, answer, caller, arrival)) as messages:
                async for number, batch in messages:
                    events = b"".join(answer.chunk(number, message) for message in joined(batch))
                    if answer.complete:
                        last += events  # sent once the request is accounted for: its client may ask again at once
                    elif events:
                        await exchange.send_events(events)
            await self._hooks.after(api_request, caller, answer)
            await exchange.end_events(last)


def run_below(line: Generation, deadline_s: float) -> None:
    """Let a line of a batch run below interactive requests, and for as long as its batch.

    Raises InvalidRequest for one that is to be streamed.
    """
    if line.stream:
        raise InvalidRequest("stream", "is not supported in a batch")
    for request in line.requests:
        request.priority = min(request.priority, LINE_PRIORITY)
    if line.deadline_s is None:
        line.deadline_s = deadline_s


def _beginner(answer: Answer, number: int, echo: bool) -> Callable[[PreparedRequest], None]:
    def begin(prepared: PreparedRequest) -> None:
        encoder = prepared.model.encoder
        given = prepared.request.text if prepared.request.HasField("text") else None
        text = "" if not echo else encoder.decode(prepared.prompt) if given is None else given
        served = PromptInfo(
            prepared.model.name,
            prepared.prompt,
            text,
            encoder.token,
            prepared.output.parser,
            lambda: encoder.pieces(prepared.prompt, given),
            prepared.sampling.keep_special_tokens,
        )
        answer.begin(number, served)

    return begin


JsonRequestT = TypeVar("JsonRequestT")
NO_NAMES: Mapping[str, str] = {}


class JsonEndpoint(Generic[JsonRequestT]):
    """ASGI application of one path."""

    def __init__(
        self,
        context: EndpointContext,
        read: BodyReader[Any, JsonRequestT],
        answer: Callable[[JsonRequestT, Caller], Awaitable[dict[str, Any]]],
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
            async with exchange.lasting(context.drain):
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

    def _parsed(self, body: bytes, caller: Caller) -> tuple[JsonRequestT, tuple[str, ...]]:
        ignored = IgnoredFields(self._context.strict_fields)
        return self.read.of_bytes(body, caller, ignored, self._context.limits.max_values), tuple(ignored.names)
