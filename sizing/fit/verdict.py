"""A verdict on each pool of a chart's values: it fits, it does not and why, or what is unknown.

Pools of a chart's values file: settings of their workers, and the device that each worker gets.

Merged as `helm/tandem/templates/workers.yaml` merges them: a pool's values over those of `worker`, a canary's over its
pool's. The devices come from `nodeSelector["nvidia.com/gpu.product"]`, or from `resources.limits.memory`.

The nearest change of a worker after which it fits, found by the same check.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from cluster.errors import StartError
from cluster.roles import ROLES, Role
from engine.engine_kind import EngineKind, kind_of
from engine.settings import DEFAULT_ENGINE
from kvtransfer.ranks import MAX_RANKS
from sizing.fit.memory import (
    MIB,
    Device,
    Fit,
    PlannedWorker,
    Unchecked,
    check,
    full_context_bytes,
    gb,
    gpus_of,
)
from sizing.gpus import GPUS, HOST_GPUS
from sizing.models.known_models import NAMES, known_shape
from sizing.models.model_shape import ModelShape
from workloads.request import BadSetup, shown

GIB = 1 << 30
TIERS = {"kv_host_memory_mib": 0, "kv_disk_dir": None}
"""Settings that some engines refuse, and without which a worker only has fewer cached blocks."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a worker's settings, of its device, or of both."""

    settings: dict[str, Any] = field(default_factory=dict)
    device: Device | None = None

    def of(self, worker: PlannedWorker) -> PlannedWorker:
        """Return the changed worker; where it has GPUs, its pod has one for each rank there."""
        changed = replace(worker.with_settings(**self.settings), device=self.device or worker.device)
        with contextlib.suppress(StartError):  # settings that `check` reports
            return replace(changed, gpus=gpus_of(changed.config()) if worker.gpus else 0)
        return changed

    def __or__(self, other: "Change") -> "Change":
        return Change({**self.settings, **other.settings}, other.device or self.device)

    def in_words(self) -> str:
        words = [f"{name}: {_written(value)}" for name, value in self.settings.items()]
        if self.device is not None and self.device.is_gpu:
            words.append(f"{self.device.name} ({gb(self.device.memory_bytes)})")
        elif self.device is not None:
            words.append(f"{self.device.name}: {math.ceil(self.device.memory_bytes / GIB)}Gi")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change that fits, and the check that says so."""

    change: Change
    fit: Fit

    def in_words(self) -> str:
        assert self.fit.need is not None
        words = [self.change.in_words()] if self.change != Change() else []
        if self.fit.worker.gpus > 1 or not words:
            words.append(f"gpus: {self.fit.worker.gpus}")
        memory = gb(self.fit.worker.device.memory_bytes)
        return f"{', '.join(words)} ({self.fit.need.in_words()} of {memory})"


def nearest(worker: PlannedWorker) -> Proposal | None:
    """Return the first change that fits, from the nearest to the farthest; None: none does.

    An engine for CPUs only gives way to vllm where the pod has GPUs, or the model is saved quantised.

    The order: as many GPUs as ranks; another size of the KV pool, at least one full context; more ranks; narrower
    weights; a larger device; then each of the latter with another size of the KV pool; then pairs of them. Tiers below
    the pool are dropped where the rest does not allow them.
    """
    try:
        kind = worker.kind
    except StartError:
        return None  # the engine is not installed here, whatever the other settings
    base = Change()
    is_quantised = worker.shape is not None and worker.shape.layer_bits is not None
    if kind.memory.needs_shape and not kind.may_use_gpu and (worker.gpus or is_quantised):
        base = Change({"engine": "vllm"})
        worker = base.of(worker)
        kind = worker.kind
    for change in chain([Change()], _changes(worker, kind)):
        with contextlib.suppress(Unchecked):
            fit = check(change.of(worker))
            if fit.fits:
                return Proposal(base | change, fit)
    return None


def _changes(worker: PlannedWorker, kind: EngineKind[Any]) -> Iterator[Change]:
    ranks, weights, devices = list(_more_ranks(worker, kind)), list(_narrower(worker)), list(_larger(worker))
    singles = [*ranks, *weights, *devices]
    for change in (Change(), *singles):
        if change.settings or change.device:
            yield from _without_tiers(worker, change)
        else:
            yield from _resized(worker, change)
            yield from _dropped_tiers(worker, change)
    for change in singles:
        yield from _resized(worker, change)
    for larger in (Change(), *devices):
        pairs = [one | other for one in ranks for other in (Change(), *weights)] + weights
        for pair in pairs if larger.device else [one | other for one in ranks for other in weights]:
            yield from _without_tiers(worker, pair | larger)
            yield from _resized(worker, pair | larger)


def _resized(worker: PlannedWorker, change: Change) -> Iterator[Change]:
    """Yield the change with the largest KV pool that fits, if that holds a full context."""
    if worker.kv_auto:
        return
    for base in _without_tiers(worker, change):
        with contextlib.suppress(Unchecked, StartError):
            smallest = check((base | Change({"kv_memory_mib": 1})).of(worker))
            config = smallest.worker.config()
            devices = config.num_ranks if worker.device.is_gpu else 1
            largest_mib = 1 + math.floor(smallest.left * devices / MIB)
            if largest_mib * MIB >= full_context_bytes(worker.shape, config, smallest.worker.device):
                yield base | Change({"kv_memory_mib": largest_mib})


def _without_tiers(worker: PlannedWorker, change: Change) -> Iterator[Change]:
    yield change
    yield from _dropped_tiers(worker, change)


def _dropped_tiers(worker: PlannedWorker, change: Change) -> Iterator[Change]:
    """Yield the change without tiers below the pool, where the worker has any."""
    if dropped := {name: value for name, value in TIERS.items() if worker.settings.get(name)}:
        yield change | Change(dropped)


def _more_ranks(worker: PlannedWorker, kind: EngineKind[Any]) -> Iterator[Change]:
    """Yield more tensor-parallel ranks, or fewer where the present number does not divide the model's KV heads.

    A worker with stages that needs more than a host's GPUs gets pipeline stages, one on each of several hosts.
    """
    now = worker.settings.get("tensor_parallel", 1)
    if not worker.device.is_gpu or worker.shape is None or not isinstance(now, int):
        return
    counts = [count for count in range(1, MAX_RANKS + 1) if worker.shape.kv_heads % count == 0]
    above, below = [each for each in counts if each > now], [each for each in counts if each < now]
    stages = []
    if "pipeline_parallel" not in kind.refused_settings and HOST_GPUS in counts:
        above = [count for count in above if count <= HOST_GPUS]
        stages = [hosts for hosts in (2, 4, 8) if hosts > worker.settings.get("pipeline_parallel", 1)]
    yield from (Change({"tensor_parallel": count}) for count in above)
    yield from (Change({"tensor_parallel": HOST_GPUS, "pipeline_parallel": n, "nodes": n}) for n in stages)
    if now not in counts:
        yield from (Change({"tensor_parallel": count}) for count in reversed(below))


def _narrower(worker: PlannedWorker) -> Iterator[Change]:
    """Yield fp8 at load, of a model that is not saved quantised."""
    if worker.shape is None or worker.shape.layer_bits is not None:
        return
    with contextlib.suppress(StartError):  # settings that `check` reports
        config = worker.config()
        if settings := config.kind.memory.narrowed(config):
            yield Change(settings)


def _larger(worker: PlannedWorker) -> Iterator[Change]:
    """Yield GPUs of the list with more memory, the smallest first; or a memory limit with room for the worker."""
    device = worker.device
    if device.is_gpu:
        more = sorted(
            (gpu for gpu in GPUS.values() if gpu.memory_bytes > device.memory_bytes), key=lambda gpu: gpu.memory_bytes
        )
        yield from (Change(device=Device(gpu.name, gpu.memory_bytes)) for gpu in more)
        return
    with contextlib.suppress(Unchecked, StartError):
        fit = check(worker)
        least = fit.need.total if fit.need else 0.0
        if worker.kv_auto:
            least += full_context_bytes(worker.shape, worker.config(), device)
        yield Change(device=replace(device, memory_bytes=float((math.floor(least / GIB) + 1) * GIB)))


def _written(value: object) -> str:
    """Return a setting as YAML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_written(each)}" for name, each in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


