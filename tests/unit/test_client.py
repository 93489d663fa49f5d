"""What the client says to a router, and the span that it is part of."""

import sys
from typing import Any

import pytest

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tandem.client import Metadata, Target
from tandem.client.call_span import CallSpan
from tandem.client.sync_client import SyncClient


class Stub:
    """Of a router: keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Metadata]] = []

    async def Explain(self, request: pb.GenerateRequest, **how: Any) -> pb.Explanation:  # noqa: N802
        self.asked.append((request, how["metadata"]))
        return pb.Explanation()

    async def Tokenize(self, request: pb.TokenizeRequest, **how: Any) -> pb.TokenizeResponse:  # noqa: N802
        self.asked.append((request, how["metadata"]))
        return pb.TokenizeResponse(token_ids=[7])

    def Generate(self, request: pb.GenerateRequest, **how: Any) -> Any:  # noqa: N802
        self.asked.append((request, how["metadata"]))
        return Answer()


class Answer:
    """A stream of one message."""

    async def __aiter__(self) -> Any:
        yield pb.GenerateResponse(token_ids=[7], finish=pb.Finish())

    def cancel(self) -> None:
        """It is over."""


@pytest.mark.parametrize(("address", "key", "field"), [("b\udcff:1", "", "address"), ("b:1", "b\udcffd", "api_key")])
def test_what_cannot_be_sent_is_named(address: str, key: str, field: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be printable ASCII") as caught:
        Target(address, key).client()
    assert caught.value.field == field
    assert "\udcff" not in str(caught.value)


@pytest.fixture
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where OpenTelemetry is not installed."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


@pytest.mark.usefixtures("no_telemetry")
def test_all_that_a_request_may_say_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stub, chat = Stub(), {"messages": [("user", "hi")], "tools": ["{}"], "chat_template_kwargs": "{}"}
    of_tenant = {"tenant": "t", "priority": 3, "metadata": [("x-mine", "1")]}
    monkeypatch.setattr(pb_grpc, "InferenceStub", lambda channel: stub)
    with SyncClient("127.0.0.1:1", api_key="k") as client:
        client.explain(**chat, **of_tenant)
        client.tokenize(**chat)
        list(client.generate(**chat, **of_tenant, session_id="s"))
    explained, tokenized, generated = (request for request, _ in stub.asked)
    for request in (explained, tokenized, generated):
        assert [(m.role, m.content) for m in request.messages] == [("user", "hi")]
        assert (list(request.tools), request.chat_template_kwargs) == (["{}"], "{}")
    assert [(r.tenant, r.priority) for r in (explained, generated)] == [("t", 3)] * 2
    assert generated.session_id == "s"
    key = ("authorization", "Bearer k")
    assert [tuple(metadata) for _, metadata in stub.asked] == [(key, ("x-mine", "1")), (key,), (key, ("x-mine", "1"))]


@pytest.mark.usefixtures("no_telemetry")
def test_without_opentelemetry_a_span_is_nothing() -> None:
    span = CallSpan([pb.GenerateRequest()], ["a:1"], [("x-mine", "1")])
    span.record(pb.GenerateResponse(finish=pb.Finish()))
    span.end(ValueError())
    assert span.metadata == (("x-mine", "1"),)


def test_a_span_has_what_an_attribute_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    exports = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    provider, ended = sdk.TracerProvider(), exports.InMemorySpanExporter()
    provider.add_span_processor(sdk.export.SimpleSpanProcessor(ended))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    request = pb.GenerateRequest(
        messages=[pb.ChatMessage(role="user", content="secret")], model="m", sampling=pb.Sampling(seed=2**64 - 1, n=2)
    )
    span = CallSpan([request], ["a:1", "b:1"], ())
    span.end()
    (told,) = ended.get_finished_spans()
    assert told.name == "chat m"
    assert dict(told.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "m",
        "gen_ai.request.choice.count": 2,
        "server.address": "a:1,b:1",
    }
    context = told.context
    ((key, sent),) = span.metadata
    assert key == "traceparent"
    assert str(sent).startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
