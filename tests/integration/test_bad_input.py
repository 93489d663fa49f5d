"""Whatever arrives, the answer is a typed error that names the field at fault, and serving goes on.

One cluster of real processes over the sim engine; its workers also join a router of this test's own, which overhears
what a peer must know to speak to them. After every test a good request is served and every block is free.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.errors import (
    DeadlineExceeded,
    Incompatible,
    InvalidRequest,
    Overloaded,
    ServiceError,
    UnknownModel,
    from_rpc_error,
)
from cluster.rpc import channel
from engine.worker.config import WorkerConfig
from protos import decode_pb2, decode_pb2_grpc, lend_pb2, lend_pb2_grpc, membership_pb2, membership_pb2_grpc
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from router.config import RouterConfig
from tandem.client import Client
from tandem.local import RoleProcess, start_role, stop_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB = 1000
CONTEXT = 100_000
POOL_TOKENS = 8192
"""1 MiB of the sim engine's blocks."""
BLOCK = 16
GOOD = list(range(1, 4 * BLOCK + 2))


class OverhearingRouter(membership_pb2_grpc.MembershipServicer):
    """A router that only listens."""

    def __init__(self) -> None:
        self.hellos: dict[str, membership_pb2.Hello] = {}
        self.complete = asyncio.Event()
        """Both workers have joined."""

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[membership_pb2.WorkerMessage], context: Any
    ) -> AsyncIterator[membership_pb2.RouterMessage]:
        async for message in request_iterator:
            if message.HasField("hello"):
                self.hellos[message.hello.worker_id] = message.hello
                if len(self.hellos) == 2:
                    self.complete.set()
                yield membership_pb2.RouterMessage(welcome=membership_pb2.Welcome(router_id="overhearing"))


@dataclass
class Site:
    """The running cluster, and what its workers said of themselves."""

    router: RoleProcess
    workers: list[RoleProcess]
    model: Path
    hellos: dict[str, membership_pb2.Hello]
    links: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    def link(self, address: str) -> grpc.aio.Channel:
        """One channel per process, without limits on what may be sent."""
        if address not in self.links:
            options = [("grpc.max_send_message_length", -1)]
            self.links[address] = grpc.aio.insecure_channel(address, options=options)
        return self.links[address]

    @property
    def prefill(self) -> membership_pb2.Hello:
        return self.hellos["prefill-0"]

    @property
    def decode(self) -> membership_pb2.Hello:
        return self.hellos["decode-0"]


