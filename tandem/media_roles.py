"""Preprocessor and encode workers of a cluster file: their settings, and the addresses that they and routers get.

Pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cluster.errors import StartError
from cluster.settings import LogSettings, TlsSettings
from encode_worker.config import EncoderConfig
from engine.config import WorkerConfig
from engine.vllm_flags import OF_ENCODERS, OF_PREPROCESSORS, only
from preprocessor.config import MediaModel, PreprocessorConfig
from router.config import RouterConfig
from router.models.config import ModelEntry
from tandem.topology import Topology

PREPROCESSOR, ENCODER = "preprocessor", "encoder"
"""Names of the roles, and their keys of a cluster file."""
COMMON = ("engine", "dtype", "vllm_python", *TlsSettings.model_fields, *LogSettings.model_fields)
"""Settings that these roles have from the workers, besides options of vLLM."""
PORTS = ("port", "metrics_port", "health_port")
Settings = TypeVar("Settings", PreprocessorConfig, EncoderConfig)


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
    models = tuple(MediaModel(path=entry.path, name=entry.name) for entry in served)
    values = _defaults(PREPROCESSOR, preprocessor, workers, OF_PREPROCESSORS) | preprocessor | {"models": models}
    encoders = () if encoder is None else _encoders(encoder, served, workers)
    return replace(topology, preprocessor=_parse(PREPROCESSOR, PreprocessorConfig, values), encoders=encoders)


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
    config = _parse(ENCODER, EncoderConfig, values)
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


def _parse(section: str, settings: type[Settings], values: dict[str, Any]) -> Settings:
    try:
        return settings.parse(values)
    except StartError as error:
        raise StartError(f"{section}.{error.field}", error.reason) from None