PRODUCT = "nvidia.com/gpu.product"
"""Label of nodes, set by NVIDIA's GPU feature discovery."""
MEMORY_LIMIT = "resources.limits.memory"
DEFAULTS: dict[str, Any] = {"gpus": 0, "resources": {"limits": {"memory": "32Gi"}}}
"""Values of `worker` in the chart's values.yaml that a file may leave out."""
_NOT_OF_WORKERS = ("config", "canary", "autoscaling", "replicas", "minAvailable", "share")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, slots=True)
class ValuesPool:
    """One pool of workers of a values file."""

    name: str
    """Name as MODEL.ROLE, with .canary behind it for a canary."""
    model: str
    repository: str
    """Repository of the Hub that the model comes from; empty: another source."""
    role: Role
    replicas: int
    gpus: int
    settings: dict[str, Any]
    """Settings of each worker, and `model`."""
    product: str
    """GPU that the node selector asks for; empty: any."""
    memory_limit: object

    @property
    def needs_shape(self) -> bool:
        """Whether memory depends on the model's shape."""
        try:
            return kind_of(str(self.settings.get("engine", DEFAULT_ENGINE))).memory.needs_shape
        except StartError:
            return False  # `check` refuses the engine

    def device(self, otherwise: str = "") -> Device:
        """Return what the memory of a worker is in; `otherwise`: the GPU where the node selector names none.

        Raises Unchecked for a GPU that is not said or not known, BadSetup for a bad quantity.
        """
        if not self.gpus:
            return Device(MEMORY_LIMIT, quantity(f"{self.name}.{MEMORY_LIMIT}", self.memory_limit), is_gpu=False)
        if not (named := self.product or otherwise):
            raise Unchecked(f"nodeSelector.{PRODUCT}", "names no GPU, and --gpu is not set")
        if (device := gpu_of_product(named)) is None:
            raise Unchecked(f"nodeSelector.{PRODUCT}", f"unknown GPU {shown(named)}; known are {', '.join(GPUS)}")
        return device


