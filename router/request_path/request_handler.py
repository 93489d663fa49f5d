"""The path of one request through the router: check, admit, place, stream, and place again on failure."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from cluster.errors import Draining, Incompatible, Overloaded, RevisionGone, ServiceError, Unavailable
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival, Arrivals
from router.admission.limits.tenant_limits import TenantLimits
from router.config import RouterConfig
from router.decode_client.decode_streams import WorkerLink
from router.models.model_runtime import ModelRuntime
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord
from router.placement.place import Decision
from router.prepared_request import PreparedRequest, WarmTarget
from router.request_path.decode_request import decode_request
from router.request_path.observation import Unobserved
from router.request_path.preprocess import Preprocessor, tenant_of
from router.request_path.stream_state import StreamState
from router.security.api_keys import Principal

log = logging.getLogger(__name__)

MAX_RENEWALS = 3
"""Times that a request is read anew because the revision that it was read for is gone."""
CONNECT_SOON_S = 0.3
"""Seconds after which a request that ends on a worker without a connection counts as failed, whichever side ended it:
clients may be less patient than a connection."""


Watch = Callable[[pb.GenerateRequest, Principal, bool], Unobserved]
"""Function that begins the observation of a request that has just arrived, `Observer.watch`."""


def _ignore(prepared: PreparedRequest) -> None:
    """Do nothing; most callers need no notice."""


class RequestHandler:
    """Handler of all requests of one router."""

    def __init__(
        self,
        config: RouterConfig,
        preprocessor: Preprocessor,
        tenant_limits: TenantLimits,
        arrivals: Arrivals,
        watch: Watch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._config = config
        self._arrivals = arrivals
        self._tenant_limits = tenant_limits
        self._watch = watch
        self._preprocessor = preprocessor

    async def generate(
        self,
        request: pb.GenerateRequest,
        deadline_s: float | None,
        principal: Principal,
        on_checked: Callable[[PreparedRequest], object] = _ignore,
        arrival: Arrival | None = None,
        is_charged: bool = False,
        warm: WarmTarget | None = None,
    ) -> AsyncGenerator[Sequence[bytes]]:
        """Yield serialised GenerateResponses, one unbroken stream over all attempts; at once those that came together.

        With `warm` there is no output, and one message with the finish. Raises ServiceError.

        `on_checked` is called before the first of them, and again if the request is read anew. `arrival` is that of a
        request which is counted already; one without may be charged already.
        """
        with (
            self._watch(request, principal, warm is not None) as observation,
            contextlib.ExitStack() as held,
            self._arrivals.arriving(tenant_of(request, principal), is_charged)
            if arrival is None
            else contextlib.nullcontext(arrival) as counted,
        ):
            await self._arrivals.turn()
            with self._arrivals.reading(counted):
                prepared = await self._preprocessor.check(
                    request, deadline_s, principal, counted, thumbnails=observation.keeps_texts
                )
            held.callback(prepared.close)
            if warm is not None:
                prepared.warm, prepared.sampling.max_tokens = warm, 0
            observation.checked(prepared)
            prepared.model.fleet.traffic.arrived(len(prepared.prompt))
            on_checked(prepared)
            num_sequences = prepared.sampling.n
            charge = await self._tenant_limits.enter(request.tenant, prepared.most_tokens, num_sequences)
            model, num_choices = prepared.model, prepared.sampling.n
            is_resumed = request.HasField("resume")
            emitted = StreamState.resumed(num_choices, request.resume) if is_resumed else StreamState(num_choices)
            attempts, num_renewals = _Attempts(self._config.max_attempts), 0
            try:
                counted.queued()
                while True:
                    await self._preprocessor.renew_media(prepared)
                    try:
                        placed, decision, placed_at = await self._place(prepared, emitted)
                    except RevisionGone:
                        if not emitted.empty or (num_renewals := num_renewals + 1) > MAX_RENEWALS:
                            raise
                        prepared = await self._preprocessor.renewed(prepared, principal, counted)
                        observation.renewed(prepared)
                        on_checked(prepared)
                        continue
                    observation.placed(attempts.number, placed_at - prepared.arrived_at, decision, placed)
                    log.debug(
                        "attempt %d at %s, lender %s", attempts.number, decision.decode_id, decision.lender_id or "none"
                    )
                    link: WorkerLink | None = None
                    try:
                        internal = decode_request(
                            prepared, emitted, placed, decision, attempts.number, placed_at, self._clock()
                        )
                        link = model.links.to(placed.decode)
                        async with contextlib.aclosing(link.generate(internal, prepared.remaining_s())) as messages:
                            async for batch in messages:
                                if not placed.started:
                                    prepared.revision = prepared.revision or placed.decode.hello.revision
                                    model.fleet.started(placed)
                                    started_at = self._clock()
                                    observation.started(started_at - placed_at)
                                    if emitted.empty and warm is None:
                                        model.fleet.traffic.first_token(started_at - prepared.arrived_at)
                                for each in batch:
                                    emitted.add(each)
                                    if observation.message(each):
                                        await observation.account(emitted, each)
                                yield batch
                        if placed.started:
                            observation.attempt_finished(_learn(prepared, placed, batch[-1], started_at - placed_at))
                        return
                    except (Unavailable, Incompatible, Overloaded) as failure:
                        if isinstance(failure, Overloaded) and failure.permanent:
                            raise
                        if emitted.finished:
                            return
                        log.info("attempt %d failed: %s", attempts.number, failure)
                        observation.attempt_failed(failure)
                        is_broken = attempts.failed(model, placed, failure)
                        if attempts.are_over:
                            raise
                    finally:
                        late = self._clock() - placed_at > CONNECT_SOON_S
                        placed.failed |= late and not placed.started and link is not None and not link.connected
                        model.dispatcher.ended(placed)
                    if is_broken:
                        await _settle(model, placed.decode)
            finally:
                self._tenant_limits.leave(charge, lambda: len(prepared.prompt) + emitted.num_tokens)
                observation.sent(emitted)

    async def _place(self, prepared: PreparedRequest, emitted: StreamState) -> tuple[ActivePlacement, Decision, float]:
        """Wait for a placement; return also its time.

        A request that can never start is refused at once; without workers it waits a little.
        """
        demand, keys = await self._preprocessor.needs(prepared, emitted)
        prepared.info.streaming = not emitted.empty
        placed, decision = await prepared.model.dispatcher.place(prepared.info, demand, keys)
        return placed, decision, self._clock()


class _Attempts:
    """Attempts of one request."""

    def __init__(self, max_failures: int) -> None:
        self.number = 1
        self._num_failures = 0
        self._max_failures = max_failures

    def failed(self, model: ModelRuntime, placed: ActivePlacement, failure: ServiceError) -> bool:
        """Count a failed attempt; return whether its worker may be about to leave.

        Raises Overloaded after too many refusals.
        """
        if isinstance(failure, Draining):
            model.fleet.drains(placed.decode)  # no failure: the worker hands the request over, once
            self.number += 1
            return False
        if isinstance(failure, Overloaded):
            model.dispatcher.refused(placed)
            return False
        placed.failed = True
        self.number += 1
        self._num_failures += 1
        return True

    @property
    def are_over(self) -> bool:
        """Whether no other attempt follows a failure."""
        return self._num_failures == self._max_failures


def _learn(
    prepared: PreparedRequest, placed: ActivePlacement, last_message: bytes, first_message_s: float
) -> pb.Finish:
    """Learn from the last message of a stream that ended well; return its finish."""
    finish = pb.GenerateResponse.FromString(last_message).finish
    prepared.finish = finish
    if finish.HasField("receipt"):
        prepared.model.fleet.traffic.finished(finish)
        other = prepared.sampling.HasField("prompt_logprobs")  # whose first message is not the first token
        prepared.model.fleet.finished(placed, finish, None if other else first_message_s)
    return finish


async def _settle(model: ModelRuntime, worker: WorkerRecord) -> None:
    """Wait after a failure: a dead worker's membership ends within moments, and it should not be chosen before."""
    for _ in range(10):
        if model.fleet.worker(worker.worker_id) is not worker:
            return
        await asyncio.sleep(0.02)
