"""Lines of batches, answered by the HTTP endpoints themselves, below interactive requests."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.errors import Draining, InvalidRequest, ServiceError
from cluster.process.life import Drain
from router.batches.lines.line import PRIORITY, Handle, LineAnswer, LineRequest
from router.batches.lines.retries import is_retriable
from router.frontend.http.endpoint import Endpoint
from router.frontend.http.errors import Caller, error_answer
from router.frontend.http.generation import Generation
from router.security.api_keys import ApiKeys

log = logging.getLogger(__name__)


def line_handler(endpoint: Endpoint[Any, Any], keys: ApiKeys, drain: Drain) -> Handle:
    """Return a function that answers lines as this endpoint answers bodies."""

    async def answer(line: LineRequest) -> LineAnswer:
        try:
            principal = keys.named(line.key)
            caller = Caller(principal.tenant_for(line.tenant), line.request_id, principal)
            with _in_flight(drain):
                return LineAnswer(
                    200, await endpoint.whole(line.body, caller, lambda api_request: _adapt(api_request, line))
                )
        except ServiceError as error:
            if is_retriable(error):
                raise
            failure = error_answer(error, {}, endpoint.error_form)
        except Exception:  # a bug here ends this line, with an error in the client's format
            log.exception("a line of a batch failed")
            failure = error_answer(ServiceError("the router failed; its log says why"), {}, endpoint.error_form)
        return LineAnswer(failure.status, failure.body)

    return answer


def _adapt(api_request: Generation, line: LineRequest) -> None:
    """Make a request one of a batch.

    Raises InvalidRequest.
    """
    if api_request.stream:
        raise InvalidRequest("stream", "is not supported in a batch")
    for request in api_request.requests:
        request.priority = min(request.priority, PRIORITY)
    if api_request.deadline_s is None:
        api_request.deadline_s = line.deadline_s


@contextmanager
def _in_flight(drain: Drain) -> Iterator[None]:
    """Run a block for which a stopping router waits, and which ends with Draining when it waits no longer."""
    if drain.draining:
        raise Draining("this router was told to stop")
    task = asyncio.current_task()
    assert task is not None
    is_cut = False

    def cut() -> None:
        nonlocal is_cut
        is_cut = True
        task.cancel()

    try:
        with drain.holding(cut):
            yield
    except asyncio.CancelledError:
        if not is_cut or task.cancelling() > 1:  # cancelled by the batch's run, too
            raise
        task.uncancel()
        raise Draining("this router was told to stop") from None