def pools_of(values: Mapping[str, Any]) -> list[ValuesPool]:
    """Return the pools that the chart would install, in their order.

    Raises BadSetup naming the value that is no such thing.
    """
    worker = merged(DEFAULTS, _mapping(values.get("worker"), "worker"))
    models = values.get("models")
    if not isinstance(models, list):
        raise BadSetup("models", "the values have no list of models")
    return [pool for number, model in enumerate(models) for pool in _of_model(worker, model, f"models.{number}")]


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those of `over` in place, maps key by key, as helm merges them."""
    both = dict(under)
    for name, value in over.items():
        below = both.get(name)
        both[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return both


def quantity(field: str, value: object) -> float:
    """Return the bytes of a quantity of Kubernetes, such as 64Gi.

    Raises BadSetup.
    """
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMGT]|[KMGT]i)?", str(value))
    if parts is None or isinstance(value, bool) or not math.isfinite(float(parts[1])):
        raise BadSetup(field, f"{shown(value)} is not a number of bytes, such as 64Gi")
    return float(parts[1]) * _UNITS[parts[2] or ""]


def gpu_of_product(product: str) -> Device | None:
    """Return the GPU of a product's name, such as NVIDIA-H100-80GB-HBM3 or H100; None: not known.

    A size within the name is that of the memory, also of a MIG slice: 1g.10gb. Shared GPUs are not known, since nothing
    says how much of one a pod gets.
    """
    words = [word for word in product.upper().split("-") if word not in ("NVIDIA", "TESLA")]
    gpu = GPUS.get(words[0]) if words else None
    if gpu is None or "SHARED" in words:
        return None
    sizes = [float(match[1]) for word in words[1:] if (match := re.fullmatch(r"(?:\d+G\.)?(\d+)GB", word))]
    return Device(gpu.name, min([gpu.memory_bytes, *(size * 1e9 for size in sizes)]))


def _of_model(worker: Mapping[str, Any], model: object, field: str) -> Iterator[ValuesPool]:
    entry = _mapping(model, field)
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise BadSetup(f"{field}.name", f"{shown(name)} is not a name")
    source = _mapping(entry.get("source"), f"{name}.source")
    repository = _mapping(source.get("hub"), f"{name}.source.hub").get("repository", "")
    for role in ROLES:
        pool = _mapping(entry.get(role), f"{name}.{role}")
        if _count(pool.get("replicas", 0), f"{name}.{role}.replicas"):
            yield _pool(worker, pool, name, str(repository), role, f"{name}.{role}")
            if canary := _mapping(pool.get("canary"), f"{name}.{role}.canary"):
                yield _pool(worker, merged(pool, canary), name, str(repository), role, f"{name}.{role}.canary")


def _pool(
    worker: Mapping[str, Any], pool: Mapping[str, Any], model: str, repository: str, role: Role, name: str
) -> ValuesPool:
    own = {key: value for key, value in pool.items() if key not in _NOT_OF_WORKERS}
    values = merged({key: value for key, value in worker.items() if key != "config"}, own)
    config = merged(_mapping(worker.get("config"), "worker.config"), _mapping(pool.get("config"), f"{name}.config"))
    selector = _mapping(values.get("nodeSelector"), f"{name}.nodeSelector")
    limits = _mapping(_mapping(values.get("resources"), f"{name}.resources").get("limits"), f"{name}.resources.limits")
    return ValuesPool(
        name=name,
        model=model,
        repository=repository,
        role=role,
        replicas=_count(pool.get("replicas", 0), f"{name}.replicas"),
        gpus=_count(values.get("gpus", 0), f"{name}.gpus"),
        settings={**config, "model": f"/models/{model}"},
        product=str(selector.get(PRODUCT, "")),
        memory_limit=limits.get("memory"),
    )


def _mapping(value: object, field: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BadSetup(field, f"{shown(value)} is not a mapping of names")
    return value


def _count(value: object, field: str) -> int:
    """Return a number of things; helm's own values have them as floats."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != math.floor(value):
        raise BadSetup(field, f"{shown(value)} is not a number from 0")
    return int(value)


