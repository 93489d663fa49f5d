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
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.config import read_file, unknown_key
from cluster.errors import StartError
from engine.config import WorkerConfig
from engine.engine_kind import kind_of
from engine.errors import EngineStartError
from engine.model.hub import absolute
from router.batches.service import check_folder
from router.batches.storage.disk import Disk
from router.config import RouterConfig
from router.models.config import ModelsConfig
from router.models.model_files import fetch_models, read_models
from tandem.media_roles import plan_media
from tandem.topology import ClusterModel, FindsCores, Topology, plan_models, plan_topology

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
