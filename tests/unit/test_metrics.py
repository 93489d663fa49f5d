"""What is counted of a request, and that every metric there is stands in the manual."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cluster.errors import Overloaded
from encode_worker.program import EncodeCollector
from engine.messages.from_engine import KvUse, LoadReport, TierUse
from planner.runtime import PlannerMetrics
from preprocessor.blobs import BlobStore
from preprocessor.runtime import PreprocessorCollector
from protos import inference_pb2 as pb
from router.observability.metrics import RequestMetrics, RouterMetrics
from router.prepared_request import PreparedRequest
from worker.metrics import EngineCollector, GpuCollector

MANUAL = Path(__file__).parents[2] / "docs" / "metrics.md"


def prepared(name: str = "m") -> PreparedRequest:
    return SimpleNamespace(model=SimpleNamespace(name=name))  # type: ignore[return-value]  # all that is looked at


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, {"model_name": "m"} | labels)
    return 0.0 if found is None else found


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def request_metrics(registry: CollectorRegistry) -> RequestMetrics:
    request = RouterMetrics(registry).watch()
    request.checked(prepared())
    return request


def finish() -> pb.Finish:
    receipt = pb.Receipt(
        kv=pb.KvReceipt(
            reused_blocks=3,
            moved_blocks=5,
            verified_blocks=5,
            mismatched_blocks=1,
            moved_bytes=5000,
            transport="nixl",
            loan_failure="gone",
            preemptions=2,
            recomputed_tokens=7,
        ),
        speculation=pb.Speculation(draft_tokens=20, accepted_tokens=15),
        placement=pb.Placement(attempt=3, predicted_ttft_ms=250),
        price=pb.Price(input=0.5, output=0.25),
        stages=[
            pb.Stage(name="router queue", duration_ms=30),
            pb.Stage(name="decode", duration_ms=900),
        ],
    )
    usage = pb.Usage(prompt_tokens=100, completion_tokens=10, cached_tokens=48)
    return pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage, receipt=receipt)


def test_a_request_that_ends_well(registry: CollectorRegistry, request_metrics: RequestMetrics) -> None:
    for _ in range(4):
        request_metrics.message()
    request_metrics.over(100, 10)
    request_metrics.finished(finish())
    expected = {
        ("tandem_time_to_first_token_seconds_count",): 1,
        ("tandem_inter_token_latency_seconds_count",): 3,
        ("tandem_e2e_request_latency_seconds_count",): 1,
        ("tandem_request_queue_time_seconds_sum",): 0.03,
        ("tandem_request_time_per_output_token_seconds_sum",): 0.1,
        ("tandem_request_stage_seconds_sum", "stage", "decode"): 0.9,
        ("tandem_prompt_tokens_total",): 100,
        ("tandem_generation_tokens_total",): 10,
        ("tandem_prefix_cache_hits_total",): 48,
        ("tandem_prefix_cache_queries_total",): 100,
        ("tandem_request_success_total", "finished_reason", "length"): 1,
        ("tandem_request_placed_again_total",): 2,
        ("tandem_kv_blocks_total", "origin", "reused"): 3,
        ("tandem_kv_blocks_total", "origin", "moved"): 5,
        ("tandem_kv_transfer_bytes_total", "transport", "nixl"): 5000,
        ("tandem_kv_blocks_verified_total",): 5,
        ("tandem_kv_blocks_mismatched_total",): 1,
        ("tandem_loan_failures_total",): 1,
        ("tandem_request_preemptions_total",): 2,
        ("tandem_recomputed_tokens_total",): 7,
        ("tandem_spec_decode_num_draft_tokens_total",): 20,
        ("tandem_spec_decode_num_accepted_tokens_total",): 15,
        ("tandem_request_price_total", "kind", "input"): 0.5,
        ("tandem_predicted_ttft_seconds_total",): 0.25,
    }
    for (name, *label), count in expected.items():
        assert value(registry, name, **dict([label] if label else [])) == pytest.approx(count), name
    assert not value(registry, "tandem_request_cancelled_total")


def test_requests_that_do_not(registry: CollectorRegistry) -> None:
    metrics = RouterMetrics(registry)
    refused = metrics.watch()
    refused.failed(Overloaded("full"))  # before any model was chosen
    assert registry.get_sample_value(
        "tandem_request_errors_total", {"model_name": "", "code": "RESOURCE_EXHAUSTED"}
    ) == pytest.approx(1)
    left = metrics.watch()
    left.checked(prepared())
    left.message()
    left.left()
    assert value(registry, "tandem_request_cancelled_total") == 1
    assert value(registry, "tandem_time_to_first_token_seconds_count") == 1
    assert value(registry, "tandem_e2e_request_latency_seconds_count") == 0


class NotThere(Exception):
    """As pynvml says it."""


class Nvml:
    """One GPU with everything, and one slice that knows only its memory."""

    NVMLError = NotThere

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> bytes | str:  # noqa: N802
        return b"GPU-0" if gpu == 0 else "GPU-1"

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=10 + gpu, total=100)

    def _whole(self, gpu: int, value: Any) -> Any:
        if gpu:
            raise NotThere
        return value

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:  # noqa: N802
        return self._whole(gpu, SimpleNamespace(gpu=75))

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> Any:  # noqa: N802
        return self._whole(gpu, 350_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> Any:  # noqa: N802
        return self._whole(gpu, 42_000)


def test_what_a_gpu_has_is_told_and_what_it_lacks_is_not(registry: CollectorRegistry) -> None:
    registry.register(GpuCollector(Nvml()))

    def of(name: str, gpu: int) -> float | None:
        return registry.get_sample_value(f"tandem_gpu_{name}", {"gpu": str(gpu), "uuid": f"GPU-{gpu}"})

    assert [of("memory_used_bytes", gpu) for gpu in (0, 1)] == [10, 11]
    assert [of("utilization_ratio", gpu) for gpu in (0, 1)] == [0.75, None]
    assert [of("power_watts", gpu) for gpu in (0, 1)] == [350, None]
    assert [of("energy_joules_total", gpu) for gpu in (0, 1)] == [42, None]


KV = KvUse((TierUse("pool", 40, 12, 100, 60), TierUse("remote", 0, 0, 40, 30)), 5000, 0.25, 1)


def test_an_engine_that_has_reported_and_one_that_has_not(registry: CollectorRegistry) -> None:
    loads: list[LoadReport | None] = [None]
    used: list[KvUse | None] = [None]
    registry.register(EngineCollector(lambda: loads[0], lambda: used[0]))
    assert generate_latest(registry) == b""
    loads[0] = LoadReport(7, 3, 1, 2, 500, 30, 40, {}, decoding=2)
    assert registry.get_sample_value("tandem_engine_kv_cache_usage_ratio") == pytest.approx(0.25)
    assert registry.get_sample_value("tandem_engine_steps_total") == 7
    used[0] = KV

    def of(name: str, tier: str) -> float | None:
        return registry.get_sample_value(f"tandem_engine_kv_tier_{name}", {"tier": tier})

    names = "blocks", "blocks_used", "queries_total", "hits_total"
    assert [of(name, "pool") for name in names] == [40, 12, 100, 60]
    assert [of(name, "remote") for name in names] == [None, None, 40, 30]
    names = "bytes", "seconds"
    assert [registry.get_sample_value(f"tandem_engine_kv_transfer_{name}_total") for name in names] == [5000, 0.25]
    names = "verified", "mismatched"
    assert [registry.get_sample_value(f"tandem_engine_kv_blocks_{name}_total") for name in names] == [30, 1]


def test_every_metric_stands_in_the_manual(registry: CollectorRegistry, request_metrics: RequestMetrics) -> None:
    request_metrics.message()
    request_metrics.finished(finish())
    registry.register(EngineCollector(lambda: LoadReport(7, 3, 1, 2, 500, 30, 40, {}), lambda: KV))
    registry.register(GpuCollector(Nvml()))
    PlannerMetrics(registry, "m")
    media = SimpleNamespace(num_items=3, refusals={"INVALID_ARGUMENT": 2}), {"m": SimpleNamespace(num_restarts=1)}
    registry.register(PreprocessorCollector(*media, BlobStore(1 << 20)))  # type: ignore[arg-type]  # all that is read
    encoded = SimpleNamespace(num_computed=1, num_found=2, num_bytes=3)
    registry.register(EncodeCollector(encoded))  # type: ignore[arg-type]  # all that is read
    documented = set(re.findall(r"`(tandem_[a-z0-9_]+)`", MANUAL.read_text()))
    names = (
        "router/observability/metrics.py",
        "worker/metrics.py",
        "planner/runtime.py",
        "preprocessor/runtime.py",
        "encode_worker/program.py",
    )
    sources = [Path(__file__).parents[2] / name for name in names]
    families = {family.name for family in registry.collect()}
    there = {name.removesuffix("_total") for name in documented}
    assert families <= there
    said = "".join(source.read_text() for source in sources)
    for name in there:  # and nothing stands there that is not
        last = name.removeprefix("tandem_worker_").removeprefix("tandem_engine_").removeprefix("tandem_gpu_")
        assert name in said or f'"{last}"' in said or name == "tandem_worker_info", name
