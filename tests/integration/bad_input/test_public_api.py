"""Whatever arrives, the answer is a typed error that names the field at fault, and serving goes on.

One cluster of real processes over the sim engine; its workers also join a router of this test's own, which overhears
what a peer must know to speak to them. After every test a good request is served and every block is free.
"""

from typing import Any

import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, UnknownModel
from cluster.network.rpc import channel
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from support.observed_cluster import CONTEXT, GOOD, MALFORMED, POOL_TOKENS, VOCAB, Site, generate, refusal
from tandem.client import Client

pytestmark = pytest.mark.asyncio(loop_scope="module")


# ------------------------------------------------------------------------------------------- the public API

# One of each check: the tables are those of tests/unit/test_router_validation.py and test_structured.py.
SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": float("nan")}, "temperature"),
    ({"n": 64, "max_tokens": POOL_TOKENS // 32}, "max_tokens"),
    ({"beam_width": 2}, "beam_width"),
    ({"stop": [""]}, "stop"),
    ({"structured": pb.StructuredOutput(choice=[""])}, "structured.choice"),
    ({"structured": pb.StructuredOutput(regex="the model has no tokenizer")}, "structured"),
]


@pytest.mark.parametrize(("sampling", "name"), SAMPLING, ids=[f"{next(iter(s.items()))}"[:40] for s, _ in SAMPLING])
async def test_sampling_out_of_range(site: Site, sampling: dict[str, Any], name: str) -> None:
    error = await refusal(generate(site, token_ids=GOOD, sampling=pb.Sampling(**sampling)))
    assert (type(error), error.field) == (InvalidRequest, f"sampling.{name}")


USER = pb.ChatMessage(role="user", content="hello")
PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "text"),
    "empty text": ({"text": ""}, "text"),
    "text without tokenizer": ({"text": "hello"}, "text"),
    "messages without tokenizer": ({"messages": [USER]}, "messages"),
    "text and tokens": ({"text": "hello", "token_ids": [1]}, "token_ids"),
    "empty text and tokens": ({"text": "", "token_ids": [1]}, "token_ids"),
    "messages and tokens": ({"messages": [USER], "token_ids": [1]}, "token_ids"),
    "all three": ({"text": "hello", "messages": [USER], "token_ids": [1]}, "token_ids"),
    "token at the vocabulary's end": ({"token_ids": [1, VOCAB]}, "token_ids"),
    "as long as the context": ({"token_ids": [1] * CONTEXT}, "token_ids"),
    "beyond the pool": (
        {"token_ids": [1] * 100, "sampling": pb.Sampling(max_tokens=POOL_TOKENS - 99)},
        "sampling.max_tokens",
    ),
    "prompt beyond the pool": (
        {"token_ids": [1] * (POOL_TOKENS + 1), "sampling": pb.Sampling(max_tokens=1)},
        "sampling.max_tokens",
    ),
    "long name": ({"token_ids": [1], "tenant": "x" * 257}, "tenant"),
}


@pytest.mark.parametrize(("fields", "name"), PROMPTS.values(), ids=PROMPTS)
async def test_prompts_that_cannot_be_served(site: Site, fields: dict[str, Any], name: str) -> None:
    error = await refusal(generate(site, **fields))
    assert (type(error), error.field) == (InvalidRequest, name)


async def test_an_unknown_model(site: Site) -> None:
    error = await refusal(generate(site, token_ids=GOOD, model="another"))
    assert (type(error), error.field) == (UnknownModel, "model")


async def test_the_largest_request_that_fits_the_pool_is_served(site: Site) -> None:
    """The limits above are exact."""
    prompt = [1 + i % 900 for i in range(POOL_TOKENS - 1)]
    async with Client(site.router.address) as client:
        messages = [m async for m in client.generate(token_ids=prompt, sampling=pb.Sampling(max_tokens=1))]
    assert messages[-1].finish.usage.prompt_tokens == POOL_TOKENS - 1


@pytest.mark.parametrize("timeout_s", [0.0, 0.001, 0.15])
async def test_a_deadline_too_short(site: Site, timeout_s: float) -> None:
    """However far the request comes, its blocks are free at once; `still_serving` checks that."""
    stub = pb_grpc.InferenceStub(site.link(site.router.address))
    prompt = [2 + i % 900 for i in range(2000)]
    request = pb.GenerateRequest(token_ids=prompt, sampling=pb.Sampling(max_tokens=6000))
    error = await refusal(stub.Generate(request, timeout=timeout_s))
    assert isinstance(error, DeadlineExceeded | Overloaded), "at the deadline, or before it where a miss is predicted"