def write_model(path: Path, **values: Any) -> Path:
    path.mkdir()
    config = {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    (path / "config.json").write_text(json.dumps(config | values))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    model = write_model(tmp_path_factory.mktemp("bad-input") / "simulated")
    overhearing, listener = OverhearingRouter(), grpc.aio.server()
    membership_pb2_grpc.add_MembershipServicer_to_server(overhearing, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    router = await start_role("router", "router", RouterConfig(model=model, port=0))
    routers = (router.address, f"127.0.0.1:{port}")
    workers: list[RoleProcess] = []
    try:
        settings = {"model": model, "engine": "sim", "sim_step_ms": 1.0, "kv_memory_mib": 1, "routers": routers}
        starts = [
            start_role(f"{role}_worker", f"{role}-0", WorkerConfig.parse({"worker_id": f"{role}-0"} | settings))
            for role in ("prefill", "decode")
        ]
        workers += await asyncio.gather(*starts)
        async with Client(router.address) as client:
            await client.wait_for_workers(1, 1, 20)
        await asyncio.wait_for(overhearing.complete.wait(), 20)
        made = Site(router, workers, model, overhearing.hellos)
        yield made
        for link in made.links.values():
            await link.close()
    finally:
        await asyncio.gather(*(stop_process(role.process) for role in [*workers, router]))
        await listener.stop(None)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def still_serving(site: Site, ask: Any, audit: Any) -> AsyncIterator[None]:
    """After each test: the same processes serve, and hold nothing."""
    yield
    async with Client(site.router.address) as client:
        answer = await ask(client, GOOD, max_tokens=4, timeout_s=10.0)
        assert len(answer.token_ids) == 4
    assert all(role.process.returncode is None for role in [site.router, *site.workers])
    await audit([worker.address for worker in site.workers])


async def refusal(call: Any, under_way: bool = False) -> ServiceError:
    """The typed error that a call ends with. Fails when it hangs, or when it succeeds."""
    try:
        async with asyncio.timeout(10):
            if under_way:
                while await call.read() is not grpc.aio.EOF:
                    pass
            elif hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call succeeded")


def generate(site: Site, **fields: Any) -> Any:
    return pb_grpc.InferenceStub(site.link(site.router.address)).Generate(pb.GenerateRequest(**fields), timeout=10)


# ------------------------------------------------------------------------------------------- the public API

SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": -(1 << 31)}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": float("-inf")}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": -0.5}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_p": float("inf")}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 65}, "n"),
    ({"n": 64, "max_tokens": POOL_TOKENS // 32}, "max_tokens"),
    ({"beam_width": 0}, "beam_width"),
    ({"beam_width": 65}, "beam_width"),
    ({"beam_width": 2, "n": 3}, "n"),
    ({"beam_width": 2, "temperature": 0.5}, "temperature"),
    ({"beam_width": 2, "top_p": 0.5}, "top_p"),
    ({"beam_width": 2, "presence_penalty": 0.5}, "presence_penalty"),
    ({"beam_width": 2, "min_tokens": 3}, "min_tokens"),
    ({"beam_width": 2, "logit_bias": {1: 1.0}}, "logit_bias"),
    ({"beam_width": 2, "logprobs": 0}, "logprobs"),
    ({"beam_width": 2, "stop": ["x"]}, "stop"),
    ({"beam_width": 2, "stop_token_ids": list(range(17))}, "stop_token_ids"),
    ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
    ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
    ({"length_penalty": 1.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"structured": pb.StructuredOutput()}, "structured"),
    ({"structured": pb.StructuredOutput(regex="a", json_object=True)}, "structured"),
    ({"structured": pb.StructuredOutput(choice=[""])}, "structured.choice"),
    ({"structured": pb.StructuredOutput(grammar="x" * 65_537)}, "structured.grammar"),
    ({"structured": pb.StructuredOutput(regex="the model has no tokenizer")}, "structured"),
]


@pytest.mark.parametrize(("sampling", "name"), SAMPLING, ids=[f"{next(iter(s.items()))}"[:40] for s, _ in SAMPLING])
async def test_sampling_out_of_range(site: Site, sampling: dict[str, Any], name: str) -> None:
    error = await refusal(generate(site, token_ids=GOOD, sampling=pb.Sampling(**sampling)))
    assert isinstance(error, InvalidRequest)
    assert error.field == f"sampling.{name}"


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
    "largest token": ({"token_ids": [(1 << 32) - 1]}, "token_ids"),
    "as long as the context": ({"token_ids": [1] * CONTEXT}, "token_ids"),
    "longer than the context": ({"token_ids": [1] * (3 * CONTEXT)}, "token_ids"),
    "beyond the context with its answer": (
        {"token_ids": [1] * 100, "sampling": pb.Sampling(max_tokens=CONTEXT - 99)},
        "sampling.max_tokens",
    ),
    "beyond the pool": (
        {"token_ids": [1] * 100, "sampling": pb.Sampling(max_tokens=POOL_TOKENS - 99)},
        "sampling.max_tokens",
    ),
    "prompt beyond the pool": (
        {"token_ids": [1] * (POOL_TOKENS + 1), "sampling": pb.Sampling(max_tokens=1)},
        "sampling.max_tokens",
    ),
    "long name": ({"token_ids": [1], "tenant": "x" * 257}, "tenant"),
    "long salt": ({"token_ids": [1], "cache_salt": "x" * 100_000}, "cache_salt"),
}


@pytest.mark.parametrize(("fields", "name"), PROMPTS.values(), ids=PROMPTS)
async def test_prompts_that_cannot_be_served(site: Site, fields: dict[str, Any], name: str) -> None:
    error = await refusal(generate(site, **fields))
    assert isinstance(error, InvalidRequest)
    assert error.field == name


