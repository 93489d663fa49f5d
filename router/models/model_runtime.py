"""All that belongs to one served model; of these a router has one or several, by name."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.errors import Forbidden, Incompatible, InvalidRequest, StartError, Unavailable, UnknownModel
from cluster.tls import TlsIdentity
from engine.kv.block_keys import BlockKey, block_keys, root_key
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from protos import membership_pb2
from router.admission.dispatcher import Dispatcher
from router.models.config import AUTO, ModelEntry, ModelsConfig
from router.models.costs import Costs
from router.models.grammar_checker import GrammarChecker
from router.models.prompts import PromptEncoder
from router.placement.demand import Demand
from router.placement.fleet import Fleet
from router.placement.worker_records import Worker
from router.decode_client.decode_streams import DecodeStreams
from router.placement.request_demand import demand_of

log = logging.getLogger(__name__)

MAX_VERSIONS = 4
"""Of a model's weights, whose caches are known to a request: a prompt's keys are hashed for each."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is read of a model before anything serves it."""

    entry: ModelEntry
    model_dir: ModelDir
    encoder: PromptEncoder
    config_fingerprint: bytes

    @classmethod
    def read(cls, entry: ModelEntry) -> "ModelFiles":
        """Raises StartError."""
        model_dir = ModelDir.open(entry.path)
        # Read here, so that a config that lacks them is refused now and not with the first request.
        size, context = model_dir.vocab_size, model_dir.max_context_tokens
        log.info("%s: %d tokens, context %d", entry.name or model_dir.name, size, context)
        return cls(entry, model_dir, PromptEncoder(model_dir), model_dir.config_fingerprint())

    @property
    def name(self) -> str:
        return self.entry.name or self.model_dir.name


def read_models(config: ModelsConfig) -> list[ModelFiles]:
    """In order. Raises StartError for what is no model, and for two that could not be told apart."""
    models = [ModelFiles.read(entry) for entry in config.entries]
    for number, model in enumerate(models):
        where = f"models.{number}.name"
        if model.name == AUTO:
            raise StartError(where, f"{model.entry.path}: {AUTO!r} is what clients say to have their model chosen")
        for other in models[:number]:
            paths = f"{other.entry.path} and {model.entry.path}"
            if other.name == model.name:
                raise StartError(where, f"{paths} would both be called {model.name!r}")
            same_names = {other.name, other.model_dir.name} & {model.name, model.model_dir.name}
            if other.config_fingerprint == model.config_fingerprint and same_names:
                raise StartError(where, f"nobody could say which of {paths} a worker has: config and names are equal")
    names = [model.name for model in models]
    if config.default_model not in ("", AUTO, *names):
        raise StartError("default_model", f"{config.default_model!r} is not among {', '.join(names)}, {AUTO}")
    for number, rule in enumerate(config.model_rules):
        for name in rule.models:
            if name not in names:
                raise StartError(f"model_rules.{number}.models", f"{name!r} is not among {', '.join(names)}")
    return models


class ModelRuntime:
    """Its files, its workers, and what waits for them. Failover stays within it."""

    def __init__(
        self,
        files: ModelFiles,
        fleet: Fleet,
        dispatcher: Dispatcher,
        grammar_limit_s: float,
        trust: TlsIdentity | None = None,
    ) -> None:
        self.name = files.name
        self.entry = files.entry
        self.model_dir = files.model_dir
        self.encoder = files.encoder
        self.config_fingerprint = files.config_fingerprint
        self.fleet = fleet
        self.dispatcher = dispatcher
        self.grammars = GrammarChecker(files.model_dir, grammar_limit_s)
        self.links = DecodeStreams(fleet, trust)
        self.costs = Costs(files.entry)
        self._heard = asyncio.Event()
        """Set when a decode worker has reported, for those who wait for a first one."""

    async def close(self) -> None:
        await self.grammars.close()

    def decode_workers(self) -> list[Worker]:
        """Those whose engine has reported: one that hangs may join again and again, and say no more than Hello."""
        workers = self.fleet.workers
        return [worker for worker in workers if worker.decodes and worker.load is not None and not worker.draining]

    async def await_decode_workers(self, give_up_at: float) -> None:
        """Until there is one. Raises Unavailable at `give_up_at`, of the monotonic clock."""
        while not self.decode_workers():
            self._heard.clear()
            try:
                async with asyncio.timeout(give_up_at - time.monotonic()):
                    await self._heard.wait()
            except TimeoutError:
                raise Unavailable(f"no decode worker of {self.name!r} has joined") from None

    def heard(self) -> None:
        """A worker of it has reported."""
        if not self._heard.is_set() and self.decode_workers():
            self._heard.set()

    def needs(
        self,
        prompt: Sequence[int],
        sampling: pb.Sampling,
        cache_salt: str,
        chains: Sequence[Sequence[int]],
        to_score: bool,
        traffic_hash: float = 1.0,
        new: bool = True,
    ) -> tuple[Demand, list[BlockKey]]:
        """What `chains`, the tokens there are of each choice, take; and the keys of the blocks that may come from
        elsewhere. A decode worker must be there. Raises InvalidRequest for what no pool could hold; unless it is not
        `new`: it was right then, and what it went to is gone."""
        workers = self.decode_workers()
        hello = _hello_for(workers, traffic_hash)
        largest = max(worker.hello.num_blocks for worker in workers) if new else None
        demand = demand_of(
            prompt, sampling, chains, to_score, hello.block_tokens, hello.block_bytes, largest, traffic_hash
        )
        usable = chains[0][: demand.num_usable_blocks * demand.block_tokens]
        own, *others = (
            block_keys(root_key(version, cache_salt), usable, demand.block_tokens) for version in self._versions(hello)
        )
        return (replace(demand, other_keys=tuple(map(tuple, others))) if others else demand), own

    def _versions(self, hello: membership_pb2.Hello) -> list[bytes]:
        """Fingerprints of weights: first its own, then those of others there whose blocks are as long, such as there
        are while workers are replaced."""
        there = {
            worker.hello.model_fingerprint
            for worker in self.fleet.workers
            if worker.hello.block_tokens == hello.block_tokens
        }
        return [hello.model_fingerprint, *sorted(there - {hello.model_fingerprint})[: MAX_VERSIONS - 1]]

    def predicted_ttft_s(self, priority: int, demand: Demand, keys: Sequence[BlockKey]) -> float | None:
        """Of a request that came now: the wait behind what is queued, and placement's own prediction. None where no
        worker could hold it."""
        decision = self.fleet.decide(demand, keys)
        if decision is not None:
            ttft_s: float | None = decision.predicted_ttft_s
        else:
            ttft_s = self.fleet.least_ttft_s(demand, keys)
        return None if ttft_s is None else self.dispatcher.expected_wait_s(priority, demand) + ttft_s