# ---------------------------------------------------------------------------------------- bytes on the wire

METHODS = {
    "Inference/Generate": ("router", "/tandem.v1.Inference/Generate"),
    "Inference/Explain": ("router", "/tandem.v1.Inference/Explain"),
    "Inference/ListModels": ("router", "/tandem.v1.Inference/ListModels"),
    "Membership/Join": ("router", "/tandem.internal.v1.Membership/Join"),
    "Worker/Audit": ("prefill", "/tandem.internal.v1.Worker/Audit"),
    "Worker/Drain": ("prefill", "/tandem.internal.v1.Worker/Drain"),
}
STREAMING = ("Join",)


def address_of(site: Site, who: str) -> str:
    return site.router.address if who == "router" else site.hellos[f"{who}-0"].address


@pytest.mark.parametrize(("who", "method"), METHODS.values(), ids=METHODS)
async def test_bytes_that_are_no_message(site: Site, who: str, method: str) -> None:
    link = site.link(address_of(site, who))
    streams = method.rpartition("/")[2] in STREAMING
    call = link.stream_stream(method)(iter([MALFORMED])) if streams else link.unary_stream(method)(MALFORMED)
    error = await refusal(call)
    if method.endswith(("Generate", "Explain", "ListModels")):  # read on their own
        assert isinstance(error, InvalidRequest)
    else:
        assert error.code == "UNKNOWN", "gRPC's own answer, before any of our code runs"
    assert "parsing" in error.message


@pytest.mark.parametrize(("who", "method"), METHODS.values(), ids=METHODS)
async def test_a_message_of_100_mb(site: Site, who: str, method: str) -> None:
    link = site.link(address_of(site, who))
    streams = method.rpartition("/")[2] in STREAMING
    huge = bytes(100 << 20)
    call = link.stream_stream(method)(iter([huge])) if streams else link.unary_stream(method)(huge)
    assert isinstance(await refusal(call), Overloaded)


async def test_an_unknown_method(site: Site) -> None:
    for who in ("router", "prefill", "decode"):
        error = await refusal(site.link(address_of(site, who)).unary_unary("/tandem.v1.Inference/Nonsense")(b""))
        assert error.code == "UNIMPLEMENTED"


# ------------------------------------------------------------------------------------- health and reflection


async def test_health_of_every_process(site: Site) -> None:
    services = {
        "router": ["", "tandem.v1.Inference", "tandem.internal.v1.Membership"],
        "prefill": ["", "tandem.internal.v1.Worker"],
        "decode": ["", "tandem.internal.v1.Worker"],
    }
    for who, names in services.items():
        stub = health_pb2_grpc.HealthStub(site.link(address_of(site, who)))
        for name in names:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, (who, name)
        error = await refusal(stub.Check(health_pb2.HealthCheckRequest(service="nonsense"), timeout=5))
        assert error.code == "NOT_FOUND"


async def test_reflection_of_every_process(site: Site) -> None:
    services = {
        "router": {"tandem.v1.Inference", "tandem.internal.v1.Membership"},
        "prefill": {"tandem.internal.v1.Worker"},
        "decode": {"tandem.internal.v1.Worker"},
    }
    for who, names in services.items():
        stub = reflection_pb2_grpc.ServerReflectionStub(site.link(address_of(site, who)))
        requests: list[Message] = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in sorted(names)),
        ]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=5)]
        listed = {service.name for service in answers[0].list_services_response.service}
        assert names | {"grpc.health.v1.Health"} <= listed
        assert all(answer.file_descriptor_response.file_descriptor_proto for answer in answers[1:])


async def test_a_worker_that_answers_no_more_is_reported_by_its_channel(site: Site) -> None:
    """`cluster.network.rpc.channel` itself refuses to send what no server would take."""
    async with channel(site.router.address) as link:
        call = pb_grpc.InferenceStub(link).Generate(pb.GenerateRequest(token_ids=[1], tenant="x" * (17 << 20)))
        assert isinstance(await refusal(call), Overloaded)