async def test_an_unknown_model(site: Site) -> None:
    error = await refusal(generate(site, token_ids=GOOD, model="another"))
    assert isinstance(error, UnknownModel)
    assert error.field == "model"


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
    assert isinstance(await refusal(stub.Generate(request, timeout=timeout_s)), DeadlineExceeded)


# ---------------------------------------------------------------------------------------- bytes on the wire

METHODS = {
    "Inference/Generate": ("router", "/tandem.v1.Inference/Generate"),
    "Inference/Explain": ("router", "/tandem.v1.Inference/Explain"),
    "Inference/ListModels": ("router", "/tandem.v1.Inference/ListModels"),
    "Membership/Join": ("router", "/tandem.internal.v1.Membership/Join"),
    "Decode/Generate": ("decode", "/tandem.internal.v1.Decode/Generate"),
    "Lend/Lend of a prefill worker": ("prefill", "/tandem.internal.v1.Lend/Lend"),
    "Lend/Lend of a decode worker": ("decode", "/tandem.internal.v1.Lend/Lend"),
    "Worker/Audit": ("prefill", "/tandem.internal.v1.Worker/Audit"),
}
MALFORMED = b"\x0a\xff\xff\xff\xff\x0fnot a message"


def address_of(site: Site, who: str) -> str:
    return site.router.address if who == "router" else site.hellos[f"{who}-0"].address


@pytest.mark.parametrize(("who", "method"), METHODS.values(), ids=METHODS)
async def test_bytes_that_are_no_message(site: Site, who: str, method: str) -> None:
    link = site.link(address_of(site, who))
    streams = method.rpartition("/")[2] in ("Join", "Lend")
    call = link.stream_stream(method)(iter([MALFORMED])) if streams else link.unary_stream(method)(MALFORMED)
    error = await refusal(call)
    assert error.code is grpc.StatusCode.UNKNOWN, "gRPC's own answer, before any of our code runs"
    assert "parsing" in error.message


@pytest.mark.parametrize(("who", "method"), METHODS.values(), ids=METHODS)
async def test_a_message_of_100_mb(site: Site, who: str, method: str) -> None:
    link = site.link(address_of(site, who))
    streams = method.rpartition("/")[2] in ("Join", "Lend")
    huge = bytes(100 << 20)
    call = link.stream_stream(method)(iter([huge])) if streams else link.unary_stream(method)(huge)
    assert isinstance(await refusal(call), Overloaded)


async def test_an_unknown_method(site: Site) -> None:
    for who in ("router", "prefill", "decode"):
        error = await refusal(site.link(address_of(site, who)).unary_unary("/tandem.v1.Inference/Nonsense")(b""))
        assert error.code is grpc.StatusCode.UNIMPLEMENTED


# ------------------------------------------------------------------------------------------------- lending


def want(site: Site, **fields: Any) -> lend_pb2.LendRequest:
    good = {
        "lender_incarnation": site.prefill.incarnation,
        "model_fingerprint": site.prefill.model_fingerprint,
        "token_ids": GOOD[: 4 * BLOCK],
        "may_compute": True,
    }
    return lend_pb2.LendRequest(want=lend_pb2.Want(**(good | fields)))


def release(first: int, count: int) -> lend_pb2.LendRequest:
    return lend_pb2.LendRequest(release=lend_pb2.Release(first=first, count=count))


@asynccontextmanager
async def loan(site: Site, **fields: Any) -> AsyncIterator[Any]:
    """A loan of four blocks, all of them announced."""
    call = lend_pb2_grpc.LendStub(site.link(site.prefill.address)).Lend()
    try:
        await call.write(want(site, **fields))
        announced = 0
        while announced < 4:
            response = await asyncio.wait_for(call.read(), 10)
            assert response is not grpc.aio.EOF, await call.details()
            announced += len(response.starting.ready.block_ids) + len(response.blocks_ready.block_ids)
        yield call
    finally:
        call.cancel()


