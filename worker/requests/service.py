"""The decode role: runs routers' placed requests on the engine, with loans from the lenders that the router chose.

Each request is a channel of a router's connection. Engine messages come in, client messages go out; no call waits.
Tokens are collected until a frame can be sent, so a router that reads slowly gets fewer, larger messages.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Iterator

from google.protobuf.message import DecodeError
from tokenizers import Tokenizer

from cluster.errors import DeadlineExceeded, Draining, Incompatible, InvalidRequest, ServiceError
from cluster.logs import of
from cluster.network.error_status import to_proto
from cluster.network.mux import FULL_PART_BYTES, Channel
from engine.messages.to_engine import Cancel
from engine.model.detokenizer import load_tokenizer
from engine.process.front.engine_client import EngineMessage, RequestListener
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from protos import mux_pb2
from worker.requests.output_stream import OutputStream
from worker.requests.placed_request import check_request, engine_request
from worker.runtime import WorkerContext

log = logging.getLogger(__name__)


class DecodeAttempt(RequestListener):
    """One attempt at a request, from construction until `close`.

    After `close` only its cached blocks stay.
    """

    def __init__(
        self,
        context: WorkerContext,
        tokenizer: Tokenizer | None,
        engine_id: str,
        request: pb.DecodeRequest,
        on_news: Callable[[], object],
    ) -> None:
        """Start the attempt.

        `on_news` is called whenever there is something to `take` or `over` became true.

        Raises ServiceError for a request that cannot start.
        """
        ready = context.ready
        if request.worker_incarnation != context.incarnation:
            raise Incompatible(
                "does not match: another worker process listens at this address now", "worker_incarnation"
            )
        context.check_taking()
        check_request(request, ready.vocab_size, context.config.engine)
        self._engine = context.engine
        self._engine_id = engine_id
        self._request_id = request.request_id
        self._on_change = on_news
        self._generation = OutputStream(request, tokenizer, context.worker_id, ready.block_tokens)
        self._open = True
        self.failure: ServiceError | None = None
        self._engine.send(engine_request(engine_id, request))
        self._engine.listen(engine_id, self)
        self._in_flight = context.requests
        self._call = self._in_flight.hold(
            lambda: self.fail(Draining(f"worker {context.worker_id} was told to stop and hands the request over"))
        )

    @property
    def over(self) -> bool:
        """Whether all remaining messages can be taken now and no more will come."""
        return self._generation.finished or self.failure is not None

    def take(self) -> Iterator[public_pb.GenerateResponse]:
        """Yield the messages not yet taken.

        The longer the caller waited, the more tokens one message holds.
        """
        while (response := self._generation.take()) is not None:
            yield response

    def fail(self, failure: ServiceError) -> None:
        """End the attempt on this worker with `failure`."""
        if not self.over:
            self.failure = failure
            self._on_change()

    def close(self) -> None:
        """Cancel the attempt in whatever state it is and free its blocks.

        May be called again.
        """
        if self._open:
            self._open = False
            self._in_flight.release(self._call)
            if self.failure is not None or not self._generation.finished:
                self._engine.send(Cancel(self._engine_id))
            self._engine.forget(self._engine_id)

    def on_token(self, token_id: int, choice: int) -> None:
        if self.over:
            return
        try:
            self._generation.add(token_id, choice)
        except Exception as error:
            self._broke(error)
        self._changed()

    def on_message(self, message: EngineMessage) -> None:
        if self.over:
            return
        try:
            self._generation.absorb(message)
        except ServiceError as failure:
            self.failure = failure
        except Exception as error:
            self._broke(error)
        self._changed()

    def _broke(self, error: Exception) -> None:
        """Process a bug here, which ends this request only, not every request of the engine."""
        log.error("request %s failed", self._engine_id, exc_info=error, extra=of(self._request_id))
        self.failure = ServiceError(f"the decode worker failed: {error!r}")

    def _changed(self) -> None:
        for choice in self._generation.take_stopped():
            self._engine.send(Cancel(self._engine_id, choice))
        self._on_change()


Begin = Callable[[pb.DecodeRequest, Callable[[], object]], DecodeAttempt]
"""Factory of attempts. Raises ServiceError."""


def serve_request(begin: Begin, channel: Channel, opening: bytes) -> None:
    """Serve a request that a router placed here, until it is over or the router or the connection ends its channel."""
    request = pb.DecodeRequest()
    try:
        request.ParseFromString(opening)
        attempt = begin(request, channel.ready)
    except ServiceError as refusal:
        channel.end(_status(refusal))
    except DecodeError as error:
        channel.end(_status(InvalidRequest("request", f"is not a valid message: {error}")))
    except Exception as error:
        channel.end(_status(_bug(error, request.request_id)))
    else:
        served = _ServedRequest(request, attempt)
        channel.take_from(served.add_to)
        channel.on_end = served.close


class _ServedRequest:
    """A request whose attempt has begun."""

    def __init__(self, request: pb.DecodeRequest, attempt: DecodeAttempt) -> None:
        self._request_id = request.request_id
        self._attempt = attempt
        self._timer: asyncio.TimerHandle | None = None
        if request.timeout_ms > 0:
            failure = DeadlineExceeded("the deadline passed before the request was done")
            self._timer = asyncio.get_running_loop().call_later(request.timeout_ms / 1e3, attempt.fail, failure)

    def add_to(self, part: mux_pb2.Part) -> bool:
        """Move messages into a part of a frame, up to its size limit; return whether there may be more."""
        failure: ServiceError | None
        try:
            num_bytes = 0
            for response in self._attempt.take():
                raw = response.SerializeToString()
                part.messages.append(raw)
                num_bytes += len(raw)
                if num_bytes >= FULL_PART_BYTES:
                    return True
            if not self._attempt.over:
                return False
            failure = self._attempt.failure
        except Exception as error:
            failure = _bug(error, self._request_id)
        part.ended, part.status = True, _status(failure)
        self.close()
        return False

    def close(self, _: bytes = b"") -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._attempt.close()


def _bug(error: Exception, request_id: str) -> ServiceError:
    """Log an error that ends this request only, not all those of its router, and return it as one of the service."""
    log.error("a request failed", exc_info=error, extra=of(request_id))
    return ServiceError(f"the decode worker failed: {error!r}")


def _status(failure: ServiceError | None) -> bytes:
    return b"" if failure is None else to_proto(failure).SerializeToString()


class DecodeService:
    """Factory of attempts.

    A request ends with its channel and leaves only cached blocks.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._numbers = itertools.count(1)
        if context.roles.role == "decode":
            self._tokenizer  # noqa: B018 # load it at start, not with the first request
        else:
            context.roles.before_decode.append(lambda: self._tokenizer)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self._context.model_dir)

    def begin(self, request: pb.DecodeRequest, on_news: Callable[[], object]) -> DecodeAttempt:
        """Begin a request.

        Raises ServiceError.
        """
        engine_id = f"request-{next(self._numbers)}"  # not the client's id, which may not be unique
        tokenizer = None if request.HasField("embedding") else self._tokenizer  # an embedding has no text
        return DecodeAttempt(self._context, tokenizer, engine_id, request, on_news)


def serve_requests(context: WorkerContext) -> None:
    """Have the requests of routers' connections served."""
    context.streams.serve = functools.partial(serve_request, DecodeService(context).begin)