def _hello_for(workers: Sequence[Worker], traffic_hash: float) -> membership_pb2.Hello:
    """Keys name blocks of one version's weights: a canary's for what is drawn for canaries, else the others'; where
    there is none of these, any."""
    share = max(worker.hello.traffic_share for worker in workers)
    return min(workers, key=lambda worker: (worker.hello.traffic_share > 0) != (traffic_hash < share)).hello


class ModelRuntimes:
    """In the order of the configuration."""

    def __init__(self, models: Sequence[ModelRuntime], default_model: str) -> None:
        """`default_model` as in the configuration, and checked."""
        self._models = {model.name: model for model in models}
        self._default = default_model

    def __iter__(self) -> Iterator[ModelRuntime]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def named(self, name: str) -> ModelRuntime:
        """Which must be one of these."""
        return self._models[name]

    def only(self, names: Collection[str] | None) -> "ModelRuntimes":
        """What somebody sees who may use those only; None: all."""
        if names is None:
            return self
        default = self._default if self._default in names or self._default == AUTO else ""
        return ModelRuntimes([model for model in self if model.name in names], default)

    def asked_for(self, name: str) -> tuple[ModelRuntime | None, str]:
        """The one that a request's `model` means, None for AUTO; and why, in words. Raises UnknownModel, or
        InvalidRequest where it says nothing and there are several."""
        if not self._models:
            raise Forbidden("this key may use none of the models that are served here", "model")
        if name == AUTO:
            return None, AUTO
        if name:
            if name not in self._models:
                served = f"{self._names()} {'is' if len(self) == 1 else 'are'}"
                raise UnknownModel(f"{name!r} is not served here; {served}", "model")
            return self._models[name], "named by the request"
        if self._default:
            why = f"none was named, and {self._default} is the default"
            return self._models.get(self._default), why
        if len(self) > 1:
            raise InvalidRequest("model", f"is empty, and several are served: {self._names()}; or say {AUTO!r}")
        return next(iter(self)), "the only one served"

    def of_worker(self, hello: membership_pb2.Hello) -> ModelRuntime:
        """The one that it serves: of several of one config and tokenizer, that of its name. Raises Incompatible."""
        equal = [model for model in self if model.config_fingerprint == hello.config_fingerprint]
        if len(equal) > 1:
            equal = [model for model in equal if hello.model in (model.name, model.model_dir.name)]
        if equal:
            return equal[0]
        alike = [repr(model.name) for model in self if model.config_fingerprint == hello.config_fingerprint]
        worker = f"worker {hello.worker_id} serves {hello.model!r}"
        if alike:
            said = f"config and tokenizer are those of {' and '.join(alike)}, but its name is neither's"
            raise Incompatible(f"{worker}: {said}", "model")
        whose = f"this router's {self._names()}" if len(self) == 1 else f"those of all served here: {self._names()}"
        raise Incompatible(f"{worker}, whose config or tokenizer differs from {whose}", "model")

    def _names(self) -> str:
        return ", ".join(map(repr, self._models))
