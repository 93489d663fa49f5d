"""Preprocessing: from a client's message to a checked request with model, tokens, options, deadline and demand."""

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from cluster import logs
from cluster.cache_salt import isolated_salt
from cluster.errors import Forbidden, Incompatible, InvalidRequest, RevisionGone, Unavailable
from engine.sampling.structured_output import read_structured
from kvcache.block_keys import BlockKey, token_digest
from protos import inference_pb2 as pb
from router.admission import refusals
from router.admission.arrivals import Arrival
from router.admission.request import RequestInfo
from router.config import RouterConfig
from router.models.config import AUTO
from router.models.media import ReadingContext, drop_data
from router.models.model_runtime import REVISION_BYTES, ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.models.model_selection import ModelCriteria, unfit
from router.models.model_selector import ModelSelector, SelectedModel
from router.models.prompt_reading import read
from router.placement.demand import Demand, traffic_hash_of
from router.placement.rates import session_of
from router.prepared_request import PreparedRequest
from router.request_path.stream_state import StreamState
from router.security.api_keys import Principal
from router.validation import (
    check_media,
    check_name_length,
    check_names,
    check_quality,
    check_resume,
    check_resumed,
    check_retention,
    check_time_limit,
)


class Preprocessor:
    """Preprocessor of one router."""

    def __init__(
        self, config: RouterConfig, models: ModelRuntimes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._models = models
        self._clock = clock

    async def check(
        self,
        request: pb.GenerateRequest,
        deadline_s: float | None,
        principal: Principal,
        arrival: Arrival,
        explain: bool = False,
        thumbnails: bool = False,
    ) -> PreparedRequest:
        """Check, tokenise and complete a request of the arrival's tenant, which the caller must close.

        Raises ServiceError.

        `explain`: predict more than the choice of a model needs. `thumbnails`: have thumbnails of pictures made.
        """
        arrived_at = self._clock()
        deadline = arrived_at + (self._config.default_deadline_s if deadline_s is None else deadline_s)
        check_names(request)
        models = self._models.only(principal.models)
        resumes = request.HasField("resume")
        if resumes:
            check_resume(request)
        model, why = asked_for(self._models, request.resume.origin.model if resumes else request.model, principal)
        name = request.request_id or secrets.token_hex(8)
        logs.request_id.set(name)
        request.tenant = arrival.tenant
        self._check_priority(request, principal)
        cache_salt = isolated(request) if self._config.isolate_tenants else request.cache_salt
        check_time_limit(request)
        check_retention(request)
        check_quality(request)
        check_media(request)
        context = ReadingContext(name, cache_salt, deadline, thumbnails)
        if model is None and request.HasField("embedding"):
            raise InvalidRequest("model", f"{AUTO!r} chooses only models that generate: name an embedding model")
        if model is None:
            give_up_at = min(deadline, arrived_at + self._config.no_worker_grace_s)
            selector = ModelSelector(self._config, models)
            chosen = await selector.choose(request, context, give_up_at, arrival, explain)
            why = f"{why}: {chosen.reason}" if why == AUTO else f"{why}; {chosen.reason}"
        else:
            _check_fit(model, request)
            if resumes:
                model = await self._begun(model, request, deadline)
            else:
                model = model.for_request(name, _session_name(request), request.HasField("embedding"))
            chosen = SelectedModel(model, why, await read(model, request, arrival, context))
        sampling = chosen.reading.sampling
        try:
            if resumes:
                _check_resumed(request.resume, chosen)
            if (structured := read_structured(sampling)) is not None:
                prepared = await chosen.model.grammars.check(structured, arrival.tenant)
                if structured.kind in ("json_schema", "grammar"):
                    setattr(sampling.structured, structured.kind, prepared.texts[0])
        except BaseException:
            chosen.reading.close()
            raise
        if chosen.reading.media is not None:
            drop_data(request)
        first_token_s = request.max_ttft_ms / 1e3 if request.HasField("max_ttft_ms") else math.inf
        return PreparedRequest(
            request=request,
            request_id=name,
            model=chosen.model,
            model_reason=why,
            verdicts=chosen.verdicts,
            prompt=chosen.reading.prompt,
            sampling=sampling,
            output=chosen.reading.output,
            cache_salt=cache_salt,
            arrived_at=arrived_at,
            tokenised_at=self._clock(),
            deadline=deadline,
            info=RequestInfo(request.tenant, request.priority, arrived_at, deadline, arrived_at + first_token_s),
            media=chosen.reading.media,
            items=chosen.reading.items,
            revision=bytes.fromhex(request.resume.origin.revision)[:REVISION_BYTES] if resumes else b"",
        )

    async def _begun(self, model: ModelRuntime, request: pb.GenerateRequest, deadline: float) -> ModelRuntime:
        """Return the runtime bound to the files by which the stream's prompt was read.

        A router that has just started waits for its first worker. Raises RevisionGone and Unavailable.
        """
        give_up_at = min(deadline, self._clock() + self._config.no_worker_grace_s)
        await model.await_workers(request.tenant, give_up_at)
        if (begun := model.of_revision(bytes.fromhex(request.resume.origin.revision))) is None:
            raise refusals.revision_gone().error
        return begun

    async def renewed(self, prepared: PreparedRequest, principal: Principal, arrival: Arrival) -> PreparedRequest:
        """Return a request without output yet, read again by the files of a revision that is there.

        Raises RevisionGone for one that cannot be read again, since its media are dropped or its worker is given.
        """
        if prepared.media is not None or prepared.warm is not None:
            raise RevisionGone("the model was replaced while the request waited: send it again")
        renewed = await self.check(prepared.request, prepared.remaining_s(), principal, arrival)
        renewed.request_id, renewed.info = prepared.request_id, prepared.info
        renewed.arrived_at, renewed.deadline = prepared.arrived_at, prepared.deadline
        return renewed

    async def renew_media(self, prepared: PreparedRequest) -> None:
        """Have the media of a request made ready anew where their preprocessor holds them no longer.

        Raises ServiceError.
        """
        if prepared.media is not None and prepared.media.broken:
            prepared.media = await prepared.model.media_again(prepared.media)
            prepared.items = prepared.media.items

    async def needs(self, prepared: PreparedRequest, emitted: StreamState) -> tuple[Demand, list[BlockKey]]:
        """Return the demand of what is left to do, and the keys of blocks that may come from elsewhere.

        Raises ServiceError, RevisionGone where only workers of another revision are there.
        """
        grace_s = min(self._config.no_worker_grace_s, prepared.remaining_s())
        embeds = prepared.request.HasField("embedding")
        model = await self._serving(prepared, self._clock() + grace_s, embeds)
        prompt, sampling = prepared.prompt, prepared.sampling
        unfinished = [choice.token_ids for choice in emitted.choices if not choice.finished]
        to_score = sampling.HasField("prompt_logprobs") and emitted.num_prompt_logprobs < len(prompt) - 1
        chains = [[*prompt, *emitted] for emitted in unfinished]
        traffic_hash, new = traffic_hash_of(prepared.request_id), not prepared.info.num_placed
        only_fills = prepared.warm is not None
        demand, keys = model.needs(
            prompt,
            sampling,
            prepared.cache_salt,
            chains,
            to_score,
            traffic_hash,
            new,
            embeds,
            only_fills,
            prepared.items,
        )
        if prepared.warm is not None:
            demand = replace(demand, only=(prepared.warm.worker_id,))
        request = prepared.request
        session = session_of(request.tenant, request.session_id, request.prompt_cache_key)
        key = request.tenant, request.task
        return model.fleet.with_expected_output(demand, key, len(prompt), session), keys

    async def _serving(self, prepared: PreparedRequest, give_up_at: float, embeds: bool) -> ModelRuntime:
        """Wait for workers on which the request can start, and return their model runtime.

        Before the output begins, the first worker of whatever revision ends the wait. After it, one of the same
        revision does. Raises RevisionGone, Unavailable and Overloaded.
        """
        model, tenant = prepared.model, prepared.info.tenant
        if prepared.revision:
            begun = model.at(prepared.revision)
            if not begun.starting_workers(embeds) and self._config.continue_on_other_revisions:
                begun = model
            try:
                await begun.await_workers(tenant, give_up_at, embeds)
            except Unavailable:
                if model.unbound.starting_workers(embeds):
                    raise refusals.revision_gone().error from None
                raise
            return begun
        await model.unbound.await_workers(tenant, give_up_at, embeds)
        if not model.is_bound:
            bound = model.for_request(prepared.request_id, _session_name(prepared.request), embeds)
            if bound.files is model.files:
                model = prepared.model = bound
        if not (model.is_bound and model.starting_workers(embeds)):
            raise refusals.revision_gone().error
        return model

    def _check_priority(self, request: pb.GenerateRequest, principal: Principal) -> None:
        """Check that the caller may use the request's priority.

        Raises Forbidden.
        """
        highest = self._config.policy(request.tenant).max_priority
        if request.priority > highest and not principal.operator:
            raise Forbidden(f"at most {highest} for tenant {request.tenant!r}, not {request.priority}", "priority")


def _check_resumed(resume: pb.Resume, chosen: SelectedModel) -> None:
    """Check that a stream can be continued with its prompt as it was read here.

    Raises Incompatible and InvalidRequest.
    """
    prompt = chosen.reading.prompt
    if token_digest(prompt) != resume.origin.prompt:
        reason = "this router reads the prompt otherwise than the one that began the stream"
        raise Incompatible(reason, "resume.origin.prompt")
    check_resumed(resume, chosen.reading.sampling, len(prompt), chosen.model.model_dir.vocab_size)


def tenant_of(request: pb.GenerateRequest, principal: Principal) -> str:
    """Return the tenant whose request it is.

    Raises InvalidRequest for a name that is too long, Forbidden for another tenant than the principal's.
    """
    check_name_length(request.tenant, "tenant")
    return principal.tenant_for(request.tenant)


def _session_name(request: pb.GenerateRequest) -> str:
    """Return the name of the request's conversation, with its tenant; empty where it has none."""
    name = request.session_id or request.prompt_cache_key
    return f"{request.tenant}/{name}" if name else ""


def isolated(request: pb.GenerateRequest) -> str:
    """Return a cache salt that no two tenants share, whatever salts their requests bring."""
    return isolated_salt(request.tenant, request.cache_salt)


def asked_for(models: ModelRuntimes, name: str, principal: Principal) -> tuple[ModelRuntime | None, str]:
    """Return the model that a name means to this principal, None for AUTO, and why.

    Raises Forbidden for a model outside the key, existing or not: otherwise a key could find out other models.
    """
    if principal.models is not None and name not in ("", AUTO, *principal.models):
        raise Forbidden(f"this key may not use {name!r}", "model")
    return models.only(principal.models).asked_for(name)


def _check_fit(model: ModelRuntime, request: pb.GenerateRequest) -> None:
    """Check that a model named by the request meets its quality and task."""
    criteria = ModelCriteria(request.task, request.min_quality)
    if (lack := unfit(repr(model.name), model.entry.quality, model.entry.tasks, criteria)) is not None:
        raise InvalidRequest(*lack)
