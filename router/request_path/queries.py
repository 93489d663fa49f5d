"""Queries: what clients ask without having anything generated."""

import asyncio
import copy
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.cache_salt import isolated_salt
from cluster.errors import InvalidRequest, UnknownRequest
from engine.model.detokenizer import check_token_ids
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrivals
from router.config import RouterConfig
from router.models.config import AUTO
from router.models.media import ReadingContext, sources_of
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.models.prompt_reading import encode, expand
from router.observability.records import MEMORY_BYTES, RequestRecord
from router.placement.demand import Candidate, Demand
from router.placement.place import explain
from router.prepared_request import PreparedRequest
from router.request_path.observation import Observer
from router.request_path.preprocess import Preprocessor, asked_for, tenant_of
from router.request_path.stream_state import StreamState
from router.security.api_keys import Principal
from router.usage import USAGE_DAYS, UsageTotal
from router.validation import check_messages, check_name_length


@dataclass(frozen=True, slots=True)
class Explained:
    """Explanation of a request that was not started."""

    prepared: PreparedRequest
    demand: Demand
    candidates: list[Candidate]
    """Candidates, cheapest first."""


class Queries:
    """Queries to one router."""

    def __init__(self, config: RouterConfig, models: ModelRuntimes, arrivals: Arrivals, observer: Observer) -> None:
        self._config = config
        self._models = models
        self._arrivals = arrivals
        self._observer = observer
        self._preprocessor = Preprocessor(config, models)
        self.records = observer.records

    @property
    def isolates_tenants(self) -> bool:
        """Whether tenants share no cached KV."""
        return self._config.isolate_tenants

    def count_ignored(self, fields: Sequence[str]) -> None:
        """Count fields of a request that had no effect."""
        self._observer.metrics.ignored(fields)

    async def usage(self, num_days: int, tenant: str, principal: Principal) -> list[UsageTotal]:
        """Return usage of the last so many days: of the principal's tenant, or for operators of `tenant`, or of all.

        Raises InvalidRequest, Forbidden or Unavailable.
        """
        if not 1 <= num_days <= USAGE_DAYS:
            raise InvalidRequest("days", f"must be 1 to {USAGE_DAYS}, not {num_days}")
        wanted = tenant or None if principal.operator else principal.tenant_for(tenant)
        totals = await self._observer.accounting.ledger.since(num_days)
        return [total for total in totals if wanted is None or total.tenant == wanted]

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
        return model.shown()

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
        prompt = pb.GenerateRequest(
            model=request.model,
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
        model, token_ids = await self._encoded(prompt, principal, adds_special, is_charged)
        return pb.TokenizeResponse(
            model=model.name, token_ids=token_ids, max_context_tokens=model.model_dir.max_context_tokens
        )

    async def num_prompt_tokens(self, request: pb.GenerateRequest, principal: Principal) -> int:
        """Return the tokens of a request's prompt; its arrival is charged already.

        Raises ServiceError.
        """
        return len((await self._encoded(request, principal, True, True))[1])

    async def _encoded(
        self, prompt: pb.GenerateRequest, principal: Principal, adds_special: bool, is_charged: bool
    ) -> tuple[ModelRuntime, list[int]]:
        check_messages(prompt.messages)
        model, tenant = self.model_of(prompt.model, principal), principal.tenant or ""
        deadline, sources = time.monotonic() + self._config.default_deadline_s, sources_of(prompt)
        with self._arrivals.arriving(tenant, is_charged):
            token_ids = await encode(model, prompt, sources, tenant, deadline, adds_special)
            if sources:
                salt = isolated_salt(tenant, "") if self._config.isolate_tenants else ""
                context = ReadingContext(secrets.token_hex(8), salt, deadline)
                media = await expand(model, prompt, token_ids, sources, tenant, context)
                media.close()
                token_ids = media.prompt
        return model, token_ids

    def record(self, request_id: str, principal: Principal) -> RequestRecord:
        """Return the record of a recent request.

        Raises InvalidRequest, UnknownRequest.
        """
        if not request_id:
            raise InvalidRequest("request_id", "is empty")
        check_name_length(request_id, "request_id")
        record = self._observer.records.find(request_id, None if principal.operator else principal.tenant)
        if record is None:
            raise UnknownRequest(
                f"{request_id!r} is not among the last requests of this router: another router had it, "
                f"or it is too long ago for the {MEMORY_BYTES >> 20} MiB that it keeps",
                "request_id",
            )
        return record

    async def explain(self, request: pb.GenerateRequest, deadline_s: float | None, principal: Principal) -> Explained:
        """Return a request's demand and all candidates to start it now.

        Raises ServiceError.
        """
        arriving = self._arrivals.arriving(tenant_of(request, principal))
        with arriving as arrival, self._arrivals.reading(arrival):
            prepared = await self._preprocessor.check(request, deadline_s, principal, arrival, explain=True)
        prepared.close()  # it starts nothing that would read the media
        demand, keys = await self._preprocessor.needs(prepared, StreamState(prepared.sampling.n))
        fleet = prepared.model.fleet
        # A large fleet's candidates take tenths of a second: computed off the loop, from a snapshot that does not
        # change.
        hits = fleet.hits(keys, demand.other_keys, demand.session)
        placement_snapshot = copy.deepcopy((fleet.snapshot, hits, fleet.rates))
        return Explained(prepared, demand, await asyncio.to_thread(explain, demand, *placement_snapshot))
