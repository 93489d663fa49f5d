"""The nearest change of a worker after which it fits, found by the same check."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from cluster.errors import StartError
from engine.engine_kind import EngineKind
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
