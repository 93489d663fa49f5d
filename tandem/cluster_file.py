"""The cluster file of `tandem up`: settings of all workers and routers, and the models with their workers.

models:
  - {path: models/small, input_price: 0.1, output_price: 0.3, quality: 0.4}
  - {path: models/large, input_price: 1.0, output_price: 3.0, quality: 0.9, prefill: 2, worker: {kv_memory_mib: 768}}
fleet: fleet.yaml
router: {default_model: auto, model_rules: [{max_prompt_tokens: 200, models: [small]}]}
worker: {kv_memory_mib: 512}
preprocessor: {}
encoder: {replicas: 2}
ray: {strategy: SPREAD, decode: {num_gpus: 1}}
planner: {prefill: {max_workers: 4}, decode: {max_workers: 8}, switch: true}

Preprocessor and encode workers of a cluster file: their settings, and the addresses that they and routers get.
"""

import asyncio
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from batches.storage.disk import Disk, check_folder
from cluster.config import read_file, unknown_key
from cluster.errors import StartError
from cluster.settings import LogSettings, TlsSettings
from encode_worker.config import EncoderConfig
from engine.config import WorkerConfig
from engine.engine_kind import kind_of
from engine.errors import EngineStartError
from engine.model.hub import absolute, model_name
from engine.vllm_flags import OF_ENCODERS, OF_PREPROCESSORS, only
from preprocessor.config import PreprocessorConfig
from router.config import RouterConfig
from router.models.config import ModelEntry, ModelsConfig
from router.models.model_files import fetch_models, read_models
from tandem.topology import ClusterModel, FindsCores, Topology, plan_models, plan_topology

PREPROCESSOR, ENCODER = "preprocessor", "encoder"
"""Names of the roles, and their keys of a cluster file."""
COMMON = ("engine", "dtype", "vllm_python", *TlsSettings.model_fields, *LogSettings.model_fields)
"""RoleSettings that these roles have from the workers, besides options of vLLM."""
PORTS = ("port", "metrics_port", "health_port")
RoleSettings = TypeVar("RoleSettings", PreprocessorConfig, EncoderConfig)


def plan_media(
    topology: Topology, preprocessor: dict[str, Any] | None, encoder: dict[str, Any] | None = None
) -> Topology:
    """Return the topology with these roles. They have the settings of the models' workers where they set nothing else.

    Raises StartError naming the key of the cluster file.
    """
    if preprocessor is None:
        if encoder is not None:
            raise StartError(ENCODER, "needs the key `preprocessor` beside it, whose items name their encode workers")
        return topology
    served = [entry for entry in topology.router.entries if _is_ours(entry)]
    if not served:
        raise StartError(PREPROCESSOR, "no model is left for it: each names its own, or none, in `preprocessor`")
    workers = [_worker_of(entry, topology) for entry in served]
    _refuse(PREPROCESSOR, preprocessor, ("model", "models", *(("encoders",) if encoder is not None else ())))
    models = {entry.name or model_name(entry.path): entry.path for entry in served}
    values = _defaults(PREPROCESSOR, preprocessor, workers, OF_PREPROCESSORS) | preprocessor | {"models": models}
    encoders = () if encoder is None else _encoders(encoder, served, workers)
    return replace(topology, preprocessor=_role_settings(PREPROCESSOR, PreprocessorConfig, values), encoders=encoders)


def with_preprocessor(routers: Sequence[RouterConfig], address: str) -> tuple[RouterConfig, ...]:
    """Return settings of routers whose models have this preprocessor, but for those that set `preprocessor`."""
    return tuple(
        config.model_copy(
            update={
                "model": None,
                "models": tuple(
                    entry.model_copy(update={"preprocessor": address}) if _is_ours(entry) else entry
                    for entry in config.entries
                ),
            }
        )
        for config in routers
    )


def encoder_name(number: int) -> str:
    """Return the name of an encode worker."""
    return f"{ENCODER}-{number}"


def _is_ours(entry: ModelEntry) -> bool:
    """Return whether the cluster's own preprocessor is for this model; an empty one means a model of text."""
    return "preprocessor" not in entry.model_fields_set


