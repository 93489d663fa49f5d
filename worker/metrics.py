"""Prometheus metrics of a worker: its engine's last report, and its GPUs.

Metrics of requests come from the router, which has every receipt (`router/observability/metrics.py`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages.from_engine import KvUse, LoadReport, Ready
from kvcache.kv_stats import REMOTE

log = logging.getLogger(__name__)


class EngineCollector(Collector):
    """Collector of the engine's last load report."""

    def __init__(self, last_load: Callable[[], LoadReport | None], last_kv: Callable[[], KvUse | None]) -> None:
        self._last_load = last_load
        self._last_kv = last_kv

    def describe(self) -> Iterable[Metric]:
        """Return no metrics before the first collection."""
        return ()

    def collect(self) -> Iterator[Metric]:
        if (load := self._last_load()) is None:
            return
        gauges = {
            "num_requests_running": ("Requests of the engine.", load.running),
            "num_requests_decoding": ("Requests past their prompt: the decode batch of a step.", load.decoding),
            "num_requests_preempted": ("Preempted requests that wait to be computed again.", load.preempted),
            "loans": ("Loans to other workers under way.", load.loans),
            "loans_queued": ("Loans that wait to start.", load.queued_loans),
            "queued_prefill_tokens": (
                "Prompt tokens that were admitted and are not computed yet.",
                load.queued_prefill_tokens,
            ),
            "kv_cache_usage_ratio": (
                "Share of the KV pool that new requests could not reserve.",
                1 - load.available_blocks / max(1, load.num_blocks),
            ),
            "kv_blocks": ("Blocks of the KV pool.", load.num_blocks),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(f"tandem_engine_{name}", about, value=float(value))
        yield CounterMetricFamily("tandem_engine_steps", "Steps of the engine.", value=float(load.step))
        yield CounterMetricFamily(
            "tandem_engine_preemptions", "Preemptions of requests.", value=float(load.preemptions)
        )
        draft_tokens = {
            "spec_decode_num_draft_tokens": ("Draft tokens that were verified.", load.drafted),
            "spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", load.accepted),
        }
        for name, (about, value) in draft_tokens.items():
            yield CounterMetricFamily(f"tandem_engine_{name}", about, value=float(value))
        if (kv := self._last_kv()) is not None:
            yield from _of_kv(kv)


def _of_kv(kv: KvUse) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("tandem_engine_kv_tier_blocks", "Blocks that the tier has room for.", labels=("tier",))
    used = GaugeMetricFamily("tandem_engine_kv_tier_blocks_used", "Blocks of the tier that hold KV.", labels=("tier",))
    queries = CounterMetricFamily(
        "tandem_engine_kv_tier_queries", "Blocks that were looked up in the tier.", labels=("tier",)
    )
    hits = CounterMetricFamily("tandem_engine_kv_tier_hits", "Blocks that were found in the tier.", labels=("tier",))
    for each in kv.tiers:
        if each.blocks:
            blocks.add_metric((each.tier,), each.blocks)
            used.add_metric((each.tier,), each.used)
        queries.add_metric((each.tier,), each.queries)
        hits.add_metric((each.tier,), each.hits)
    yield from (blocks, used, queries, hits)
    verified = sum(each.hits for each in kv.tiers if each.tier == REMOTE)
    reads = {
        "kv_transfer_bytes": ("Bytes read from other workers and verified.", kv.read_bytes),
        "kv_transfer_seconds": ("Seconds in which reads from other workers were under way.", kv.read_s),
        "kv_blocks_verified": ("Blocks from other workers with the right fingerprint.", verified),
        "kv_blocks_mismatched": (
            "Blocks from other workers with a wrong fingerprint; none of them was used.",
            kv.mismatched,
        ),
        "kv_pins_gave_way": ("Pinned blocks that gave way to requests before their time.", kv.pins_gave_way),
    }
    for name, (about, value) in reads.items():
        yield CounterMetricFamily(f"tandem_engine_{name}", about, value=float(value))
    if kv.store:
        stored = CounterMetricFamily(
            "tandem_engine_kv_store_blocks", "Blocks of the shared store, by outcome.", labels=("outcome",)
        )
        for outcome, count in kv.store:
            stored.add_metric((outcome,), count)
        yield stored


class GpuCollector(Collector):
    """Collector of NVIDIA GPUs through NVML. docs/metrics.md has the query for energy per token."""

    def __init__(self, nvml: Any) -> None:
        """Create the collector; `nvml` is the initialised module pynvml."""
        self._nvml = nvml
        self._gauges: dict[str, tuple[str, Callable[[Any], float]]] = {
            "utilization_ratio": (
                "Share of time in which kernels ran.",
                lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            ),
            "memory_used_bytes": (
                "Memory in use by all processes.",
                lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            ),
            "memory_bytes": ("Memory of the GPU.", lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
            "power_watts": ("Power drawn now.", lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
        }

    def describe(self) -> Iterable[Metric]:
        """Return no metrics before the first collection."""
        return ()

    def collect(self) -> Iterator[Metric]:
        nvml, labels = self._nvml, ("gpu", "uuid")
        gauges = {
            name: GaugeMetricFamily(f"tandem_gpu_{name}", about, labels=labels)
            for name, (about, _) in self._gauges.items()
        }
        energy = CounterMetricFamily("tandem_gpu_energy_joules", "Energy used since the driver started.", labels=labels)
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            name = (str(index), _text(nvml.nvmlDeviceGetUUID(gpu)))
            for each, (_, read) in self._gauges.items():
                if (value := self._read(read, gpu)) is not None:
                    gauges[each].add_metric(name, value)
            if (value := self._read(nvml.nvmlDeviceGetTotalEnergyConsumption, gpu)) is not None:
                energy.add_metric(name, value / 1e3)
        yield from gauges.values()
        yield energy

    def _read(self, read: Callable[[Any], float], gpu: Any) -> float | None:
        """Read a value, or return None where the GPU lacks it: a MIG slice has no power reading."""
        try:
            return float(read(gpu))
        except self._nvml.NVMLError as error:
            log.debug("this GPU does not report a value: %s", error)
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def open_nvml() -> Any | None:
    """Return pynvml where it is installed and there is a GPU, else None."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("no GPU metrics: %s", error)
        return None
    return pynvml


def register(
    registry: CollectorRegistry,
    worker_id: str,
    role: str,
    model: str,
    ready: Ready,
    last_load: Callable[[], LoadReport | None],
    last_kv: Callable[[], KvUse | None],
) -> Callable[[str], None]:
    """Register all metrics of a worker.

    The returned callback must be called with each new role.
    """
    info = Info("tandem_worker", "Identity of the worker.", registry=registry)
    block = {"block_tokens": str(ready.block_tokens), "block_bytes": str(ready.block_bytes)}

    def say(role: str) -> None:
        info.info({"worker": worker_id, "role": role, "model_name": model, "transport": ready.transport} | block)

    say(role)
    registry.register(EngineCollector(last_load, last_kv))
    if (nvml := open_nvml()) is not None:
        registry.register(GpuCollector(nvml))
    return say