WANTS: dict[str, tuple[dict[str, Any], type[ServiceError], str]] = {
    "wrong incarnation": ({"lender_incarnation": b"x" * 16}, Incompatible, "lender_incarnation"),
    "no incarnation": ({"lender_incarnation": b""}, Incompatible, "lender_incarnation"),
    "wrong fingerprint": ({"model_fingerprint": b"x" * 32}, Incompatible, "model_fingerprint"),
    "no tokens": ({"token_ids": []}, InvalidRequest, "first_block"),
    "less than a block": ({"token_ids": GOOD[:15]}, InvalidRequest, "first_block"),
    "first block beyond the last": ({"first_block": 4}, InvalidRequest, "first_block"),
    "first block far beyond": ({"first_block": (1 << 32) - 1}, InvalidRequest, "first_block"),
    "token out of range": ({"token_ids": [VOCAB] * 64}, InvalidRequest, "token_ids"),
    "more than the pool": ({"token_ids": [1] * (POOL_TOKENS + BLOCK)}, Overloaded, ""),
}


@pytest.mark.parametrize(("fields", "kind", "name"), WANTS.values(), ids=WANTS)
async def test_loans_that_are_refused(site: Site, fields: dict[str, Any], kind: type[ServiceError], name: str) -> None:
    stub = lend_pb2_grpc.LendStub(site.link(site.prefill.address))
    call = stub.Lend()
    await call.write(want(site, **fields))  # and no half-close: who is done may be gone before he is refused
    error = await refusal(call, under_way=True)
    assert type(error) is kind
    assert error.field == name


@pytest.mark.parametrize("first", [[], [release(0, 1)], [lend_pb2.LendRequest()]], ids=["nothing", "release", "empty"])
async def test_a_loan_must_begin_with_want(site: Site, first: list[lend_pb2.LendRequest]) -> None:
    error = await refusal(lend_pb2_grpc.LendStub(site.link(site.prefill.address)).Lend(iter(first)))
    assert isinstance(error, InvalidRequest)
    assert error.field == "want"


@pytest.mark.parametrize(("first", "count"), [(4, 1), (3, 2), (0, 0), (0, 5), (1 << 31, 1 << 31), (0, (1 << 32) - 1)])
async def test_release_of_blocks_that_are_not_held(site: Site, first: int, count: int) -> None:
    async with loan(site) as call:
        await call.write(release(first, count))
        error = await refusal(call, under_way=True)
    assert isinstance(error, InvalidRequest)
    assert error.field == "release"


async def test_a_release_given_twice(site: Site) -> None:
    async with loan(site) as call:
        await call.write(release(1, 2))
        await call.write(release(2, 1))
        error = await refusal(call, under_way=True)
    assert isinstance(error, InvalidRequest)
    assert error.field == "release"


async def test_a_second_want(site: Site) -> None:
    async with loan(site) as call:
        await call.write(want(site))
        error = await refusal(call, under_way=True)
    assert isinstance(error, InvalidRequest)
    assert error.field == "release"


async def test_bytes_that_are_no_message_in_the_middle_of_a_loan(site: Site) -> None:
    """The stream is the lease: it must end, or the blocks would be held for as long as the borrower keeps it open."""
    call = site.link(site.prefill.address).stream_stream("/tandem.internal.v1.Lend/Lend")()
    await call.write(want(site).SerializeToString())
    await asyncio.wait_for(call.read(), 10)
    await call.write(MALFORMED)
    try:
        error = await refusal(call, under_way=True)
    finally:
        call.cancel()
    assert isinstance(error, InvalidRequest)
    assert error.field == "release"


async def test_a_good_loan_ends_well(site: Site) -> None:
    """That the refusals above are not for another reason."""
    async with loan(site) as call:
        await call.write(release(0, 4))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK


# ------------------------------------------------------------------------------------------------ decoding

