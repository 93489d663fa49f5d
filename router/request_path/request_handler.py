"""The path of one request through the router: preprocess, wait, place, stream, and place again on failure."""

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from cluster.errors import (
    Draining,
    Incompatible,
    InvalidRequest,
    NotConfigured,
    Overloaded,
    ServiceError,
    Unavailable,
    UnknownRequest,
)
from engine.block_keys import BlockKey
from engine.model.detokenizer import check_token_ids
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival, Arrivals
from router.admission.tenant_limits import TenantLimits
from router.config import RouterConfig
from router.decode_client.decode_stream import DecodeStream
from router.models.config import AUTO
from router.models.model_runtime import ModelRuntime, ModelRuntimes
from router.observability.decision_history import DecisionHistory, Entry, Refused
from router.observability.decision_history import Placement as PastPlacement
from router.observability.decision_log import DecisionLog
from router.observability.metrics import RequestMetrics, RouterMetrics
from router.observability.recent_requests import RecentRequests
from router.observability.samples import Samples
from router.observability.tracing import Tracing
from router.placement.affinity import session_of
from router.placement.candidates import Candidate
from router.placement.demand import Demand, traffic_hash_of
from router.placement.place import Decision, explain
from router.placement.request_demand import chains_of, num_outputs
from router.placement.worker_records import ActivePlacement, Worker
from router.prepared_request import PreparedRequest, WarmTarget
from router.request_path.accounting import FINISH_TAG, Accounting
from router.request_path.decode_request import decode_request
from router.request_path.preprocess import Preprocessor, asked_for, tenant_of
from router.request_path.stream_state import StreamState
from router.security.api_keys import Principal
from router.usage.totals import UsageTotal
from router.validation import check_messages, check_name_length

log = logging.getLogger(__name__)


CONNECT_SOON_S = 0.3
"""Seconds after which a request that ends on a worker without a connection counts as failed, whichever side ended it:
clients may be less patient than a connection."""


def _ignore(prepared: PreparedRequest) -> None:
    """Do nothing; most callers need no notice."""


@dataclass(frozen=True, slots=True)
class Explained:
    """Explanation of a request that was not started."""

    prepared: PreparedRequest
    demand: Demand
    candidates: list[Candidate]
    """Candidates, cheapest first."""


