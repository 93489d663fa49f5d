"""Warming: a prompt's full blocks placed on several decode workers, by a request without output for each of them.

Each of these requests takes the ordinary path: charges, quota, admission, placement with its worker given, failover and
usage. A worker that is gone before it holds the blocks is replaced by the next cheapest one.
"""

import contextlib
import secrets
import time
from dataclasses import dataclass

from cluster.errors import Incompatible, InvalidRequest, ServiceError, Unavailable
from cluster.network.error_status import to_proto
from cluster.process.tasks import all_of
from kvcache.block_keys import BlockKey
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival, Arrivals
from router.config import RouterConfig
from router.models.media import sources_of
from router.models.model_runtimes import ModelRuntimes
from router.placement.demand import Demand, traffic_hash_of
from router.placement.fleet.introductions import by_cost
from router.prepared_request import PreparedRequest, WarmTarget
from router.request_path.preprocess import Preprocessor
from router.request_path.request_handler import RequestHandler
from router.security.api_keys import Principal
from router.validation import prompt_field

DEFAULT_PRIORITY = -1
MAX_SPARE = 4
"""Further workers that may take the place of those that are gone."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Parameters that the requests of all workers share."""

    request: pb.GenerateRequest
    """Request with the tokens of the full blocks."""
    num_blocks: int
    to_store: bool
    ends_at: float | None
    """Deadline of the call in seconds of the monotonic clock; None: the router's default."""


class Warming:
    """Warming of prompts by one router."""

    def __init__(
        self, config: RouterConfig, models: ModelRuntimes, arrivals: Arrivals, handler: RequestHandler
    ) -> None:
        self._config = config
        self._arrivals = arrivals
        self._handler = handler
        self._intake = Preprocessor(config, models)

    async def warm(
        self, request: pb.WarmRequest, deadline_s: float | None, principal: Principal, arrival: Arrival
    ) -> pb.WarmResponse:
        """Warm a prompt on the cheapest decode workers.

        A cancel of the task cancels all of it. Raises ServiceError, also where no worker could be warmed.
        """
        wanted_prompt = _generate_request(request)
        if sources := sources_of(wanted_prompt):
            raise InvalidRequest(sources[0].field, "prompts with pictures, sounds or videos cannot be warmed")
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        wanted = request.workers or 1
        with self._arrivals.reading(arrival):
            prepared = await self._intake.check(wanted_prompt, deadline_s, principal, arrival)
            grace_s = min(self._config.no_worker_grace_s, prepared.remaining_s())
            await prepared.model.await_workers(prepared.info.tenant, time.monotonic() + grace_s)
        arrival.queued()
        demand, keys = _demand_of(prepared)
        num_blocks = demand.num_total_blocks
        if not num_blocks:
            field = prompt_field(prepared.request)
            raise InvalidRequest(
                field, f"has {len(prepared.prompt)} tokens, less than one KV block of {demand.block_tokens}"
            )
        able, num_able = by_cost(prepared.model.fleet, demand, keys, wanted + MAX_SPARE, request.store)
        if len(able) < wanted:
            whose = " and share a store" if request.store else ""
            reason = (
                f"{wanted} are requested, but only {num_able} decode workers serve {prepared.model.name!r}{whose} now"
            )
            raise InvalidRequest("store" if request.store and not able else "workers", reason)
        plan = _Plan(
            pb.GenerateRequest(
                model=prepared.model.name,
                token_ids=prepared.prompt[: demand.num_tokens],
                tenant=request.tenant,
                request_id=prepared.request_id,
                session_id=prepared.request_id,
                cache_salt=request.cache_salt,
                priority=prepared.request.priority,
                cache_retention_s=request.cache_retention_s if request.HasField("cache_retention_s") else None,
            ),
            num_blocks,
            request.store,
            ends_at,
        )
        others = able[wanted:]
        warming = [_one(self._handler, plan, number, able[number], others, principal) for number in range(wanted)]
        results = await all_of(warming)
        if (failed := [error for _, error in results if error is not None]) and len(failed) == wanted:
            raise failed[0]
        return pb.WarmResponse(
            request_id=prepared.request_id,
            model=prepared.model.name,
            prompt_tokens=len(prepared.prompt),
            blocks=num_blocks,
            workers=[result for result, _ in results],
        )


def _generate_request(request: pb.WarmRequest) -> pb.GenerateRequest:
    """Return the request whose prompt is warmed."""
    name = request.request_id or secrets.token_hex(8)
    return pb.GenerateRequest(
        model=request.model,
        text=request.text if request.HasField("text") else None,
        messages=request.messages,
        token_ids=request.token_ids,
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
        tenant=request.tenant,
        request_id=name,
        session_id=name,  # of several revisions of the model all take the same one
        cache_salt=request.cache_salt,
        priority=request.priority if request.HasField("priority") else DEFAULT_PRIORITY,
        cache_retention_s=request.cache_retention_s if request.HasField("cache_retention_s") else None,
        sampling=pb.Sampling(max_tokens=1),
    )


def _demand_of(prepared: PreparedRequest) -> tuple[Demand, list[BlockKey]]:
    """Return the demand and the keys of the prompt's full blocks."""
    block_tokens = prepared.model.starting_workers(embeds=False)[0].hello.block_tokens
    full = prepared.prompt[: len(prepared.prompt) // block_tokens * block_tokens]
    traffic_hash = traffic_hash_of(prepared.request_id)
    sampling = pb.Sampling(max_tokens=0)
    model, salt, items = prepared.model, prepared.cache_salt, prepared.items
    return model.needs(full, sampling, salt, [full], False, traffic_hash, only_fills=True, items=items)


_Result = tuple[pb.WarmedWorker, ServiceError | None]


async def _one(
    handler: RequestHandler, plan: _Plan, number: int, worker_id: str, others: list[str], principal: Principal
) -> _Result:
    """Warm one worker, or the next of the `others` where it is gone."""
    while True:
        try:
            return await _on(handler, plan, number, worker_id, principal), None
        except (Unavailable, Incompatible) as error:
            failure: ServiceError = error
            if others:
                worker_id = others.pop(0)
                continue
        except ServiceError as error:
            failure = error
        return pb.WarmedWorker(worker_id=worker_id, status=to_proto(failure).SerializeToString()), failure


async def _on(
    handler: RequestHandler, plan: _Plan, number: int, worker_id: str, principal: Principal
) -> pb.WarmedWorker:
    request = pb.GenerateRequest()
    request.CopyFrom(plan.request)
    request.request_id = f"{plan.request.request_id}-{number}"
    left_s = None if plan.ends_at is None else plan.ends_at - time.monotonic()
    target = WarmTarget(worker_id, plan.to_store)
    # The call itself was charged as one request, when it arrived.
    stream = handler.generate(request, left_s, principal, is_charged=number == 0, warm=target)
    finish = pb.Finish()
    async with contextlib.aclosing(stream) as messages:
        async for batch in messages:
            finish.CopyFrom(pb.GenerateResponse.FromString(batch[-1]).finish)
    kv = finish.receipt.kv
    return pb.WarmedWorker(
        worker_id=finish.receipt.placement.decode_worker,
        held_blocks=plan.num_blocks,
        pinned_blocks=kv.pinned_blocks,
        stored_blocks=kv.stored_blocks,
        receipt=finish.receipt,
    )
