"""Traces of a real cluster, at a collector that speaks OpenTelemetry's protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.errors import InvalidRequest
from cluster.network.rpc import channel
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from support.processes import until
from tandem.client import Client
from tandem.client.sync_client import SyncClient

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it gets: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for of_resource in request.resource_spans:
            attributes = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += [(attributes["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until_ended(self, count: int) -> None:
        """So many requests' own spans have come."""

        await until(
            lambda: sum(span.name == "generate" for _, span in self.spans) >= count, f"{count} traces have come"
        )


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0.1)


async def test_one_trace_from_the_client_to_the_lender(model: Path, cluster_of: Any) -> None:
    async with collecting() as (collector, endpoint):
        router = {"otlp_endpoint": endpoint, "http_port": 0, "decode_prefill_tokens_per_s": 100.0}
        async with cluster_of(model, prefill=1, decode=1, router=router, engine="sim") as cluster:
            async with channel(cluster.address) as link:
                stub = pb_grpc.InferenceStub(link)
                request = pb.GenerateRequest(token_ids=range(300), sampling=pb.Sampling(max_tokens=4))
                async for _ in stub.Generate(request, metadata=(("traceparent", TRACEPARENT),)):
                    pass
                bad = pb.GenerateRequest(token_ids=[5000])
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in stub.Generate(bad):
                        pass
            body = {"prompt": [7, 8, 9], "max_tokens": 2}
            url = f"http://{cluster.router.http_address}/v1/completions"
            headers = {"traceparent": TRACEPARENT}
            async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as answer:
                assert answer.status == 200
            await collector.until_ended(3)
            await asyncio.sleep(0)
    roots = [span for _, span in collector.spans if span.name == "generate"]
    by_grpc, failed, by_http = sorted(roots, key=lambda span: span.start_time_unix_nano)
    for root in (by_grpc, by_http):
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert failed.trace_id.hex() != TRACE
    assert "token_ids" in failed.status.message
    children = [(service, span) for service, span in collector.spans if span.parent_span_id == by_grpc.span_id]
    assert {service for service, _ in children} == {"tandem-router", "tandem-decode", "tandem-prefill"}
    names = {span.name for _, span in children}
    assert {
        "tokenise",
        "router queue",
        "lender prefill",
        "transfer of the last blocks",
        "prompt tail",
        "decode",
    } <= names
    attributes = {each.key: each.value for each in by_grpc.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 300
    assert attributes["tandem.kv.moved_blocks"].int_value == 18
    # Every moment until the first token is in a span.
    first_ns = by_grpc.start_time_unix_nano + round(attributes["tandem.ttft_ms"].double_value * 1e6)
    reached = by_grpc.start_time_unix_nano
    for span in sorted((span for _, span in children), key=lambda span: span.start_time_unix_nano):
        if span.start_time_unix_nano < first_ns:
            assert span.start_time_unix_nano <= reached + 5_000
            reached = max(reached, span.end_time_unix_nano)
    assert reached >= first_ns - 5_000


async def test_a_collector_that_is_not_there_harms_nobody(model: Path, cluster_of: Any) -> None:
    router = {"otlp_endpoint": "http://127.0.0.1:1"}
    cluster = cluster_of(model, prefill=0, decode=1, router=router, engine="sim")
    async with cluster, channel(cluster.address) as link:
        request = pb.GenerateRequest(token_ids=range(30), sampling=pb.Sampling(max_tokens=4))
        tokens = [t async for m in pb_grpc.InferenceStub(link).Generate(request) for t in m.token_ids]
    assert len(tokens) == 4


def _spans_of_client(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Of this process, as if the program had set OpenTelemetry up."""
    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    return kept


async def test_the_client_begins_the_trace(model: Path, cluster_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _spans_of_client(monkeypatch)
    sampling = pb.Sampling(max_tokens=4, temperature=0)
    async with collecting() as (collector, endpoint):
        # A step takes its time: the answer that is left must not be over before the router hears of it.
        router = {"otlp_endpoint": endpoint}
        cluster = cluster_of(model, prefill=0, decode=1, router=router, engine="sim", sim_step_ms=5)
        async with cluster, Client(cluster.address) as client:

            def by_sync_client() -> None:
                with SyncClient(cluster.address) as sync:
                    list(sync.generate(token_ids=range(20), sampling=sampling))

            async for _ in client.generate(token_ids=range(30), sampling=sampling, session_id="s", request_id="mine"):
                pass
            await asyncio.to_thread(by_sync_client)
            requests = [pb.GenerateRequest(token_ids=range(9), sampling=sampling)] * 2
            async for _ in client.generate_batch(requests):
                pass
            with pytest.raises(InvalidRequest):
                async for _ in client.generate(token_ids=[5000]):
                    pass
            long = client.generate(
                token_ids=range(30), sampling=pb.Sampling(max_tokens=4000), metadata=(("traceparent", TRACEPARENT),)
            )
            async with aclosing(long):
                await anext(long)
        await collector.until_ended(6)  # the router has said all it had when it left
    single, sync, batch, failed, left = kept.get_finished_spans()
    roots = {}
    for _, root in collector.spans:
        if root.name == "generate":
            roots.setdefault((root.trace_id.hex(), root.parent_span_id.hex()), []).append(root)

    def under(span: Any) -> list[Any]:
        return roots.pop((f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"))

    assert [len(under(span)) for span in (single, sync, batch, failed)] == [1, 1, 2, 1]
    ((parent, (cancelled,)),) = roots.items()
    assert parent == (TRACE, PARENT), "what the caller says goes before the span"
    attributes = {each.key: each.value.string_value for each in cancelled.attributes}
    assert attributes["error.type"] == "CANCELLED"
    assert dict(single.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "",
        "server.address": cluster.address,
        "tandem.request_id": "mine",
        "gen_ai.conversation.id": "s",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 4,
    }
    assert [(span.attributes or {}).get("error.type") for span in (sync, batch, failed, left)] == [
        None,
        None,
        "INVALID_ARGUMENT",
        "CANCELLED",
    ]