DECODES: dict[str, tuple[dict[str, Any], type[ServiceError], str]] = {
    "wrong incarnation": ({"worker_incarnation": b"x" * 16}, Incompatible, "worker_incarnation"),
    "no incarnation": ({"worker_incarnation": b""}, Incompatible, "worker_incarnation"),
    "no prompt": ({"prompt_token_ids": []}, InvalidRequest, "prompt_token_ids"),
    "token out of range": ({"prompt_token_ids": [1, VOCAB]}, InvalidRequest, "prompt_token_ids"),
    "emitted token out of range": ({"emitted_token_ids": [VOCAB]}, InvalidRequest, "emitted_token_ids"),
    "nothing to generate": ({"sampling": pb.Sampling(max_tokens=0)}, InvalidRequest, "sampling.max_tokens"),
    "less than nothing": ({"sampling": pb.Sampling(max_tokens=-5)}, InvalidRequest, "sampling.max_tokens"),
    "all emitted already": ({"emitted_token_ids": [1, 2, 3, 4]}, InvalidRequest, "sampling.max_tokens"),
    "no choice": ({"sampling": pb.Sampling(max_tokens=4, n=0)}, InvalidRequest, "sampling.n"),
    "too many choices": ({"sampling": pb.Sampling(max_tokens=4, n=1 << 30)}, InvalidRequest, "sampling.n"),
    "too many beams": (
        {"sampling": pb.Sampling(max_tokens=4, beam_width=1 << 30)},
        InvalidRequest,
        "sampling.beam_width",
    ),
    "more choices than beams": (
        {"sampling": pb.Sampling(max_tokens=4, n=3, beam_width=2)},
        InvalidRequest,
        "sampling.n",
    ),
    "all choices finished": ({"finished_choices": [0]}, InvalidRequest, "finished_choices"),
    "a choice that there is not": ({"finished_choices": [7]}, InvalidRequest, "emitted_choices"),
    "tokens of a choice that there is not": (
        {"emitted_choices": [decode_pb2.EmittedChoice(index=1, token_ids=[1])]},
        InvalidRequest,
        "emitted_choices",
    ),
    "a token out of range in another choice": (
        {"emitted_choices": [decode_pb2.EmittedChoice(index=0, token_ids=[VOCAB])]},
        InvalidRequest,
        "emitted_choices",
    ),
    "more prompt scores than prompt": ({"emitted_prompt_logprobs": 1 << 20}, InvalidRequest, "emitted_prompt_logprobs"),
    "more than the pool": ({"sampling": pb.Sampling(max_tokens=POOL_TOKENS)}, Overloaded, "max_tokens"),
    "a grammar for the sim engine": (
        {"sampling": pb.Sampling(max_tokens=4, structured=pb.StructuredOutput(json_object=True))},
        InvalidRequest,
        "sampling.structured",
    ),
    "two grammars": (
        {"sampling": pb.Sampling(max_tokens=4, structured=pb.StructuredOutput(regex="a", choice=["a"]))},
        InvalidRequest,
        "sampling.structured",
    ),
}


@pytest.mark.parametrize(("fields", "kind", "name"), DECODES.values(), ids=DECODES)
async def test_placed_requests_that_are_refused(
    site: Site, fields: dict[str, Any], kind: type[ServiceError], name: str
) -> None:
    good = {
        "worker_incarnation": site.decode.incarnation,
        "prompt_token_ids": GOOD,
        "sampling": pb.Sampling(max_tokens=4, temperature=0.0, top_p=1.0),
    }
    stub = decode_pb2_grpc.DecodeStub(site.link(site.decode.address))
    assert [m async for m in stub.Generate(decode_pb2.DecodeRequest(**good))][-1].HasField("finish")
    error = await refusal(stub.Generate(decode_pb2.DecodeRequest(**(good | fields))))
    assert type(error) is kind
    assert error.field == name


@pytest.mark.parametrize("wrong", ["address", "incarnation", "self"])
async def test_a_lender_that_is_not_there_costs_a_recompute_only(site: Site, wrong: str) -> None:
    lender = lend_pb2.Holder(worker_id="prefill-0", address=site.prefill.address, incarnation=site.prefill.incarnation)
    if wrong == "address":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            lender.address = f"127.0.0.1:{unused.getsockname()[1]}"
    elif wrong == "incarnation":
        lender.incarnation = b"x" * 16
    else:
        lender.address, lender.incarnation = site.decode.address, site.decode.incarnation
    request = decode_pb2.DecodeRequest(
        worker_incarnation=site.decode.incarnation,
        prompt_token_ids=GOOD,
        sampling=pb.Sampling(max_tokens=4),
        cache_salt=wrong,
        lender=decode_pb2.Lender(worker=lender, may_compute=True),
    )
    stub = decode_pb2_grpc.DecodeStub(site.link(site.decode.address))
    finish = [message async for message in stub.Generate(request, timeout=10)][-1].finish
    assert finish.receipt.kv.loan_failure
    assert finish.receipt.kv.computed_blocks == 5
    assert finish.receipt.kv.moved_blocks == 0


