"""What a router tells Prometheus: of each request as it ends, from its receipt; of its workers and lines when asked."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.errors import ServiceError
from cluster.metrics import LATENCY_S, TOKENS
from protos import inference_pb2 as pb
from router.intake import Ticket
from router.served_model import ServedModel, ServedModels
from router.tenant_gate import TenantGate

MODEL = ("model_name",)
KV_ORIGINS = ("reused", "moved", "computed", "restored", "lender_cached", "lender_computed", "lender_fetched")
FINISHED = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
QUANTILES = (0.1, 0.5, 0.9)


class RouterMetrics:
    """Of one router. Counted whether anybody scrapes them or not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, about: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, about, (*MODEL, *labels), buckets=bounds, registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, (*MODEL, *labels), registry=registry)

        self.ttft = histogram("tandem_time_to_first_token_seconds", "From arrival to the first message.", LATENCY_S)
        self.itl = histogram("tandem_inter_token_latency_seconds", "Between two messages of a stream.", LATENCY_S)
        self.tpot = histogram(
            "tandem_request_time_per_output_token_seconds", "Mean after the first token, of a request.", LATENCY_S
        )
        self.e2e = histogram("tandem_e2e_request_latency_seconds", "From arrival to the end.", LATENCY_S)
        self.queue = histogram("tandem_request_queue_time_seconds", "In the router's line.", LATENCY_S)
        self.stage = histogram(
            "tandem_request_stage_seconds", "Stages of a request, by its receipt.", LATENCY_S, "stage"
        )
        self.prompt = histogram("tandem_request_prompt_tokens", "Of a request.", TOKENS)
        self.generated = histogram("tandem_request_generation_tokens", "Of a request, all choices.", TOKENS)
        self.prompt_tokens = counter("tandem_prompt_tokens", "Of requests that are over.")
        self.generation_tokens = counter("tandem_generation_tokens", "Generated.")
        self.cached_tokens = counter("tandem_prefix_cache_hits", "Prompt tokens that nobody computed.")
        self.queried_tokens = counter("tandem_prefix_cache_queries", "Prompt tokens of requests with a receipt.")
        self.success = counter("tandem_request_success", "Ended well.", "finished_reason")
        self.errors = counter("tandem_request_errors", "Ended with an error, by its gRPC status.", "code")
        self.cancelled = counter("tandem_request_cancelled", "The client went away.")
        self.placed_again = counter("tandem_request_placed_again", "Attempts after the first.")
        self.blocks = counter("tandem_kv_blocks", "Of prompts, by where their KV came from.", "origin")
        self.moved_bytes = counter("tandem_kv_transfer_bytes", "Read by decode workers.", "transport")
        self.verified = counter("tandem_kv_blocks_verified", "That arrived with the right fingerprint.")
        self.mismatched = counter("tandem_kv_blocks_mismatched", "With a wrong one; none of them was used.")
        self.loan_failures = counter("tandem_loan_failures", "Loans that ended before all was bound.")
        self.preemptions = counter("tandem_request_preemptions", "Of requests, by receipt.")
        self.recomputed = counter("tandem_recomputed_tokens", "Computed again, because of those.")
        self.guessed = counter("tandem_spec_decode_num_draft_tokens", "Guessed and verified, by receipt.")
        self.accepted = counter("tandem_spec_decode_num_accepted_tokens", "Of those, the right ones.")
        self.price = counter("tandem_request_price", "At the prices set, in their unit.", "kind")
        self.predicted = counter("tandem_predicted_ttft_seconds", "Sum of predictions of requests with a receipt.")
        self._models: dict[str, _OfModel] = {}

    def watch(self) -> "Watched":
        """A request has arrived."""
        return Watched(self)

    def of_model(self, name: str) -> "_OfModel":
        if (found := self._models.get(name)) is None:
            found = self._models[name] = _OfModel(self, name)
        return found


class _OfModel:
    """Children of what is counted for every message: to look them up by label would cost more than to count."""

    def __init__(self, metrics: RouterMetrics, name: str) -> None:
        self.ttft = metrics.ttft.labels(name)
        self.itl = metrics.itl.labels(name)


