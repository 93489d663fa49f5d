"""OpenTelemetry span around a client's call, where the program has OpenTelemetry; otherwise nothing.

The router's trace continues it: the span's context travels as gRPC metadata, by the program's propagators
(`traceparent` by default). Names and attributes follow OpenTelemetry's GenAI conventions. No prompt and no answer is in
a span.
"""

from collections.abc import Sequence
from typing import Any

from cluster.errors import ServiceError
from protos import inference_pb2 as pb

Metadata = Sequence[tuple[str, str | bytes]]
"""Metadata of a gRPC call; names in lower case."""
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
MAX_INT = 2**63 - 1
"""Largest integer attribute."""
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
"""Fields of Sampling that the conventions name alike."""


class CallSpan:
    """Span from construction to `end`, below the current span.

    `end` is called once.
    """

    def __init__(self, requests: Sequence[pb.GenerateRequest], addresses: Sequence[str], metadata: Metadata) -> None:
        """Start the span; a trace context in the caller's `metadata` has precedence."""
        self.metadata = tuple(metadata)
        self._span: Any = None
        self._reasons: dict[int, str] = {}
        self._num_output, self._num_prompt = 0, 0
        try:
            from opentelemetry import propagate, trace
        except ModuleNotFoundError:
            return
        attributes = _of_requests(requests, addresses)
        name = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}".rstrip()
        self._span = trace.get_tracer("tandem.client").start_span(
            name, kind=trace.SpanKind.CLIENT, attributes=attributes
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        names = {key for key, _ in self.metadata}
        self.metadata += tuple((key.lower(), value) for key, value in carrier.items() if key.lower() not in names)

    def record(self, response: pb.GenerateResponse) -> None:
        """Record a response of the stream."""
        if self._span is None:
            return
        self._num_output += len(response.token_ids)
        if response.HasField("finish"):
            self._reasons[response.index] = REASONS.get(response.finish.reason, "other")
            self._num_prompt = response.finish.usage.prompt_tokens

    def end(self, error: BaseException | None = None) -> None:
        """End the span with its `error`; any but a ServiceError means that the caller left."""
        if (span := self._span) is None:
            return
        if self._reasons:
            span.set_attribute("gen_ai.response.finish_reasons", [self._reasons[i] for i in sorted(self._reasons)])
            span.set_attribute("gen_ai.usage.input_tokens", self._num_prompt)
            span.set_attribute("gen_ai.usage.output_tokens", self._num_output)
        if isinstance(error, ServiceError):
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", error.code)
            span.set_status(Status(StatusCode.ERROR, error.code))
        elif error is not None:
            span.set_attribute("error.type", "CANCELLED")
        span.end()


def _of_requests(requests: Sequence[pb.GenerateRequest], addresses: Sequence[str]) -> dict[str, Any]:
    models = {request.model for request in requests}
    chats = any(request.messages for request in requests)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if chats else "text_completion",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": models.pop() if len(models) == 1 else "",
        "server.address": ",".join(addresses),
    }
    if len(requests) != 1:
        return attributes | {"tandem.batch_size": len(requests)}
    (request,) = requests
    if request.request_id:
        attributes["tandem.request_id"] = request.request_id
    if request.session_id:
        attributes["gen_ai.conversation.id"] = request.session_id
    values = {field.name: value for field, value in request.sampling.ListFields()}
    for name in SAMPLING:
        if name in values and values[name] <= MAX_INT:
            attributes[f"gen_ai.request.{name}"] = values[name]
    if request.sampling.n > 1:
        attributes["gen_ai.request.choice.count"] = request.sampling.n
    return attributes