class RequestHandler:
    """Handler of all requests of one router."""

    def __init__(
        self,
        config: RouterConfig,
        models: ModelRuntimes,
        tenant_limits: TenantLimits,
        arrivals: Arrivals,
        metrics: RouterMetrics,
        samples: Samples,
        tracing: Tracing,
        decisions_file: DecisionLog,
        accounting: Accounting,
    ) -> None:
        self._config = config
        self._decisions_file = decisions_file
        self._tracing = tracing
        self._models = models
        self._metrics = metrics
        self._samples = samples
        self._accounting = accounting
        self.recent = RecentRequests()
        """Requests that ended recently, for the console."""
        self._history = DecisionHistory(int(config.decisions_memory_mib * (1 << 20)))
        for model in models:
            model.fleet.keeps_snapshots = self._history.on or decisions_file.on
        self._arrivals = arrivals
        self._tenant_limits = tenant_limits
        self._intake = Preprocessor(config, models)

    async def generate(
        self,
        request: pb.GenerateRequest,
        deadline_s: float | None,
        principal: Principal,
        on_checked: Callable[[PreparedRequest], object] = _ignore,
        arrival: Arrival | None = None,
        is_charged: bool = False,
        warm: WarmTarget | None = None,
    ) -> AsyncGenerator[bytes]:
        """Yield serialised GenerateResponses, one unbroken stream over all attempts.

        With `warm` there is no output, and one message with the finish. Raises ServiceError.

        `on_checked` is called once, before the first of them. `arrival` is that of a request which is counted already;
        one without may be charged already.
        """
        request_metrics = self._metrics.watch()
        sampled = warm is None and self._samples.wanted()
        prepared, arrived_at = None, time.monotonic()
        past = Entry(request.request_id, request.tenant, time.time())
        kept: list[bytes] = []
        own, is_accounted = contextlib.ExitStack(), False
        try:
            if arrival is None:
                arrival = own.enter_context(self._arrivals.arriving(tenant_of(request, principal), is_charged))
            with self._arrivals.reading(arrival):
                prepared = await self._intake.check(request, deadline_s, principal, arrival)
            if warm is not None:
                prepared.warm, prepared.sampling.max_tokens = warm, 0
            past.request_id, past.tenant, past.verdicts = prepared.request_id, request.tenant, prepared.verdicts
            past.model, past.model_reason = prepared.model.name, prepared.model_reason
            self._history.add(past)
            request_metrics.checked(prepared)
            prepared.model.fleet.traffic.arrived(len(prepared.prompt))
            on_checked(prepared)
            num_sequences = num_outputs(prepared.sampling)
            charge = await self._tenant_limits.enter(request.tenant, prepared.most_tokens, num_sequences)
            emitted = StreamState(prepared.sampling.n)
            try:
                async with contextlib.aclosing(self._attempts(prepared, emitted, past, arrival)) as messages:
                    async for message in messages:
                        request_metrics.message()
                        if sampled and self._samples.keeps_texts:
                            kept.append(message)
                        if FINISH_TAG in message:  # asked here, since most messages are single tokens
                            is_accounted |= await self._accounting.message(prepared, emitted, message)
                        yield message
            finally:
                self._tenant_limits.leave(charge, lambda: len(prepared.prompt) + emitted.num_tokens)
                _count(prepared, emitted, request_metrics)
                if not is_accounted and not emitted.empty:
                    self._accounting.cut_off(prepared, emitted)
        except ServiceError as error:
            request_metrics.failed(error)
            past.refusal = Refused.of(error)
            if prepared is None and request.request_id:
                past.tenant = principal.tenant or request.tenant  # the tenant may not be known yet
                self._history.add(past)
            self._tracing.failed(prepared, arrived_at, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            request_metrics.left()
            self._tracing.cancelled(prepared, arrived_at)
            raise
        finally:
            past.ended = True
            self._decisions_file.ended(past, None if prepared is None else prepared.finish)
            own.close()
        if prepared.finish is not None:
            request_metrics.finished(prepared.finish)
            total_s = time.monotonic() - prepared.arrived_at
            self.recent.add(
                time.time(),
                prepared.finish,
                prepared.decision,
                prepared.num_output_tokens,
                request_metrics.ttft_s,
                total_s,
            )
            self._tracing.finished(prepared, request_metrics.ttft_s)
            if sampled:
                self._samples.served(prepared, kept)

    @property
    def isolates_tenants(self) -> bool:
        """Whether tenants share no cached KV."""
        return self._config.isolate_tenants

    async def usage(self, num_days: int, tenant: str, principal: Principal) -> list[UsageTotal]:
        """Return usage of the last so many days: of the principal's tenant, or for operators of `tenant`, or of all.

        Raises InvalidRequest, Forbidden or Unavailable.
        """
        if not 1 <= num_days <= self._config.usage_days:
            raise InvalidRequest("days", f"must be 1 to {self._config.usage_days} (usage_days), not {num_days}")
        wanted = tenant or None if principal.operator else principal.tenant_for(tenant)
        totals = await self._accounting.ledger.since(num_days)
        return [total for total in totals if wanted is None or total.tenant == wanted]

    def count_ignored(self, fields: Sequence[str]) -> None:
        """Count fields of a request that had no effect."""
        self._metrics.ignored(fields)

    def model_of(self, name: str, principal: Principal) -> ModelRuntime:
        """Return the model of this name, for a call that generates nothing.

        Raises InvalidRequest, UnknownModel or Forbidden.
        """
        check_name_length(name, "model")
        if name == AUTO:
            raise InvalidRequest("model", f"{AUTO!r} chooses a model only for requests that generate: name a model")
        model, _ = asked_for(self._models, name, principal)
        if model is None:
            raise InvalidRequest("model", "is empty, and the default model is chosen for each request: name a model")
        return model

    async def detokenize(self, name: str, principal: Principal, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises ServiceError.
        """
        model = self.model_of(name, principal)
        if not model.encoder.has_tokenizer:
            raise InvalidRequest("model", f"{model.name!r} has no tokenizer")
        check_token_ids(token_ids, "token_ids", model.model_dir.vocab_size)
        return await asyncio.to_thread(model.encoder.decode, token_ids)

    async def tokenize(
        self, request: pb.TokenizeRequest, principal: Principal, is_charged: bool = False
    ) -> pb.TokenizeResponse:
        """Return a prompt's tokens as its model reads it.

        Raises ServiceError.
        """
        check_messages(request.messages)
        model = self.model_of(request.model, principal)
        prompt = pb.GenerateRequest(
            text=request.text if request.HasField("text") else None,
            messages=request.messages,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            continue_final_message=request.continue_final_message,
            no_generation_prompt=request.no_generation_prompt,
        )
        adds_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        if request.messages and request.HasField("add_special_tokens") and adds_special:
            raise InvalidRequest("add_special_tokens", "is not for messages: the chat template writes special tokens")
        tenant = principal.tenant or ""
        with self._arrivals.arriving(tenant, is_charged):
            token_ids = await model.encoder.encode(prompt, tenant, adds_special)
        return pb.TokenizeResponse(
            model=model.name, token_ids=token_ids, max_context_tokens=model.model_dir.max_context_tokens
        )

    async def _attempts(
        self, prepared: PreparedRequest, emitted: StreamState, past: Entry, arrival: Arrival
    ) -> AsyncGenerator[bytes]:
        model = prepared.model
        attempt, failures = 1, 0
        arrival.queued()
        while True:
            placed, decision, placed_at = await self._place(prepared, emitted)
            placed_after_s = placed_at - prepared.arrived_at
            made = PastPlacement(attempt, placed_after_s, decision, placed.placement_snapshot)
            self._decisions_file.placed(past, made)
            self._history.placed(past, made)
            placed.placement_snapshot = None
            log.debug("attempt %d at %s, lender %s", attempt, decision.decode_id, decision.lender_id or "none")
            link: DecodeStream | None = None
            try:
                internal = decode_request(prepared, emitted, placed, decision, attempt, placed_at, time.monotonic())
                link = model.links.to(placed.decode)
                async with contextlib.aclosing(link.generate(internal, prepared.remaining_s())) as messages:
                    async for message in messages:
                        if not placed.started:
                            model.fleet.started(placed)
                            started_at = time.monotonic()
                            past.started(started_at - placed_at)
                            if emitted.empty and prepared.warm is None:
                                model.fleet.traffic.first_token(started_at - prepared.arrived_at)
                        emitted.add(message)
                        yield message
                if placed.started:
                    _learn(prepared, placed, message, started_at - placed_at)
                    if prepared.finish is not None:
                        past.finished(prepared.finish.receipt.kv)
                return
            except (Unavailable, Incompatible, Overloaded) as failure:
                if isinstance(failure, Overloaded) and failure.permanent:
                    raise
                if emitted.finished:
                    return
                log.info("attempt %d failed: %s", attempt, failure)
                past.failed(str(failure))
                if isinstance(failure, Draining):
                    model.fleet.drains(placed.decode)  # no failure: the worker hands the request over, once
                    attempt += 1
                    continue
                if isinstance(failure, Overloaded):
                    model.dispatcher.refused(placed)  # raises after too many refusals
                    continue
                placed.failed = True
                attempt, failures = attempt + 1, failures + 1
                if failures == self._config.max_attempts:
                    raise
            finally:
                late = time.monotonic() - placed_at > CONNECT_SOON_S
                placed.failed |= late and not placed.started and link is not None and not link.connected
                model.dispatcher.ended(placed)
            await _settle(model, placed.decode)

    def decisions(self, request_id: str, principal: Principal) -> Entry:
        """Return the decisions of a recent request.

        Raises InvalidRequest, UnknownRequest.
        """
        if not request_id:
            raise InvalidRequest("request_id", "is empty")
        check_name_length(request_id, "request_id")
        if not self._history.on:
            raise NotConfigured("decisions_memory_mib is 0: this router keeps no decisions")
        entry = self._history.find(request_id, None if principal.operator else principal.tenant)
        if entry is None:
            raise UnknownRequest(
                f"{request_id!r} is not among the last requests of this router: another router had it, "
                "or decisions_memory_mib is too small",
                "request_id",
            )
        return entry

    async def explain(self, request: pb.GenerateRequest, deadline_s: float | None, principal: Principal) -> Explained:
        """Return a request's demand and all candidates to start it now.

        Raises ServiceError.
        """
        arriving = self._arrivals.arriving(tenant_of(request, principal))
        with arriving as arrival, self._arrivals.reading(arrival):
            prepared = await self._intake.check(request, deadline_s, principal, arrival, explain=True)
        demand, keys = await self._needs(prepared, StreamState(prepared.sampling.n))
        fleet = prepared.model.fleet
        # A large fleet's candidates take tenths of a second: computed off the loop, from a snapshot that does not
        # change.
        hits = fleet.hits(keys, demand.other_keys, demand.session)
        placement_snapshot = copy.deepcopy((fleet.snapshot, hits, fleet.rates))
        return Explained(prepared, demand, await asyncio.to_thread(explain, demand, *placement_snapshot))

    async def _place(self, prepared: PreparedRequest, emitted: StreamState) -> tuple[ActivePlacement, Decision, float]:
        """Wait for a placement.

        A request that can never start is refused at once; without workers it waits a little.
        """
        demand, keys = await self._needs(prepared, emitted)
        prepared.info.streaming = not emitted.empty
        placed, decision = await prepared.model.dispatcher.place(prepared.info, demand, keys)
        prepared.decision = decision
        return placed, decision, time.monotonic()

    async def _needs(self, prepared: PreparedRequest, emitted: StreamState) -> tuple[Demand, list[BlockKey]]:
        """Return the demand, and the keys of blocks that may come from elsewhere."""
        grace_s = min(self._config.no_worker_grace_s, prepared.remaining_s())
        embeds = prepared.request.HasField("embedding")
        await prepared.model.await_workers(prepared.info.tenant, time.monotonic() + grace_s, embeds)
        prompt, sampling = prepared.prompt, prepared.sampling
        unfinished = [choice.token_ids for choice in emitted.choices if not choice.finished]
        to_score = sampling.HasField("prompt_logprobs") and emitted.num_prompt_logprobs < len(prompt) - 1
        chains = chains_of(prompt, sampling, unfinished)
        traffic_hash, new = traffic_hash_of(prepared.request_id), not prepared.info.num_placed
        only_fills = prepared.warm is not None
        demand, keys = prepared.model.needs(
            prompt, sampling, prepared.cache_salt, chains, to_score, traffic_hash, new, embeds, only_fills
        )
        if prepared.warm is not None:
            demand = replace(demand, only=prepared.warm.worker_id)
        request = prepared.request
        session = session_of(request.tenant, request.session_id, request.prompt_cache_key)
        key = request.tenant, request.task
        return prepared.model.fleet.with_expected_output(demand, key, len(prompt), session), keys


def _count(prepared: PreparedRequest, emitted: StreamState, request_metrics: RequestMetrics) -> None:
    """Count what an ended request used.

    The sent messages are parsed only for requests that ended early or have several choices.
    """
    if emitted.empty:
        return
    finish = prepared.finish
    if finish is not None and prepared.sampling.n == 1:
        prepared.num_output_tokens, prepared.reasons = finish.usage.completion_tokens, [finish.reason]
    else:
        prepared.num_output_tokens = emitted.num_tokens
        prepared.reasons = [choice.reason for choice in emitted.choices if choice.reason is not None]
    num_prompt, num_output = len(prepared.prompt), prepared.num_output_tokens
    request_metrics.over(num_prompt, num_output)
    prepared.model.costs.used(num_prompt, num_output, finish is not None, auto=bool(prepared.verdicts))


def _learn(prepared: PreparedRequest, placed: ActivePlacement, last_message: bytes, first_message_s: float) -> None:
    finish = pb.GenerateResponse.FromString(last_message).finish
    prepared.finish = finish
    if finish.HasField("receipt"):
        prepared.model.fleet.traffic.finished(finish)
        # The first message of these is not the first token.
        other = prepared.sampling.HasField("prompt_logprobs") or prepared.sampling.HasField("beam_width")
        prepared.model.fleet.finished(placed, finish, None if other else first_message_s)


async def _settle(model: ModelRuntime, worker: Worker) -> None:
    """Wait after a failure: a dead worker's membership ends within moments, and it should not be chosen before."""
    for _ in range(10):
        if model.fleet.worker(worker.worker_id) is not worker:
            return
        await asyncio.sleep(0.02)
