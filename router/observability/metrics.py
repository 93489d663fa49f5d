"""Prometheus metrics of a router: requests at their end, by receipt; workers and queues when scraped."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.errors import ServiceError
from cluster.metrics import LATENCY_S, TOKENS, LoopCounter, LoopHistogram
from protos import inference_pb2 as pb
from router.admission.limits.tenant_limits import TenantLimits
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.observability.records import hit_blocks_of
from router.prepared_request import PreparedRequest

MODEL = ("model_name",)
KV_ORIGINS = ("reused", "moved", "computed", "restored", "lender_cached", "lender_computed", "lender_fetched")
FINISHED = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
MAX_TENANTS = 100
"""Tenants whose tokens are counted by name."""
MAX_FIELDS = 64
"""Distinct names of ignored fields, which clients choose, that are counted by name."""
QUANTILES = (0.1, 0.5, 0.9)
LAG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Histogram bounds in seconds of the event loop's lag."""


class RouterMetrics:
    """Metrics of one router, counted whether they are scraped or not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, about: str, bounds: tuple[float, ...], *labels: str) -> LoopHistogram:
            return LoopHistogram(registry, name, about, bounds, *MODEL, *labels)

        self._counters_by_model: list[LoopCounter] = []

        def counter(name: str, about: str, *labels: str) -> LoopCounter:
            made = LoopCounter(registry, name, about, *MODEL, *labels)
            if not labels:
                self._counters_by_model.append(made)
            return made

        self.ttft = histogram(
            "tandem_time_to_first_token_seconds", "Time from arrival to the first message.", LATENCY_S
        )
        self.itl = histogram("tandem_inter_token_latency_seconds", "Time between two messages of a stream.", LATENCY_S)
        self.tpot = histogram(
            "tandem_request_time_per_output_token_seconds",
            "Mean time per output token of a request, after its first token.",
            LATENCY_S,
        )
        self.e2e = histogram("tandem_e2e_request_latency_seconds", "Time from arrival to the end.", LATENCY_S)
        self.queue = histogram("tandem_request_queue_time_seconds", "Time in the router's queue.", LATENCY_S)
        self.stage = histogram(
            "tandem_request_stage_seconds", "Time of each stage of a request, from its receipt.", LATENCY_S, "stage"
        )
        self.prompt = histogram("tandem_request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generated = histogram(
            "tandem_request_generation_tokens", "Generated tokens of a request, all choices.", TOKENS
        )
        self.prompt_tokens = counter("tandem_prompt_tokens", "Prompt tokens of ended requests.")
        self.generation_tokens = counter("tandem_generation_tokens", "Generated tokens of ended requests.")
        self.cached_tokens = counter("tandem_prefix_cache_hits", "Prompt tokens that no worker computed.")
        self.queried_tokens = counter("tandem_prefix_cache_queries", "Prompt tokens of requests with a receipt.")
        self.success = counter("tandem_request_success", "Requests that ended well.", "finished_reason")
        self.errors = counter("tandem_request_errors", "Requests that ended with an error, by its gRPC status.", "code")
        self.cancelled = counter("tandem_request_cancelled", "Requests whose client went away.")
        self.placed_again = counter("tandem_request_placed_again", "Attempts of requests after the first.")
        self.blocks = counter("tandem_kv_blocks", "Blocks of prompts, by the source of their KV.", "origin")
        self.moved_bytes = counter("tandem_kv_transfer_bytes", "Bytes of KV read by decode workers.", "transport")
        self.verified = counter("tandem_kv_blocks_verified", "Blocks that arrived with the right fingerprint.")
        self.mismatched = counter(
            "tandem_kv_blocks_mismatched", "Blocks that arrived with a wrong fingerprint; none of them was used."
        )
        self.loan_failures = counter("tandem_loan_failures", "Loans that ended before all blocks had come.")
        self.preemptions = counter("tandem_request_preemptions", "Preemptions of requests, from receipts.")
        self.recomputed = counter("tandem_recomputed_tokens", "Tokens computed again because of preemptions.")
        self.drafted = counter("tandem_spec_decode_num_draft_tokens", "Draft tokens that were verified, from receipts.")
        self.accepted = counter(
            "tandem_spec_decode_num_accepted_tokens", "Draft tokens that were accepted, from receipts."
        )
        self.workers_lost = counter("tandem_workers_lost", "Workers whose reports ceased for worker_silence_s.")
        self.loop_lag = LoopHistogram(
            registry,
            "tandem_event_loop_lag_seconds",
            "Delay of the router's event loop, measured 20 times a second.",
            LAG_S,
        )
        self.price = counter("tandem_request_price", "Cost of requests at the set prices, in their unit.", "kind")
        self.predicted = counter(
            "tandem_predicted_ttft_seconds", "Sum of the predicted times to first token, of requests with a receipt."
        )
        self.predicted_hits = counter(
            "tandem_predicted_hit_blocks",
            "Blocks predicted as cached, of requests with a receipt that were placed once.",
        )
        self.missed_hits = counter(
            "tandem_predicted_hit_blocks_missed", "Blocks predicted as cached that were computed after all."
        )
        self.unforeseen_hits = counter(
            "tandem_unpredicted_hit_blocks", "Blocks not predicted as cached that no worker computed."
        )
        self.tenant_tokens = counter(
            "tandem_tenant_tokens", "Tokens of a tenant: input, cached input and output.", "tenant", "kind"
        )
        self._tenants_seen: set[str] = set()
        self.ignored_fields = LoopCounter(
            registry, "tandem_ignored_fields", "Fields of clients' requests that had no effect, by name.", "field"
        )
        self._fields_seen: set[str] = set()
        self._models_seen: set[str] = set()

    def show(self, model: str) -> None:
        """Make the model's counters visible before anything is counted."""
        if model not in self._models_seen:
            self._models_seen.add(model)
            for counter in self._counters_by_model:
                counter.add(0, model)

    def watch(self) -> "RequestMetrics":
        """Start the metrics of a request that has arrived."""
        return RequestMetrics(self)

    def ignored(self, fields: Iterable[str]) -> None:
        """Count ignored fields, the first MAX_FIELDS ones by name."""
        for field in fields:
            if len(self._fields_seen) < MAX_FIELDS:
                self._fields_seen.add(field)
            self.ignored_fields.add(1, field if field in self._fields_seen else "other")

    def used(self, model: str, tenant: str, num_input: int, num_cached: int, num_output: int) -> None:
        """Count a request's tokens, the first MAX_TENANTS tenants by name."""
        if len(self._tenants_seen) < MAX_TENANTS:
            self._tenants_seen.add(tenant)
        label = tenant if tenant in self._tenants_seen else "other"
        for kind, number in (("input", num_input), ("cached", num_cached), ("output", num_output)):
            self.tenant_tokens.add(number, model, label, kind)


