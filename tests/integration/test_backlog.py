"""Requests that come together at a router which stands still: each is answered, or refused with a typed error."""

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.rpc import code_pb2
from grpc_status import rpc_status

from conftest import ModelFactory
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from support.long_runs import long
from support.openai_http import http_cluster

GRPC_CALLS, HTTP_CALLS = 2500, 500
"""By default gRPC drops calls at random from 1,000 on that the server has not accepted."""
STOPPED_S = 2.0


async def by_grpc(stub: pb_grpc.InferenceStub, number: int, timeout_s: float = 120.0) -> str:
    sampling = pb.Sampling(max_tokens=1, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=[1 + number % 390, 2, 3], sampling=sampling)
    try:
        messages = [message async for message in stub.Generate(request, timeout=timeout_s)]
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)  # a status of gRPC's own has no details
        return "bare " + error.code().name if status is None else code_pb2.Code.Name(status.code)
    return "answered" if messages[-1].HasField("finish") else "cut off"


async def by_http(address: str, number: int) -> str:
    host, port = address.rsplit(":", 1)
    body = json.dumps({"prompt": [1 + number % 390, 2, 3], "max_tokens": 1, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    status = int(head_bytes.split()[1])
    fields = json.loads(content)
    return "answered" if status == 200 and fields["choices"] else f"{status} {fields['error']['type']}"


async def test_calls_that_wait_for_a_stopped_router_are_answered_or_refused_typed(sim_model: ModelFactory) -> None:
    settings = {"engine": "sim", "sim_step_ms": 0.0}
    model = sim_model(400)
    async with (
        http_cluster(model, router={"max_queued_per_tenant": 1000}, **settings) as cluster,
        grpc.aio.insecure_channel(cluster.address) as channel,
    ):
        stub = pb_grpc.InferenceStub(channel)
        assert await by_grpc(stub, 0) == "answered"
        cluster.router.process.send_signal(signal.SIGSTOP)
        calls = [asyncio.ensure_future(by_grpc(stub, number)) for number in range(GRPC_CALLS)]
        posts = [asyncio.ensure_future(by_http(cluster.router.http_address, number)) for number in range(HTTP_CALLS)]
        await asyncio.sleep(STOPPED_S)
        cluster.router.process.send_signal(signal.SIGCONT)
        answers, pages = Counter(await asyncio.gather(*calls)), Counter(await asyncio.gather(*posts))
    assert set(answers) <= {"answered", "RESOURCE_EXHAUSTED"}, answers
    assert set(pages) <= {"answered", "429 rate_limit_error"}, pages
    assert answers["answered"] >= GRPC_CALLS // 4


@contextmanager
def busy_cores(count: int = 2) -> Iterator[None]:
    """Loops that take the cores away from the cluster."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


@long
async def test_no_call_of_a_storm_ends_with_a_bare_status(sim_model: ModelFactory) -> None:
    """300 calls a second at a router that stands still for 2.5 of 4 seconds: they wait for minutes to be accepted."""
    settings = {"engine": "sim", "sim_step_ms": 0.0}
    async with (
        http_cluster(sim_model(400), router={"max_queued_per_tenant": 1000}, **settings) as cluster,
        grpc.aio.insecure_channel(cluster.address) as channel,
    ):
        stub, calls = pb_grpc.InferenceStub(channel), []
        assert await by_grpc(stub, 0) == "answered"

        async def start() -> None:
            for number in range(4500):
                calls.append(asyncio.ensure_future(by_grpc(stub, number, 900.0)))
                await asyncio.sleep(1 / 300)

        with busy_cores():
            starting = asyncio.ensure_future(start())
            while not starting.done() or not all(call.done() for call in calls):
                cluster.router.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(2.5)
                cluster.router.process.send_signal(signal.SIGCONT)
                await asyncio.sleep(1.5)
        answers = Counter(call.result() for call in calls)
    print(f"\n{dict(answers)}")
    assert set(answers) <= {"answered", "RESOURCE_EXHAUSTED"}, answers


@long
async def test_no_call_to_a_router_that_was_stopped_for_a_minute_ends_with_a_bare_status(
    sim_model: ModelFactory,
) -> None:
    settings = {"engine": "sim", "sim_step_ms": 0.0}
    async with (
        http_cluster(sim_model(400), router={"max_queued_per_tenant": 1000}, **settings) as cluster,
        grpc.aio.insecure_channel(cluster.address) as channel,
    ):
        stub = pb_grpc.InferenceStub(channel)
        assert await by_grpc(stub, 0) == "answered"
        cluster.router.process.send_signal(signal.SIGSTOP)
        calls = [asyncio.ensure_future(by_grpc(stub, number, 900.0)) for number in range(8000)]
        await asyncio.sleep(60)
        cluster.router.process.send_signal(signal.SIGCONT)
        answers = Counter(await asyncio.gather(*calls))
    print(f"\n{dict(answers)}")
    assert set(answers) <= {"answered", "RESOURCE_EXHAUSTED"}, answers