class Watched:
    """One request on its way. Whatever becomes of it, one of `finished`, `failed` and `left` is the last call."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._arrived_at = time.monotonic()
        self._last_at = 0.0
        self.ttft_s = 0.0
        """Until the first message; 0 before it."""
        self._model: _OfModel | None = None
        self._name = ""

    def checked(self, ticket: Ticket) -> None:
        """It is a request for this model."""
        self._name = ticket.model.name
        self._model = self._metrics.of_model(self._name)

    def message(self) -> None:
        """Of its stream."""
        now = time.monotonic()
        assert self._model is not None
        if self._last_at:
            self._model.itl.observe(now - self._last_at)
        else:
            self.ttft_s = now - self._arrived_at
            self._model.ttft.observe(self.ttft_s)
        self._last_at = now

    def failed(self, error: ServiceError) -> None:
        self._metrics.errors.labels(self._name, error.code.name).inc()

    def left(self) -> None:
        """Its client did."""
        self._metrics.cancelled.labels(self._name).inc()

    def over(self, num_prompt: int, num_output: int) -> None:
        """Tokens of a request of which something was sent."""
        metrics, name = self._metrics, self._name
        metrics.prompt_tokens.labels(name).inc(num_prompt)
        metrics.generation_tokens.labels(name).inc(num_output)
        metrics.prompt.labels(name).observe(num_prompt)
        metrics.generated.labels(name).observe(num_output)

    def finished(self, finish: pb.Finish) -> None:
        """It ended well."""
        metrics, name = self._metrics, self._name
        metrics.success.labels(name, FINISHED.get(finish.reason, "other")).inc()
        metrics.e2e.labels(name).observe(self._last_at - self._arrived_at)
        if finish.HasField("receipt"):
            self._count(finish.receipt, finish.usage)

    def _count(self, receipt: pb.Receipt, usage: pb.Usage) -> None:
        metrics, name, kv = self._metrics, self._name, receipt.kv
        metrics.queried_tokens.labels(name).inc(usage.prompt_tokens)
        metrics.cached_tokens.labels(name).inc(usage.cached_tokens)
        metrics.placed_again.labels(name).inc(max(0, receipt.placement.attempt - 1))
        metrics.predicted.labels(name).inc(receipt.placement.predicted_ttft_ms / 1e3)
        for origin in KV_ORIGINS:
            if count := getattr(kv, f"{origin}_blocks"):
                metrics.blocks.labels(name, origin).inc(count)
        if kv.moved_bytes:
            metrics.moved_bytes.labels(name, kv.transport).inc(kv.moved_bytes)
        metrics.verified.labels(name).inc(kv.verified_blocks)
        metrics.mismatched.labels(name).inc(kv.mismatched_blocks)
        metrics.loan_failures.labels(name).inc(bool(kv.loan_failure))
        metrics.preemptions.labels(name).inc(kv.preemptions)
        metrics.recomputed.labels(name).inc(kv.recomputed_tokens)
        metrics.guessed.labels(name).inc(receipt.speculation.guessed_tokens)
        metrics.accepted.labels(name).inc(receipt.speculation.accepted_tokens)
        if receipt.HasField("price"):
            metrics.price.labels(name, "input").inc(receipt.price.input)
            metrics.price.labels(name, "output").inc(receipt.price.output)
        for stage in receipt.stages:
            seconds = stage.duration_ms / 1e3
            metrics.stage.labels(name, stage.name.replace(" ", "_")).observe(seconds)
            if stage.name == "router queue":
                metrics.queue.labels(name).observe(seconds)
            elif stage.name == "decode" and usage.completion_tokens > 1:
                metrics.tpot.labels(name).observe(seconds / (usage.completion_tokens - 1))


class ClusterCollector(Collector):
    """What the router knows of its workers and its lines, as it stands when it is asked."""

    def __init__(self, models: ServedModels, gate: TenantGate) -> None:
        self._models = models
        self._gate = gate

    def describe(self) -> Iterable[Metric]:
        """Nothing until it is asked: what there is depends on the models."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._workers()
        yield from self._lines()

    def _workers(self) -> Iterator[Metric]:
        labels = (*MODEL, "worker", "role")
        workers = GaugeMetricFamily("tandem_workers", "Joined and heard of.", labels=(*MODEL, "role"))
        families: dict[str, GaugeMetricFamily] = {
            name: GaugeMetricFamily(f"tandem_worker_{name}", about, labels=labels)
            for name, about in (
                ("requests_running", "Requests that it has."),
                ("requests_preempted", "Of these, such as wait to be computed anew."),
                ("loans", "Given, and under way."),
                ("loans_queued", "Waiting at the lender."),
                ("queued_prefill_tokens", "Admitted, and not computed yet."),
                ("kv_cache_usage_ratio", "Of its pool: what new requests could not reserve."),
                ("kv_blocks", "Of its pool."),
                ("draining", "1: it was told to stop."),
            )
        }
        for model in self._models:
            counts = {"prefill": 0, "decode": 0}
            for worker in model.fleet.workers:
                if (load := worker.load) is None:
                    continue
                role = "decode" if worker.decodes else "prefill"
                counts[role] += 1
                values = {
                    "requests_running": load.running,
                    "requests_preempted": load.preempted,
                    "loans": load.loans,
                    "loans_queued": load.queued_loans,
                    "queued_prefill_tokens": load.queued_prefill_tokens,
                    "kv_cache_usage_ratio": 1 - load.available_blocks / max(1, load.num_blocks),
                    "kv_blocks": load.num_blocks,
                    "draining": worker.draining,
                }
                for name, value in values.items():
                    families[name].add_metric((model.name, worker.worker_id, role), float(value))
            for role, count in counts.items():
                workers.add_metric((model.name, role), count)
        yield workers
        yield from families.values()

    def _lines(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("tandem_num_requests_waiting", "In the router's line.", labels=MODEL)
        running = GaugeMetricFamily("tandem_num_requests_running", "At decode workers.", labels=MODEL)
        errors = GaugeMetricFamily(
            "tandem_ttft_prediction_ratio", "Predicted over actual, at a quantile.", labels=(*MODEL, "quantile")
        )
        refused = CounterMetricFamily("tandem_requests_refused", "By reason.", labels=(*MODEL, "reason"))
        for model in self._models:
            admission = model.dispatcher.admission
            waiting.add_metric((model.name,), model.dispatcher.num_waiting)
            running.add_metric((model.name,), _running(model))
            for reason, count in admission.num_refused.items():
                refused.add_metric((model.name, _word(reason)), count)
            if model.fleet.ttft_scores.num_seen:
                for share, ratio in zip(QUANTILES, model.fleet.ttft_scores.quantiles(QUANTILES), strict=True):
                    errors.add_metric((model.name, f"{share:g}"), ratio)
        for reason, count in self._gate.num_refused.items():
            refused.add_metric(("", _word(reason)), count)
        yield from (waiting, running, errors, refused)


def _running(model: ServedModel) -> int:
    return sum(worker.load.running for worker in model.fleet.workers if worker.decodes and worker.load is not None)


def _word(reason: Any) -> str:
    return str(reason).replace("'", "").replace(" ", "_")