class RequestMetrics:
    """Metrics of one request.

    The last call is one of `finished`, `failed` and `left`.
    """

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._arrived_at = time.monotonic()
        self._last_at = 0.0
        self.ttft_s = 0.0
        """Seconds to the first message; 0 before it."""
        self._name = ""

    def checked(self, prepared: PreparedRequest) -> None:
        """Record the request's model."""
        self._name = prepared.model.name
        self._metrics.show(self._name)

    def message(self) -> None:
        """Record a message of the stream."""
        now = time.monotonic()
        if self._last_at:
            self._metrics.itl.observe(now - self._last_at, self._name)
        else:
            self.ttft_s = now - self._arrived_at
            self._observe(self._metrics.ttft, self.ttft_s)
        self._last_at = now

    def failed(self, error: ServiceError) -> None:
        self._count(self._metrics.errors, 1, error.code)

    def left(self) -> None:
        """Record that the client left."""
        self._count(self._metrics.cancelled, 1)

    def over(self, num_prompt: int, num_output: int) -> None:
        """Count the tokens of a request of which something was sent."""
        metrics = self._metrics
        self._count(metrics.prompt_tokens, num_prompt)
        self._count(metrics.generation_tokens, num_output)
        self._observe(metrics.prompt, num_prompt)
        self._observe(metrics.generated, num_output)

    def finished(self, finish: pb.Finish) -> None:
        """Record success."""
        self._count(self._metrics.success, 1, FINISHED.get(finish.reason, "other"))
        self._observe(self._metrics.e2e, self._last_at - self._arrived_at)
        if finish.HasField("receipt"):
            self._add(finish.receipt, finish.usage)

    def _add(self, receipt: pb.Receipt, usage: pb.Usage) -> None:
        metrics, kv = self._metrics, receipt.kv
        self._count(metrics.queried_tokens, usage.prompt_tokens)
        self._count(metrics.cached_tokens, usage.cached_tokens)
        self._count(metrics.placed_again, max(0, receipt.placement.attempt - 1))
        self._count(metrics.predicted, receipt.placement.predicted_ttft_ms / 1e3)
        if receipt.placement.attempt == 1 and not kv.preemptions:
            unforeseen = hit_blocks_of(kv) - receipt.placement.predicted_hit_blocks
            self._count(metrics.predicted_hits, receipt.placement.predicted_hit_blocks)
            self._count(metrics.missed_hits, max(0, -unforeseen))
            self._count(metrics.unforeseen_hits, max(0, unforeseen))
        for origin in KV_ORIGINS:
            if count := getattr(kv, f"{origin}_blocks"):
                self._count(metrics.blocks, count, origin)
        if kv.moved_bytes:
            self._count(metrics.moved_bytes, kv.moved_bytes, kv.transport)
        self._count(metrics.verified, kv.verified_blocks)
        self._count(metrics.mismatched, kv.mismatched_blocks)
        self._count(metrics.loan_failures, bool(kv.loan_failure))
        self._count(metrics.preemptions, kv.preemptions)
        self._count(metrics.recomputed, kv.recomputed_tokens)
        self._count(metrics.drafted, receipt.speculation.draft_tokens)
        self._count(metrics.accepted, receipt.speculation.accepted_tokens)
        if receipt.HasField("price"):
            self._count(metrics.price, receipt.price.input, "input")
            self._count(metrics.price, receipt.price.output, "output")
        for stage in receipt.stages:
            seconds = stage.duration_ms / 1e3
            self._observe(metrics.stage, seconds, stage.name.replace(" ", "_"))
            if stage.name == "router queue":
                self._observe(metrics.queue, seconds)
            elif stage.name == "decode" and usage.completion_tokens > 1:
                self._observe(metrics.tpot, seconds / (usage.completion_tokens - 1))

    def _count(self, counter: LoopCounter, amount: float, *labels: str) -> None:
        if amount:
            counter.add(amount, self._name, *labels)

    def _observe(self, histogram: LoopHistogram, value: float, *labels: str) -> None:
        histogram.observe(value, self._name, *labels)