# ------------------------------------------------------------------------------------------------- joining


async def join(site: Site, *messages: membership_pb2.WorkerMessage) -> ServiceError:
    stub = membership_pb2_grpc.MembershipStub(site.link(site.router.address))

    async def outgoing() -> AsyncIterator[membership_pb2.WorkerMessage]:
        for message in messages:
            yield message
        await asyncio.sleep(60)  # a stream that ends would be a worker that leaves

    return await refusal(stub.Join(outgoing()))


def hello(site: Site, **fields: Any) -> membership_pb2.WorkerMessage:
    changed = membership_pb2.Hello()
    changed.CopyFrom(site.decode)
    changed.worker_id = "a-newcomer"
    for name, value in fields.items():
        setattr(changed, name, value)
    return membership_pb2.WorkerMessage(hello=changed)


async def only_one_decode_worker(site: Site) -> None:
    """A newcomer's stream has ended, and the newcomer with it."""
    give_up_at = time.monotonic() + 10
    async with Client(site.router.address) as client:
        while True:
            if (await client.list_models())[0].decode_workers == 1:
                return
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["load", "cache", "empty"])
async def test_joining_without_hello(site: Site, kind: str) -> None:
    first = {
        "load": membership_pb2.WorkerMessage(load=membership_pb2.LoadReport()),
        "cache": membership_pb2.WorkerMessage(cache=membership_pb2.CacheEvents()),
        "empty": membership_pb2.WorkerMessage(),
    }[kind]
    error = await join(site, first)
    assert isinstance(error, InvalidRequest)
    assert error.field == "hello"


async def test_two_hellos(site: Site) -> None:
    error = await join(site, hello(site), hello(site))
    assert isinstance(error, InvalidRequest)
    assert error.field == "hello"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_id", ""),
        ("address", ""),
        ("incarnation", b""),
        ("role", membership_pb2.ROLE_UNSPECIFIED),
        ("role", 77),
        ("model_fingerprint", b""),
        ("block_tokens", 0),
        ("num_blocks", 0),
        ("block_bytes", 0),
    ],
)
async def test_a_hello_that_would_break_placement(site: Site, name: str, value: Any) -> None:
    """A worker that joins with it would fail every client's request, not only its own."""
    error = await join(site, hello(site, **{name: value}))
    assert isinstance(error, InvalidRequest)
    assert error.field == name


async def test_joining_with_another_models_config(site: Site) -> None:
    error = await join(site, hello(site, config_fingerprint=b"x" * 16))
    assert isinstance(error, Incompatible)
    assert error.field == "model"


async def test_cache_events_that_make_no_sense_ask_for_a_snapshot(site: Site) -> None:
    """Keys that are no whole keys, sequences from elsewhere: nothing breaks, and a resync is asked for."""
    stub = membership_pb2_grpc.MembershipStub(site.link(site.router.address))
    call = stub.Join()
    await call.write(hello(site))
    assert (await call.read()).HasField("welcome")
    events = [membership_pb2.CacheEvent(parent=b"", stored=b"odd", removed=b"never stored")]
    await call.write(membership_pb2.WorkerMessage(cache=membership_pb2.CacheEvents(sequence=1 << 60, events=events)))
    assert (await asyncio.wait_for(call.read(), 10)).HasField("resync")
    call.cancel()
    await only_one_decode_worker(site)


# -------------------------------------------------------------------------------- processes that cannot start