def _worker_of(entry: ModelEntry, topology: Topology) -> WorkerConfig:
    """Return settings of a worker of the model, or of another one's where it has none yet."""
    workers = (*topology.decode, *topology.prefill)
    return next((worker for worker in workers if worker.model == entry.path), workers[0])


def _encoders(
    settings: dict[str, Any], served: Sequence[ModelEntry], workers: Sequence[WorkerConfig]
) -> tuple[EncoderConfig, ...]:
    if len(served) > 1:
        reason = f"encode workers are for one model, and the preprocessor has {len(served)}: set preprocessor: '' for"
        raise StartError(ENCODER, f"{reason} those that read text only, or start encode workers by themselves")
    _refuse(ENCODER, settings, ("model",))
    values = _defaults(ENCODER, settings, workers, OF_ENCODERS) | settings | {"model": served[0].path}
    replicas = values.pop("replicas", 1)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise StartError(f"{ENCODER}.replicas", f"must be a number from 1, not {replicas!r}")
    config = _role_settings(ENCODER, EncoderConfig, values)
    ports = {name: port for name in PORTS if (port := getattr(config, name))}
    return tuple(
        config.model_copy(update={name: port + number for name, port in ports.items()}) for number in range(replicas)
    )


def _refuse(section: str, settings: dict[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if key in settings:
            raise StartError(f"{section}.{key}", "comes from the other keys of this file: leave it out")


def _defaults(
    section: str, settings: dict[str, Any], workers: Sequence[WorkerConfig], options: Collection[str]
) -> dict[str, Any]:
    """Return the settings that the models' workers share, and a port that the system chooses.

    Raises StartError for a setting in which they differ, unless `settings` has it.
    """
    first, *others = (_of_worker(worker, options) for worker in workers)
    for key in first.keys() | {key for each in others for key in each}:
        if key not in settings and any(each.get(key) != first.get(key) for each in others):
            raise StartError(f"{section}.{key}", "workers of several models differ in it: set it here")
    return {"port": 0} | first


def _of_worker(worker: WorkerConfig, options: Collection[str]) -> dict[str, Any]:
    """Return the settings of a worker that these roles have too."""
    values = {name: getattr(worker, name) for name in COMMON if name in worker.model_fields_set}
    passed = {name: value for name, value in worker.vllm_options.items() if name in options}
    flags = only(worker.vllm_args, options)
    return (
        {"engine": worker.engine}
        | values
        | ({"vllm_options": passed} if passed else {})
        | ({"vllm_args": flags} if flags else {})
    )


def _role_settings(section: str, settings: type[RoleSettings], values: dict[str, Any]) -> RoleSettings:
    try:
        return settings.parse(values)
    except StartError as error:
        raise StartError(f"{section}.{error.field}", error.reason) from None


KEYS = ("models", "fleet", "router", "worker", "preprocessor", "encoder", "ray", "planner")
OPTIONAL = ("preprocessor", "encoder")
"""Keys of roles that start only where the file has them."""
HTTP_PORT = 8000
"""Default HTTP port of the first router."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings as the file has them, checked by their users."""

    router: dict[str, Any]
    worker: dict[str, Any]
    models: list[dict[str, Any]]
    ray: dict[str, Any] = field(default_factory=dict)
    planner: dict[str, Any] = field(default_factory=dict)
    preprocessor: dict[str, Any] | None = None
    encoder: dict[str, Any] | None = None


def read_settings(file: Path | None) -> Settings:
    """Read the file.

    Raises StartError for an unknown key, or one of the wrong kind.
    """
    values = read_file(file)
    for key, value in values.items():
        if key not in KEYS:
            raise StartError(key, unknown_key(str(key), KEYS))
        if key == "models":
            if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
                raise StartError(key, "must be a list of mappings, one at least")
        elif not isinstance(value, dict) and key != "fleet":
            raise StartError(key, "must be a mapping")
    mappings: dict[str, Any] = {
        key: values.get(key, None if key in OPTIONAL else {}) for key in KEYS if key not in ("models", "fleet")
    }
    if "fleet" in values:  # stock servers beside the workers
        mappings["router"] = {"fleet": values["fleet"]} | mappings["router"]
    return Settings(models=values.get("models", []), **mappings)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster to start."""

    models: tuple[ClusterModel, ...]
    settings: Settings

    def plan(
        self,
        router: dict[str, Any],
        worker: dict[str, Any],
        cores: Sequence[int],
        num_routers: int,
        finds_cores: FindsCores = lambda _: False,
    ) -> Topology:
        """Plan the cluster with settings that override the file's.

        Raises StartError.
        """
        if self.settings.models:
            routers, workers = self.settings.router | router, self.settings.worker | worker
            topology = plan_models(self.models, routers, workers, cores, num_routers, finds_cores)
            return plan_media(topology, self.settings.preprocessor, self.settings.encoder)
        (only,) = self.models
        one = {"model": only.path}
        routers, workers = self.settings.router | one | router, self.settings.worker | one | worker
        topology = plan_topology(only.prefill, only.decode, routers, workers, cores, num_routers, finds_cores)
        return plan_media(topology, self.settings.preprocessor, self.settings.encoder)

    def default_engine(self, worker: dict[str, Any], num_gpus: int) -> dict[str, Any]:
        """Return the engine where no setting names one, `worker` among them: vllm on a machine with GPUs.

        Empty for the default of all workers. Raises StartError where vLLM is not installed.
        """
        settings = self.settings.worker | worker
        if not num_gpus or "engine" in settings or all("engine" in model.worker for model in self.models):
            return {}
        kind = kind_of("vllm")
        chosen = {name: settings[name] for name in ("vllm_python",) if name in settings} | {"engine": kind.name}
        try:
            kind.launch(WorkerConfig.parse({"model": self.models[0].path} | chosen))
        except EngineStartError as error:
            assert kind.installation.environment is not None
            advice = f"{kind.installation.environment.advice}; or set engine: torch, which computes on CPUs"
            raise StartError("engine", f"vllm is the default on a machine with GPUs, but {error}: {advice}") from None
        return {"engine": kind.name}

    def http_settings(self, port: int | None, off: bool) -> dict[str, Any]:
        """Return the HTTP port setting of every router: the command line's, else the file's, else the default."""
        if off:
            return {"http_port": None}
        if port is None and "http_port" in self.settings.router:
            return {}
        return {"http_port": HTTP_PORT if port is None else port}

    def with_files_folder(self, router: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return settings of the routers with a folder for files and batches, and why there is none, if so.

        A folder that the settings name stays. Otherwise it is `batches_folder` of this cluster, by name and port,
        in $XDG_STATE_HOME or ~/.local/state.
        """
        settings = self.settings.router | router
        if "batches_folder" in settings or settings.get("http_port") is None:
            return router, ""
        base = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
        known_by = [settings.get(name, RouterConfig.model_fields[name].default) for name in ("cluster_name", "port")]
        folder = base / "tandem" / "-".join(map(str, known_by)) / "batches"
        try:
            check_folder(folder, Disk())
        except StartError as error:
            return router, error.reason
        return router | {"batches_folder": folder}, ""

    def check(self) -> None:
        """Check that the models can be fetched, read and told apart, as a router does.

        Raises StartError.
        """
        settings = self.settings.router
        choice = {key: value for key, value in settings.items() if key in ModelsConfig.model_fields and key != "model"}
        config = ModelsConfig.parse(choice | {"models": [model.entry for model in self.models]})
        read_models(config, asyncio.run(fetch_models(config)))


def read_cluster(file: Path | None, model: Path | None, prefill: int, decode: int) -> Cluster:
    """Return the cluster of the models in `file`, or of the one `model`.

    Raises StartError.
    """
    settings = read_settings(file)
    if (model is None) == (not settings.models):
        raise StartError(
            "model", "name one directory or repository, or list several as `models:` in the file of --config"
        )
    if model is not None:
        one = {"path": absolute(model), "prefill": prefill, "decode": decode}
        return Cluster((_parse(0, one),), settings)
    return Cluster(tuple(_parse(number, entry) for number, entry in enumerate(settings.models)), settings)


def _parse(number: int, entry: dict[str, Any]) -> ClusterModel:
    try:
        parsed = ClusterModel.parse(entry)
    except StartError as error:
        raise StartError(f"models.{number}.{error.field}", error.reason) from None
    return parsed.model_copy(update={"path": absolute(parsed.path)})
