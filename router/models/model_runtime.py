"""Model runtimes: all that belongs to one served model.

A router has one or several, by name.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import Forbidden, Incompatible, InvalidRequest, StartError, Unavailable, UnknownModel
from cluster.network.tls import MemberIdentity
from engine.block_keys import BlockKey, block_keys, root_key
from engine.errors import ModelRefused
from engine.media.items import Item
from engine.model.embedding import EmbeddingConfig, has_output_layer, read_embedding
from engine.model.hub import CONFIG_FILES, fetch_beside
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from protos import membership_pb2
from router.admission.dispatcher import Dispatcher
from router.admission.limits.shares import Shares
from router.admission.refusals import Refusal
from router.decode_client.decode_streams import DecodeStreams
from router.models.config import AUTO, ModelEntry, ModelsConfig
from router.models.costs import Costs
from router.models.grammars.grammar_checker import GrammarChecker
from router.models.media import MediaClient, MediaSource, ReadyMedia, sources_of
from router.models.prompts.prompts import PromptEncoder
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import Worker
from router.placement.request_demand import demand_of

log = logging.getLogger(__name__)

MAX_VERSIONS = 4
"""Versions of a model's weights whose caches a request considers; a prompt's keys are hashed for each."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model, read before any worker serves it."""

    entry: ModelEntry
    model_dir: ModelDir
    encoder: PromptEncoder
    config_fingerprint: bytes
    embedding: EmbeddingConfig | None
    """Way to its embeddings; None for a model that is no embedding model."""
    embedding_fault: str
    """Reason why there are no embeddings; empty where there are."""
    generates: bool
    """Whether it can generate; a model that was saved for embeddings only may not."""
    clamps: bool
    """Whether a `max_tokens` beyond the context is lowered instead of refused."""

    @classmethod
    def read(cls, entry: ModelEntry, directory: Path, config: ModelsConfig) -> "ModelFiles":
        """Read a model directory.

        Raises StartError.
        """
        model_dir = ModelDir.open(directory)
        # Read now, so that a config without them is refused at start and not with the first request.
        size, context = model_dir.vocab_size, model_dir.max_context_tokens
        parsers = entry.tool_parser, entry.reasoning_parser
        encoder = PromptEncoder(model_dir, *parsers, config.special_tokens_in_messages)
        log.info("%s: %d tokens, context %d", entry.name or model_dir.name, size, context)
        try:
            embedding, fault = read_embedding(model_dir), ""
        except ModelRefused as reason:
            embedding, fault = None, reason.reason
        generates = embedding is None or has_output_layer(model_dir)
        fingerprint, clamps = model_dir.config_fingerprint(), config.clamp_max_tokens
        return cls(entry, model_dir, encoder, fingerprint, embedding, fault, generates, clamps)

    @property
    def name(self) -> str:
        return self.entry.name or self.model_dir.name


async def fetch_models(config: ModelsConfig) -> list[Path]:
    """Return the models' local directories, in order, after fetching what a router reads of repositories.

    Raises StartError.
    """
    return [await fetch_beside(entry.path, CONFIG_FILES) for entry in config.entries]


def read_models(config: ModelsConfig, directories: Sequence[Path] | None = None) -> list[ModelFiles]:
    """Read all models, in order, from `directories`; by default those that the settings name.

    Raises StartError for an invalid one, and for two that cannot be told apart.
    """
    places = [entry.path for entry in config.entries] if directories is None else directories
    models = [ModelFiles.read(entry, place, config) for entry, place in zip(config.entries, places, strict=True)]
    for number, model in enumerate(models):
        where = f"models.{number}.name"
        if model.name == AUTO:
            raise StartError(where, f"{model.entry.path}: {AUTO!r} is reserved: clients send it to have a model chosen")
        for other in models[:number]:
            paths = f"{other.entry.path} and {model.entry.path}"
            if other.name == model.name:
                raise StartError(where, f"{paths} have the same name, {model.name!r}")
            same_names = {other.name, other.model_dir.name} & {model.name, model.model_dir.name}
            if other.config_fingerprint == model.config_fingerprint and same_names:
                raise StartError(where, f"{paths} have equal configs and names: a worker's model would be ambiguous")
    names = [model.name for model in models]
    if config.default_model not in ("", AUTO, *names):
        raise StartError("default_model", f"{config.default_model!r} is not among {', '.join(names)}, {AUTO}")
    for number, rule in enumerate(config.model_rules):
        for name in rule.models:
            if name not in names:
                raise StartError(f"model_rules.{number}.models", f"{name!r} is not among {', '.join(names)}")
    return models