Said = Literal["fits", "does not fit", "unchecked"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one pool before it starts."""

    pool: ValuesPool
    fit: Fit | None = None
    """Outcome of the check; None: not checked."""
    proposal: Proposal | None = None
    """Nearest change that fits, of a worker that does not."""
    unknown: tuple[str, ...] = ()
    """Values that are missing, or settings whose memory is not counted, with the reason."""

    @property
    def said(self) -> Said:
        return "unchecked" if self.fit is None else "fits" if self.fit.fits else "does not fit"

    def reasons(self) -> list[str]:
        """Return lines that explain the verdict; none where all is known and fits."""
        lines = [f"not counted: {each}" for each in self.unknown]
        if self.fit is None:
            return [f"unchecked: {each}" for each in self.unknown]
        if not self.fit.fits:
            lines = [*self.fit.refusals, *lines]
            if self.proposal is not None:
                lines.append(f"fits with {self.proposal.in_words()}")
            elif self.fit.need is not None:
                lines.append("no known change of the KV pool, ranks, weights or GPU makes it fit")
        return lines


Shapes = Mapping[str, ModelShape | BadSetup]
"""Shapes of models by their names in the values, or why a shape is not known."""


def verdicts(values: Mapping[str, Any], shapes: Shapes, gpu: str = "") -> list[Verdict]:
    """Return a verdict on each pool, in the order of the chart.

    `shapes`: where the models' names do not tell. `gpu`: where no node selector names one. Raises BadSetup for values
    that are no values.
    """
    pools = pools_of(values)
    if others := sorted(set(shapes) - {model["name"] for model in values["models"]}):
        raise BadSetup("shape", f"the values have no model {others[0]!r}")
    return [_verdict(pool, shapes, gpu) for pool in pools]


def _verdict(pool: ValuesPool, shapes: Shapes, gpu: str) -> Verdict:
    shape = shapes.get(pool.model) or known_shape(pool.repository) or known_shape(pool.model)
    if not pool.needs_shape:
        shape = None
    try:
        if isinstance(shape, BadSetup):
            raise Unchecked("shape", shape.reason)
        device = pool.device(gpu)
        if shape is None and pool.needs_shape:
            raise Unchecked(
                "shape", f"unknown model {pool.model!r}; known are {', '.join(NAMES)}: set --shape {pool.model}=DIR"
            )
        worker = PlannedWorker(pool.role, pool.settings, device, shape, pool.gpus).without_flags()
        fit = check(worker)
    except Unchecked as error:
        return Verdict(pool, unknown=(str(error),))
    return Verdict(pool, fit, None if fit.fits else nearest(worker), fit.unknown)
