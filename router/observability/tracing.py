"""OpenTelemetry traces: one per request over client, router, decode worker, lender and transfer.

The router makes the spans from the receipt, when the request has ended: every stage has its place and time on the
request's own clock. So workers need no exporter, and tracing costs a running request nothing. Time between stages
before the first token (mostly messages in transit) is a span too, so every moment has a name.

Off unless `otlp_endpoint` is set. Names and attributes follow OpenTelemetry's GenAI conventions where they have them.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.install import needing
from cluster.logs import traceparent
from protos import inference_pb2 as pb
from router.config import RouterConfig
from router.observability.records import RequestRecord

BETWEEN = "in transit"
"""Name of time that no stage accounts for."""
SHORT_S = 1e-6
MAX_TRACERS = 1024
CANCELLED = "CANCELLED"
AT_LENDER = ("lender queue", "lender prefill")
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a request, in seconds since its arrival at the router."""

    name: str
    service: str
    """Service name: tandem-router, tandem-decode or tandem-prefill."""
    where: str
    begin_s: float
    end_s: float


def spans_of(receipt: pb.Receipt, router_id: str, ttft_s: float) -> list[Span]:
    """Return a span for each stage and, until the first token, for each gap, in order of their beginning."""
    spans = [_span(stage, receipt, router_id) for stage in receipt.stages]
    gaps = [Span(BETWEEN, "tandem-router", router_id, begin, end) for begin, end in _gaps(spans, ttft_s)]
    return sorted([*spans, *gaps], key=lambda span: (span.begin_s, span.end_s))


def _span(stage: pb.Stage, receipt: pb.Receipt, router_id: str) -> Span:
    begin_s = stage.start_ms / 1e3
    where, service = stage.where, "tandem-router" if stage.where == router_id else "tandem-decode"
    if stage.name in AT_LENDER:
        where, service = receipt.placement.lender, "tandem-prefill"
    return Span(stage.name, service, where, begin_s, begin_s + stage.duration_ms / 1e3)


def _gaps(spans: Sequence[Span], until_s: float) -> Iterator[tuple[float, float]]:
    covered_s = 0.0
    for span in sorted(spans, key=lambda span: span.begin_s):
        if span.begin_s >= until_s:
            break
        if span.begin_s > covered_s + SHORT_S:
            yield covered_s, span.begin_s
        covered_s = max(covered_s, span.end_s)
    if covered_s + SHORT_S < until_s:
        yield covered_s, until_s


class Tracing:
    """Tracing of one router."""

    def __init__(self, config: RouterConfig) -> None:
        """Set up the exporter.

        Raises StartError where OpenTelemetry is not installed.
        """
        self._router_id = config.id()
        self._tracers: dict[tuple[str, str], Any] = {}
        self._processor: Any = None
        if config.otlp_endpoint:
            with needing("otlp_endpoint"):
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
                from opentelemetry.sdk.trace.export import BatchSpanProcessor
            insecure = not config.otlp_endpoint.startswith("https://")
            self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=insecure))

    def ended(self, record: RequestRecord, error_type: str) -> None:
        """Export a request that ended: with the spans of its receipt, or its own span only where it was cut short.

        `error_type` is CANCELLED for one that was cancelled, which is no error of the service.
        """
        if self._processor is None:
            return
        attributes = {"gen_ai.operation.name": "chat" if record.is_chat else "text_completion"} if record.model else {}
        if record.model:
            attributes |= {
                "gen_ai.provider.name": "tandem",
                "gen_ai.request.model": record.asked_model or record.model,
                "tandem.request_id": record.request_id,
            }
        if error_type:
            self._cut_short(record, attributes | {"error.type": error_type})
        elif record.finish is not None:
            self._finished(record, attributes, record.finish)

    def _finished(self, record: RequestRecord, attributes: dict[str, Any], finish: pb.Finish) -> None:
        attributes |= {
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": finish.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.response.finish_reasons": [REASONS.get(reason, "other") for reason in record.reasons],
            "tandem.cached_tokens": finish.usage.cached_tokens,
            "tandem.ttft_ms": record.ttft_s * 1e3,
        }
        kv, placement = finish.receipt.kv, finish.receipt.placement
        for name in ("reused_blocks", "moved_blocks", "computed_blocks", "moved_bytes", "mismatched_blocks"):
            attributes[f"tandem.kv.{name}"] = getattr(kv, name)
        attributes |= {"tandem.placement.reason": placement.reason, "tandem.placement.attempt": placement.attempt}
        began_ns = round(record.arrived_at * 1e9)
        root, context = self._root(began_ns, attributes)
        if not root.is_recording():  # OTEL_TRACES_SAMPLER left it out
            return
        for span in spans_of(finish.receipt, self._router_id, record.ttft_s):
            child = self._tracer(span.service, span.where).start_span(
                span.name, context=context, start_time=began_ns + round(span.begin_s * 1e9)
            )
            child.end(began_ns + round(span.end_s * 1e9))
        root.end(round(record.ended_at * 1e9))

    def _cut_short(self, record: RequestRecord, attributes: dict[str, Any]) -> None:
        from opentelemetry.trace import Status, StatusCode

        root, _ = self._root(round(record.arrived_at * 1e9), attributes)
        if record.refusal is not None:
            root.set_status(Status(StatusCode.ERROR, record.refusal.text))
        root.end(round(record.ended_at * 1e9))

    async def close(self) -> None:
        """Close after exporting all spans, or failing to."""
        if self._processor is not None:
            await asyncio.to_thread(self._processor.shutdown)

    def _root(self, began_ns: int, attributes: dict[str, Any]) -> tuple[Any, Any]:
        """Return the request's span, below the client's if there is one, and the context of its children."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent.get()})
        tracer = self._tracer("tandem-router", self._router_id)
        root = tracer.start_span(
            "generate", context=parent, kind=SpanKind.SERVER, start_time=began_ns, attributes=attributes
        )
        return root, set_span_in_context(root)

    def _tracer(self, service: str, where: str) -> Any:
        """Return the tracer of one process."""
        if (tracer := self._tracers.get((service, where))) is None:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider

            if len(self._tracers) >= MAX_TRACERS:  # workers come and go
                self._tracers.clear()
            resource = Resource.create({"service.name": service, "service.instance.id": where})
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            tracer = self._tracers[service, where] = provider.get_tracer("tandem")
        return tracer