class ModelRuntime:
    """Files, workers and queue of one model.

    Failover stays within it.
    """

    def __init__(
        self,
        files: ModelFiles,
        fleet: Fleet,
        dispatcher: Dispatcher,
        grammar_limit_s: float,
        worker_waits: Shares,
        trust: MemberIdentity | None = None,
    ) -> None:
        """Create it; `worker_waits` counts requests that wait for a first worker."""
        self.name = files.name
        self.entry = files.entry
        self.model_dir = files.model_dir
        self.encoder = files.encoder
        self.output_format = files.encoder.output_format
        self.config_fingerprint = files.config_fingerprint
        self.embedding, self.generates = files.embedding, files.generates
        self.clamps = files.clamps
        self._embedding_fault = files.embedding_fault
        self.fleet = fleet
        self.dispatcher = dispatcher
        self.grammars = GrammarChecker(files.model_dir, grammar_limit_s)
        self.links = DecodeStreams(fleet, trust)
        addresses = files.entry.preprocessors
        self._media = MediaClient(files.name, addresses, trust) if addresses else None
        self._last_roster: _Roster | None = None
        self.costs = Costs(files.entry)
        self.base_model = ""
        """Name of the model that the adapter changes; empty without an adapter."""
        self.adapter = b""
        """Fingerprint of the LoRA adapter; empty for none."""
        self._worker_waits = worker_waits
        self._reported = asyncio.Event()
        """Event set when a worker reports, for requests that wait for the first one."""

    async def close(self) -> None:
        await self.grammars.close()

    def check_embeds(self) -> EmbeddingConfig:
        """Return the way to the model's embeddings.

        Raises InvalidRequest for a model without.
        """
        if self.embedding is None:
            raise InvalidRequest("model", f"{self.name!r} makes no embeddings: {self._embedding_fault}")
        return self.embedding

    def media(self, sources: Sequence[MediaSource]) -> MediaClient:
        """Return the client that makes media ready.

        Raises InvalidRequest for a model that reads text only.
        """
        if self._media is None:
            raise InvalidRequest(sources[0].field, self._reads_text_only)
        return self._media

    async def media_again(self, ready: ReadyMedia) -> ReadyMedia:
        """Have media made ready anew whose preprocessor is gone.

        Raises ServiceError.
        """
        assert self._media is not None, "it made them ready"
        return await self._media.again(ready)

    @property
    def _reads_text_only(self) -> str:
        return f"{self.name!r} reads text only here: the setting `preprocessor` of the model is empty"

    def fault(self, request: pb.GenerateRequest) -> str:
        """Return why this model cannot read the prompt; empty where it can."""
        if self._media is None and sources_of(request):
            return self._reads_text_only
        return self.encoder.fault(request)

    def with_adapter(self, name: str) -> "ModelRuntime | None":
        """Return the model of this name that a LoRA adapter makes of this one; None where no worker has the adapter.

        It shares everything but its name, its workers and its block keys.
        """
        if (fingerprint := self.fleet.adapters.get(name)) is None:
            return None
        adapted = copy.copy(self)
        adapted.name, adapted.base_model, adapted.adapter = name, self.name, fingerprint
        adapted._last_roster = None
        return adapted

    def workers(self) -> list[Worker]:
        """Workers that serve it; with an adapter only those that have it."""
        if not self.adapter:
            return list(self.fleet.workers)
        return [w for w in self.fleet.workers if any(a.fingerprint == self.adapter for a in w.hello.adapters)]

    def decode_workers(self) -> list[Worker]:
        """Decode workers whose engine has reported; a hanging one may join again and again without a report."""
        return self._roster().decode

    def starting_workers(self, embeds: bool) -> list[Worker]:
        """Return the workers on which requests start: decode workers, or for embeddings prefill workers, if any."""
        roster = self._roster()
        return roster.prefill if embeds and roster.prefill else roster.decode

    def _roster(self) -> "_Roster":
        """Return the workers as they are now; every request asks for them, and they seldom change."""
        number = self.fleet.num_roster_changes
        if (roster := self._last_roster) is None or roster.number != number:
            workers = self.workers()
            reporting = [worker for worker in workers if worker.load is not None and not worker.draining]
            fingerprints: dict[int, set[bytes]] = {}
            for worker in workers:
                fingerprints.setdefault(worker.hello.block_tokens, set()).add(worker.hello.model_fingerprint)
            roster = self._last_roster = _Roster(
                number,
                [worker for worker in reporting if worker.decodes],
                [worker for worker in reporting if not worker.decodes],
                {block_tokens: sorted(each) for block_tokens, each in fingerprints.items()},
            )
        return roster

    async def await_workers(self, tenant: str, give_up_at: float, embeds: bool = False) -> None:
        """Wait until a worker is there on which requests start.

        Raises Unavailable at `give_up_at`, of the monotonic clock, and Overloaded when too many requests wait.
        """
        if self.starting_workers(embeds):
            return
        try:
            self._worker_waits.take(tenant)
        except Refusal as refusal:
            self.dispatcher.admission.num_refused[refusal.reason] += 1
            raise refusal.take() from None
        try:
            await self._first_worker(give_up_at, embeds)
        finally:
            self._worker_waits.give_back(tenant)

    async def _first_worker(self, give_up_at: float, embeds: bool) -> None:
        while not self.starting_workers(embeds):
            self._reported.clear()
            try:
                async with asyncio.timeout(give_up_at - time.monotonic()):
                    await self._reported.wait()
            except TimeoutError:
                raise Unavailable(f"no decode worker of {self.name!r} has joined") from None

    def on_worker_report(self) -> None:
        """Process a report of one of its workers."""
        if not self._reported.is_set():
            self._reported.set()

    def needs(
        self,
        prompt: Sequence[int],
        sampling: pb.Sampling,
        cache_salt: str,
        chains: Sequence[Sequence[int]],
        to_score: bool,
        traffic_hash: float = 1.0,
        new: bool = True,
        embeds: bool = False,
        only_fills: bool = False,
        items: Sequence[Item] = (),
    ) -> tuple[Demand, list[BlockKey]]:
        """Return the demand of `chains`, the tokens of each choice, and keys of blocks that may come from elsewhere.

        A worker must be there on which it can start. Raises InvalidRequest for a `new` request that no pool could hold;
        an accepted one stays valid although its workers are gone.
        """
        workers = self.starting_workers(embeds)
        if items and new and not any(worker.hello.reads_media for worker in workers):
            raise InvalidRequest("media", f"no worker of {self.name!r} reads media now")
        hello = _hello_for(workers, traffic_hash)
        largest = max(worker.hello.num_blocks for worker in workers) if new else None
        sizes = hello.block_tokens, hello.block_bytes, largest
        demand = demand_of(prompt, sampling, chains, to_score, *sizes, traffic_hash, embeds, only_fills)
        usable = chains[0][: demand.num_usable_blocks * demand.block_tokens]
        own, *others = (
            block_keys(root_key(version, cache_salt, self.adapter), usable, demand.block_tokens, items)
            for version in self._versions(hello)
        )
        if self.adapter or items:
            own_items = tuple((item.offset, item.end) for item in items if not item.encoder)
            demand = replace(demand, adapter=self.adapter.hex(), has_items=bool(items), own_items=own_items)
        return (replace(demand, other_keys=tuple(map(tuple, others))) if others else demand), own

    def _versions(self, hello: membership_pb2.Hello) -> list[bytes]:
        """Return weights fingerprints: that of `hello`, then those of other versions with blocks of equal length.

        Several versions exist while workers are being replaced.
        """
        others = [
            version
            for version in self._roster().versions.get(hello.block_tokens, ())
            if version != hello.model_fingerprint
        ]
        return [hello.model_fingerprint, *others[: MAX_VERSIONS - 1]]

    def predicted_ttft_s(self, priority: int, demand: Demand, keys: Sequence[BlockKey]) -> float | None:
        """Return the predicted TTFT of a request that arrived now, its wait in the queue included.

        None where no worker could hold it.
        """
        decision = self.fleet.decide(demand, keys)
        if decision is not None:
            ttft_s: float | None = decision.predicted_ttft_s
        else:
            ttft_s = self.fleet.least_ttft_s(demand, keys)
        return None if ttft_s is None else self.dispatcher.expected_wait_s(priority, demand) + ttft_s


