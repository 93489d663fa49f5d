"""Topology of a cluster: numbers of routers and workers, and the CPU cores of each engine.

Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, NonNegativeInt

from cluster.errors import StartError
from cluster.roles import ROLES, Role
from encode_worker.config import EncoderConfig
from engine.config import WorkerConfig
from engine.host.cores import CoreShare, share_cores
from engine.model.hub import model_name
from engine.vllm_flags import without_router_flags
from preprocessor.config import PreprocessorConfig
from router.config import RouterConfig
from router.models.config import ModelEntry

FindsCores = Callable[[WorkerConfig], bool]
"""Function that tells whether an engine with these settings finds its cores itself."""
TOLD_NOTHING: dict[str, Any] = {"cores": None, "shared_cores": (), "niceness": 0}
"""Settings of a worker that finds its cores itself."""
MODULES = {"prefill": "prefill_worker", "decode": "decode_worker"}


@dataclass(frozen=True, slots=True)
class Topology:
    """Routers, workers of both roles, and the roles that make pictures ready, on this machine."""

    routers: tuple[RouterConfig, ...]
    prefill: tuple[WorkerConfig, ...]
    decode: tuple[WorkerConfig, ...]
    preprocessor: PreprocessorConfig | None = None
    """The preprocessor, which gets the encode workers' addresses when they are known."""
    encoders: tuple[EncoderConfig, ...] = ()
    """Encode workers."""

    @property
    def router(self) -> RouterConfig:
        """The first router."""
        return self.routers[0]

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models."""
        names = (entry.name or model_name(entry.path) for entry in self.router.entries)
        return tuple(names)

    @property
    def num_workers(self) -> int:
        return len(self.prefill) + len(self.decode)

    def workers(self) -> list[tuple[str, WorkerConfig]]:
        """Return each worker's module and configuration, decode workers first, because serving needs one."""
        decode = [(MODULES["decode"], config) for config in self.decode]
        return decode + [(MODULES["prefill"], config) for config in self.prefill]


class ClusterModel(ModelEntry):
    """One model in a cluster file: the router's settings for it, and its workers."""

    prefill: NonNegativeInt = 1
    """Number of prefill workers."""
    decode: NonNegativeInt = 1
    """Number of decode workers; with 0 the model is served once one has joined."""
    worker: dict[str, Any] = Field(default_factory=dict)
    """Settings of its workers, besides those of all workers."""

    @property
    def entry(self) -> ModelEntry:
        """Settings of the model for the router."""
        return ModelEntry(**self.model_dump(include=set(ModelEntry.model_fields), exclude_unset=True))

    @property
    def known_as(self) -> str:
        return self.name or model_name(self.path)

    def workers(self, role: str, several: bool) -> list[str]:
        """Return the ids of its workers."""
        prefix = f"{self.known_as}-" if several else ""
        return [f"{prefix}{role}-{number}" for number in range(self.prefill if role == "prefill" else self.decode)]


def plan_topology(
    num_prefill: int,
    num_decode: int,
    router: dict[str, Any],
    worker: dict[str, Any],
    cores: Sequence[int],
    num_routers: int = 1,
    finds_cores: FindsCores = lambda _: False,
) -> Topology:
    """Plan a cluster of one model.

    Raises StartError.

    `router` and `worker` are settings as in their configurations. Each worker gets its id, and its cores unless
    `finds_cores`. Each of several routers gets its id and ports: the given ones and those after them, or the system's
    choice.
    """
    if num_decode < 1:
        raise StartError("decode", f"at least one decode worker is needed, not {num_decode}")
    if num_prefill < 0:
        raise StartError("prefill", f"must be at least 0, not {num_prefill}")
    model = ClusterModel.parse({"path": worker["model"], "prefill": num_prefill, "decode": num_decode})
    (served,), worker = _by_flags([model], worker)
    if served.entry != model.entry:
        router = {name: value for name, value in router.items() if name != "model"} | {"models": [served.entry]}
    return _plan([served], router, worker, cores, num_routers, finds_cores)


def plan_models(
    models: Sequence[ClusterModel],
    router: dict[str, Any],
    worker: dict[str, Any],
    cores: Sequence[int],
    num_routers: int = 1,
    finds_cores: FindsCores = lambda _: False,
) -> Topology:
    """Plan a cluster of several models, whose workers are named after them; else like `plan_topology`."""
    if "model" in router or "models" in router:
        raise StartError("router", "must not name models: the router serves those of the cluster")
    models, worker = _by_flags(models, worker)
    entries = [model.entry for model in models]
    return _plan(models, router | {"models": entries}, worker, cores, num_routers, finds_cores)