class ClusterCollector(Collector):
    """Collector of the workers and queues at the time of a scrape."""

    def __init__(self, models: ModelRuntimes, tenant_limits: TenantLimits) -> None:
        self._models = models
        self._tenant_limits = tenant_limits

    def describe(self) -> Iterable[Metric]:
        """Return no metrics before the first collection, since they depend on the models."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._workers()
        yield from self._lines()

    def _workers(self) -> Iterator[Metric]:
        labels = (*MODEL, "worker", "role")
        workers = GaugeMetricFamily("tandem_workers", "Workers that joined and report.", labels=(*MODEL, "role"))
        about = "Workers that joined and report, by the revision of their model."
        revisions = GaugeMetricFamily("tandem_revision_workers", about, labels=(*MODEL, "role", "revision"))
        families: dict[str, GaugeMetricFamily] = {
            name: GaugeMetricFamily(f"tandem_worker_{name}", about, labels=labels)
            for name, about in (
                ("requests_running", "Requests of the worker."),
                ("requests_preempted", "Preempted requests that wait to be computed again."),
                ("loans", "Loans to other workers under way."),
                ("loans_queued", "Prompts that wait at the lender."),
                ("queued_prefill_tokens", "Prompt tokens that were admitted and are not computed yet."),
                ("kv_cache_usage_ratio", "Share of the worker's KV pool that new requests could not reserve."),
                ("kv_blocks", "Blocks of the worker's KV pool."),
                ("draining", "1 while the worker was told to stop."),
                ("failing", "1 while requests placed on the worker fail; it is tried now and then."),
                ("failing_lenders", "Lenders from which the worker's loans fail; they are tried now and then."),
            )
        }
        for model in self._models:
            counts = {"prefill": 0, "decode": 0}
            of_revision: dict[tuple[str, str], int] = {}
            for worker in model.fleet.workers:
                if (load := worker.load) is None:
                    continue
                role = "decode" if worker.decodes else "prefill"
                counts[role] += 1
                of = role, worker.hello.revision.hex()
                of_revision[of] = of_revision.get(of, 0) + 1
                values = {
                    "requests_running": load.running,
                    "requests_preempted": load.preempted,
                    "loans": load.loans,
                    "loans_queued": load.queued_loans,
                    "queued_prefill_tokens": load.queued_prefill_tokens,
                    "kv_cache_usage_ratio": 1 - load.available_blocks / max(1, load.num_blocks),
                    "kv_blocks": load.num_blocks,
                    "draining": worker.draining,
                    "failing": worker.failing,
                    "failing_lenders": len(model.fleet.failing_lenders(worker)),
                }
                for name, value in values.items():
                    families[name].add_metric((model.name, worker.worker_id, role), float(value))
            for role, count in counts.items():
                workers.add_metric((model.name, role), count)
            for labels_of, count in of_revision.items():
                revisions.add_metric((model.name, *labels_of), count)
        yield workers
        yield revisions
        yield from families.values()

    def _lines(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("tandem_num_requests_waiting", "Requests in the router's queue.", labels=MODEL)
        running = GaugeMetricFamily("tandem_num_requests_running", "Requests at decode workers.", labels=MODEL)
        errors = GaugeMetricFamily(
            "tandem_ttft_prediction_ratio",
            "Predicted over actual time to first token, at a quantile.",
            labels=(*MODEL, "quantile"),
        )
        refused = CounterMetricFamily(
            "tandem_requests_refused", "Refused requests, by reason.", labels=(*MODEL, "reason")
        )
        for model in self._models:
            admission = model.dispatcher.admission
            waiting.add_metric((model.name,), model.dispatcher.num_waiting)
            running.add_metric((model.name,), _running(model))
            for reason, count in admission.num_refused.items():
                refused.add_metric((model.name, _word(reason)), count)
            if model.fleet.ttft_scores.num_seen:
                for share, ratio in zip(QUANTILES, model.fleet.ttft_scores.quantiles(QUANTILES), strict=True):
                    errors.add_metric((model.name, f"{share:g}"), ratio)
        for reason, count in self._tenant_limits.num_refused.items():
            refused.add_metric(("", _word(reason)), count)
        yield from (waiting, running, errors, refused)


def _running(model: ModelRuntime) -> int:
    return sum(worker.load.running for worker in model.fleet.workers if worker.decodes and worker.load is not None)


def _word(reason: Any) -> str:
    return str(reason).replace("'", "").replace(" ", "_")