@dataclass(frozen=True, slots=True)
class _Roster:
    """Workers of a model that have reported and do not drain, by role."""

    number: int
    """Number of the fleet's changes when it was made."""
    decode: list[Worker]
    prefill: list[Worker]
    versions: dict[int, list[bytes]]
    """Fingerprints of the weights of all workers, in order, by the length of their blocks."""


def _hello_for(workers: Sequence[Worker], traffic_hash: float) -> membership_pb2.Hello:
    """Return the Hello whose version names the blocks: a canary's for requests of canaries, else another worker's.

    Any worker's, where there is none of these.
    """
    share = max(worker.hello.traffic_share for worker in workers)
    return min(workers, key=lambda worker: (worker.hello.traffic_share > 0) != (traffic_hash < share)).hello


class _Adapters:
    """Models that are a LoRA adapter over one of `bases`, as present workers have them."""

    def __init__(self, bases: Sequence[ModelRuntime], names: Collection[str] | None) -> None:
        """Create it; `names` are the visible ones, None: all."""
        self._bases = bases
        self._names = names

    def __iter__(self) -> Iterator[ModelRuntime]:
        names = dict.fromkeys(name for base in self._bases for name in base.fleet.adapters)
        return (adapted for name in names if (adapted := self.get(name)) is not None)

    def get(self, name: str) -> ModelRuntime | None:
        if self._names is not None and name not in self._names:
            return None
        return next((adapted for base in self._bases if (adapted := base.with_adapter(name)) is not None), None)


