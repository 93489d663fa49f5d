"""One placed request on a decode worker: engine messages come in, client messages go out; no call waits."""

import logging
from collections.abc import Callable, Iterator

from tokenizers import Tokenizer

from cluster.errors import Draining, Incompatible, ServiceError
from cluster.logs import of
from engine.messages.to_engine import Cancel
from engine.process.front.engine_client import EngineMessage, RequestListener
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
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
