"""A router that stands still for longer than it waits for a silent worker: it blames none, and loses no stream.

`TANDEM_STOPPED_STREAMS` sets the number of streams; `make test-faults` takes 5,000.
"""

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import grpc
import pytest

from cluster.errors import Overloaded, ServiceError, Unavailable
from conftest import ModelFactory
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from support.processes import LENDER_ALWAYS, Stream, finished
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

NUM_STREAMS = int(os.environ.get("TANDEM_STOPPED_STREAMS", "60"))
STOPPED_S = 15.0
DEADLINE_S = 100.0 if NUM_STREAMS < 1000 else 250.0
NUM_TOKENS = 250
PROMPTS = [list(range(start, start + 40)) for start in range(1, 9)]


async def plain_stream(stub: pb_grpc.InferenceStub, prompt: list[int]) -> list[int]:
    """Tokens of a client that sends no pings, so that it waits for the router however long it takes."""
    sampling = pb.Sampling(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    tokens: list[int] = []
    async for message in stub.Generate(pb.GenerateRequest(token_ids=prompt, sampling=sampling), timeout=DEADLINE_S):
        tokens += message.token_ids
    return tokens


async def outcome(stream: "asyncio.Future[Any]") -> list[int] | ServiceError:
    try:
        result = await stream
    except ServiceError as error:
        return error
    return result.token_ids if isinstance(result, Stream) else list(result)


async def test_a_router_that_was_stopped_loses_no_stream_and_no_worker(
    sim_model: ModelFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    model = sim_model(400)
    router = {"model": model, "port": 0, "worker_silence_s": 10.0, "log_level": "info"} | LENDER_ALWAYS
    settings = {"model": model, "engine": "sim", "kv_memory_mib": 256, "sim_step_ms": 60.0, "max_batch_tokens": 8192}
    streams: list[tuple[int, asyncio.Future[Any]]] = []
    async with (
        LocalCluster(plan_topology(1, 2, router, settings, [0, 1])) as cluster,
        Client(cluster.address) as client,
        grpc.aio.insecure_channel(cluster.address) as channel,
    ):
        whole = await finished([Stream(client, prompt, NUM_TOKENS, timeout_s=DEADLINE_S) for prompt in PROMPTS])
        expected = [stream.token_ids for stream in whole]
        stub = pb_grpc.InferenceStub(channel)
        for number in range(NUM_STREAMS):
            prompt = PROMPTS[number % len(PROMPTS)]
            if number % 3:
                streams.append((number, asyncio.ensure_future(plain_stream(stub, prompt))))
            else:
                streams.append((number, Stream(client, prompt, NUM_TOKENS, timeout_s=DEADLINE_S).task))
            await asyncio.sleep(0.004)
        await asyncio.sleep(3.0)
        cluster.router.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        cluster.router.process.send_signal(signal.SIGCONT)
        found = await asyncio.gather(*(outcome(stream) for _, stream in streams))
    kinds = Counter(type(each).__name__ for each in found)
    for (number, _), each in zip(streams, found, strict=True):
        if isinstance(each, list):
            assert each == expected[number % len(PROMPTS)]
        else:  # the client's own keepalive gave the router up, and says so
            assert isinstance(each, Unavailable | Overloaded), each
            assert number % 3 == 0, "a client without keepalive waits"
    assert kinds["list"] >= NUM_STREAMS * 2 // 3
    said = capfd.readouterr().err
    assert "was silent for" not in said, "it was the router that stood still"
    assert "the event loop stood still" in said