def _by_flags(models: Sequence[ClusterModel], worker: dict[str, Any]) -> tuple[list[ClusterModel], dict[str, Any]]:
    """Return the models with the router's settings that `vllm_args` has, and the workers' settings without them.

    Raises StartError for flags that contradict the settings of a model.
    """
    common, for_all = _without_router_flags(worker)
    served = []
    for model in models:
        own, for_it = _without_router_flags(model.worker)
        changes = for_it if "vllm_args" in model.worker else for_all
        for name, value in changes.items():
            if name in model.model_fields_set and getattr(model, name) != value:
                raise StartError("vllm_args", f"{value} differs from {name} of the model: set one of them")
        served.append(model.model_copy(update={"worker": own, **changes}))
    return served, common


def _without_router_flags(worker: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    text = worker.get("vllm_args")
    if not isinstance(text, str):
        return worker, {}
    rest, settings = without_router_flags(text)
    return worker | {"vllm_args": rest}, settings


def _plan(
    models: Sequence[ClusterModel],
    router: dict[str, Any],
    worker: dict[str, Any],
    cores: Sequence[int],
    routers: int,
    finds_cores: FindsCores,
) -> Topology:
    if not any(model.decode for model in models):
        raise StartError("models", "at least one decode worker is needed")
    if routers < 1:
        raise StartError("routers", f"at least one router is needed, not {routers}")
    several = len(models) > 1
    named = [
        [(name, number, model) for model in models for number, name in enumerate(model.workers(role, several))]
        for role in ROLES
    ]
    num_prefill = len(named[0])
    roles: list[Role] = [role for role, names in zip(ROLES, named, strict=True) for _ in names]
    shares = share_cores(cores, roles)
    workers: list[WorkerConfig] = []
    num_groups = 0
    for role, (name, number, model), share in zip(roles, [*named[0], *named[1]], shares, strict=True):
        settings = {"worker_id": name} | worker | {"model": model.path} | model.worker
        config = WorkerConfig.parse(settings)
        if config.data_parallel > 1:
            settings |= _in_group(config, number, num_groups)
            num_groups += settings["data_parallel_rank"] == config.data_parallel - 1
            _check_groups(config, role, model)
            config = WorkerConfig.parse(settings)
        workers.append(config if finds_cores(config) else WorkerConfig.parse(_on(share) | settings))
    return Topology(_routers(router, routers), tuple(workers[:num_prefill]), tuple(workers[num_prefill:]))


def _in_group(config: WorkerConfig, number: int, group: int) -> dict[str, Any]:
    """Return the rank of worker `number` of its pool, and the port of its group, of which so many are before it."""
    return {
        "data_parallel_rank": number % config.data_parallel,
        "data_parallel_port": config.data_parallel_port + group,
    }


def _check_groups(config: WorkerConfig, role: Role, model: ClusterModel) -> None:
    """Raise StartError unless a pool is made of whole groups, each worker a process of its own."""
    count, size = model.prefill if role == "prefill" else model.decode, config.data_parallel
    if count % size:
        raise StartError(role, f"{count} workers are no whole groups of data_parallel, {size}")
    if config.data_parallel_local > 1:
        raise StartError("data_parallel_local", f"here each worker is started by itself: {role} counts all of them")


def _on(share: CoreShare) -> dict[str, Any]:
    return {"cores": share.own, "shared_cores": share.shared, "niceness": share.niceness}


def _routers(router: dict[str, Any], num_routers: int) -> tuple[RouterConfig, ...]:
    first = RouterConfig.parse(router)
    if first.guarded and first.internal_port is None:
        router = router | {"internal_port": 0}
        first = RouterConfig.parse(router)
    if num_routers == 1:
        return (first,)
    name = first.router_id or "router"
    step = 0 if first.http_port_shared else 1
    return tuple(
        RouterConfig.parse(
            router
            | {"router_id": f"{name}-{number}", "port": first.port + number if first.port else 0}
            | {"http_port": first.http_port + number * step if first.http_port else first.http_port}
            | {"internal_port": first.internal_port + number if first.internal_port else first.internal_port}
            | {"metrics_port": first.metrics_port + number if first.metrics_port else first.metrics_port}
        )
        for number in range(num_routers)
    )