class ModelRuntimes:
    """Model runtimes of a router, in the order of the configuration."""

    def __init__(self, models: Sequence[ModelRuntime], default_model: str, adapters: "_Adapters | None" = None) -> None:
        """Create them; `default_model` is as in the configuration, already checked.

        `adapters`: the adapters of models that are not among `models`, if they are fewer than all.
        """
        self._models = {model.name: model for model in models}
        self._default = default_model
        self._adapters = _Adapters(models, None) if adapters is None else adapters

    def __iter__(self) -> Iterator[ModelRuntime]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def named(self, name: str) -> ModelRuntime:
        """Return the runtime of a known name."""
        return self._models[name]

    def only(self, names: Collection[str] | None) -> "ModelRuntimes":
        """Return the runtimes that a caller with access to `names` sees; None: all."""
        if names is None:
            return self
        default = self._default if self._default in names or self._default == AUTO else ""
        models = [model for model in self if model.name in names]
        return ModelRuntimes(models, default, _Adapters(list(self), frozenset(names)))

    def listed(self) -> list[ModelRuntime]:
        """Return every model that clients may name: those of the configuration, then adapters of present workers."""
        return [*self, *self._adapters]

    def asked_for(self, name: str) -> tuple[ModelRuntime | None, str]:
        """Return the runtime that a request's `model` means, None for AUTO, and why.

        Raises UnknownModel, or InvalidRequest where the name is empty and there are several models.
        """
        if not self._models and not any(self._adapters):
            raise Forbidden("this key may use none of the models that are served here", "model")
        if name == AUTO:
            return None, AUTO
        if name:
            if name not in self._models:
                if (adapted := self._adapters.get(name)) is not None:
                    return adapted, "named by the request"
                served = f"{self._names()} {'is' if len(self) == 1 else 'are'}"
                raise UnknownModel(f"{name!r} is not served here; {served}", "model")
            return self._models[name], "named by the request"
        if self._default:
            why = f"none was named, and {self._default} is the default"
            return self._models.get(self._default), why
        if len(self) > 1:
            raise InvalidRequest(
                "model", f"is empty, but several models are served: name one of {self._names()}, or {AUTO!r}"
            )
        return next(iter(self)), "the only one served"

    def of_worker(self, hello: membership_pb2.Hello) -> ModelRuntime:
        """Return the runtime that a worker serves; among several with one config and tokenizer, the one of its name.

        Raises Incompatible.
        """
        equal = [model for model in self if model.config_fingerprint == hello.config_fingerprint]
        if len(equal) > 1:
            equal = [model for model in equal if hello.model in (model.name, model.model_dir.name)]
        if equal:
            return equal[0]
        alike = [repr(model.name) for model in self if model.config_fingerprint == hello.config_fingerprint]
        worker = f"worker {hello.worker_id} serves {hello.model!r}"
        if alike:
            reason = f"its config and tokenizer match {' and '.join(alike)}, but its name matches neither"
            raise Incompatible(f"{worker}: {reason}", "model")
        whose = f"this router's {self._names()}" if len(self) == 1 else f"those of all served here: {self._names()}"
        raise Incompatible(f"{worker}, whose config or tokenizer differs from {whose}", "model")

    def _names(self) -> str:
        return ", ".join(map(repr, self._models))
