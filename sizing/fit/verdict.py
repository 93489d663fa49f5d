"""A verdict on each pool of a chart's values: it fits, it does not and why, or what is unknown.

Pools of a chart's values file: settings of their workers, and the device that each worker gets.

Merged as `helm/tandem/templates/workers.yaml` merges them: a pool's values over those of `worker`, a canary's over its
pool's. The devices come from `nodeSelector["nvidia.com/gpu.product"]`, or from `resources.limits.memory`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cluster.errors import StartError
from cluster.settings import ROLES, Role
from engine.engine_kind import kind_of
from engine.settings import DEFAULT_ENGINE
from sizing.fit.memory import Device, Fit, PlannedWorker, Unchecked, check
from sizing.fit.nearest import Proposal, nearest
from sizing.gpus import GPUS
from sizing.models.known_models import NAMES, known_shape
from sizing.models.model_shape import ModelShape
from workloads.request import BadSetup, shown

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