async def last_words(module: str, *settings: str) -> tuple[int | None, str]:
    """Exit code and last line on standard error of a process that must end by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *(argument for setting in settings for argument in ("--set", setting)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
    except TimeoutError:
        await stop_process(process)
        return process.returncode, "it was still running"
    return process.returncode, (stderr.decode().strip().splitlines() or [""])[-1]


async def test_a_process_that_cannot_start_says_which_setting_is_at_fault(site: Site, tmp_path: Path) -> None:
    model, taken = f"model={site.model}", site.router.address.rpartition(":")[2]
    other = write_model(tmp_path / "other", vocab_size=VOCAB + 1)
    (tmp_path / "no-json").mkdir()
    (tmp_path / "no-json" / "config.json").write_text("{")
    write_model(tmp_path / "no-vocabulary", vocab_size=None)
    cases: dict[tuple[str, ...], str] = {
        ("router", model, "nonsense=1"): "nonsense",
        ("router",): "model",
        ("router", model, f"port={taken}"): "port",
        ("router", model, "port=70000"): "port",
        ("router", f"model={tmp_path}/absent"): "model",
        ("router", f"model={tmp_path}/no-json"): "model",
        ("router", f"model={tmp_path}/no-vocabulary", "port=0"): "model",
        ("prefill_worker", model, "engine=sim", "nonsense=1"): "nonsense",
        ("prefill_worker", model, "engine=sim", f"port={taken}"): "port",
        ("prefill_worker", model, "engine=simm"): "engine",
        ("prefill_worker", model, "engine=sim", "kv_memory_mib=0"): "kv_memory_mib",
        ("decode_worker", "engine=sim", f"model={tmp_path}/absent"): "model",
        ("decode_worker", "engine=sim", f"model={tmp_path}"): "model",
        ("decode_worker", "engine=sim", f"model={tmp_path}/no-vocabulary"): "model",
        ("decode_worker", model, "engine=sim", "cores=[4096]"): "cores",
        ("decode_worker", f"model={other}", "engine=sim", f"routers=[{site.router.address}]"): "model",
    }
    endings = await gather_few([lambda case=case: last_words(*case) for case in cases])
    for (case, name), (code, line) in zip(cases.items(), endings, strict=True):
        assert code == 2, (case, code, line)
        assert line.startswith(f"error: {name}: "), (case, line)


async def gather_few(calls: Sequence[Callable[[], Awaitable[Any]]], at_once: int = 3) -> list[Any]:
    """All of them, few at a time: each is a process with imports of its own."""
    room = asyncio.Semaphore(at_once)

    async def run(call: Callable[[], Awaitable[Any]]) -> Any:
        async with room:
            return await call()

    return await asyncio.gather(*(run(call) for call in calls))


# ------------------------------------------------------------------------------------- health and reflection


async def test_health_of_every_process(site: Site) -> None:
    services = {
        "router": ["", "tandem.v1.Inference", "tandem.internal.v1.Membership"],
        "prefill": ["", "tandem.internal.v1.Lend", "tandem.internal.v1.Worker"],
        "decode": ["", "tandem.internal.v1.Lend", "tandem.internal.v1.Worker", "tandem.internal.v1.Decode"],
    }
    for who, names in services.items():
        stub = health_pb2_grpc.HealthStub(site.link(address_of(site, who)))
        for name in names:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, (who, name)
        error = await refusal(stub.Check(health_pb2.HealthCheckRequest(service="nonsense"), timeout=5))
        assert error.code is grpc.StatusCode.NOT_FOUND


async def test_reflection_of_every_process(site: Site) -> None:
    services = {
        "router": {"tandem.v1.Inference", "tandem.internal.v1.Membership"},
        "prefill": {"tandem.internal.v1.Lend", "tandem.internal.v1.Worker"},
        "decode": {"tandem.internal.v1.Lend", "tandem.internal.v1.Worker", "tandem.internal.v1.Decode"},
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
    """`cluster.rpc.channel` itself refuses to send what no server would take."""
    async with channel(site.router.address) as link:
        call = pb_grpc.InferenceStub(link).Generate(pb.GenerateRequest(token_ids=[1], tenant="x" * (17 << 20)))
        assert isinstance(await refusal(call), Overloaded)
