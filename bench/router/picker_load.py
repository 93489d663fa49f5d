"""Time of an endpoint picker's decisions: 200 requests a second, arriving at random, in the mode of InferencePool."""

import asyncio
import contextlib
import json
import random
import sys
from itertools import accumulate
from typing import Any

import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from rich.console import Console

from bench.router.decisions import quantiles_ms
from bench.router.site import first_line, process
from bench.support.report import Bar
from cluster.network.rpc import channel
from cluster.process.memory import spare_the_started
from router.frontend.envoy.service import NAME

RATE, SECONDS = 200.0, 15.0
WARM_UP = 600
"""Requests before those that count."""
NUM_FAMILIES = 64
"""Prompts that some servers hold the beginning of."""
WORDS = {"short": 100, "long": 500}
"""Words of prompts; those of the other parts at this rate have 100 tokens."""
CUTS = 3
MAX_P50_MS = 1.0
ENDPOINT = "x-gateway-destination-endpoint"


def body_of(words: int, family: int, turn: int) -> bytes:
    """Return the body of a chat of so many words, most of which all turns of a family share."""
    seeds = random.Random(family)
    story = " ".join(seeds.choice(("fox", "river", "stone", "house", "night", "child", "tree")) for _ in range(words))
    question = f"Tell me how it goes on, for the {turn}th time."
    messages = [{"role": "user", "content": story + ("" if turn == 0 else f"\n{question}")}]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 64, "stream": True}).encode()


def request_messages(body: bytes) -> list[Any]:
    headers = {":method": "POST", ":path": "/v1/chat/completions", "content-length": str(len(body))}
    entries = [{"key": key, "raw_value": value.encode()} for key, value in headers.items()]
    first = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers={"headers": entries}))
    first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = 4
    width = -(-len(body) // CUTS)
    chunks = [body[start : start + width] for start in range(0, len(body), width)]
    bodies = [pb.HttpBody(body=each, end_of_stream=each is chunks[-1]) for each in chunks]
    return [first, *(pb.ProcessingRequest(request_body=each) for each in bodies)]


def response_messages() -> list[Any]:
    headers = {"headers": [{"key": ":status", "raw_value": b"200"}]}
    events = [pb.HttpBody(body=b"data: {}\n\n"), pb.HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True)]
    began = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=headers))
    return [began, *(pb.ProcessingRequest(response_body=each) for each in events)]


async def exchange(to_picker: Any, body: bytes, wait_s: float) -> float:
    """Return the seconds from the end of a request's body to its endpoint; the answer takes `wait_s`."""
    loop = asyncio.get_running_loop()
    call = to_picker()
    for message in request_messages(body):
        await call.write(message)
    ended_at = loop.time()
    answer = await call.read()
    taken_s = loop.time() - ended_at
    assert answer.dynamic_metadata["envoy.lb"][ENDPOINT]
    await call.read()
    await asyncio.sleep(wait_s)
    for message in response_messages():
        await call.write(message)
        await call.read()
    await call.done_writing()
    return taken_s


async def load(words: int, console: Console) -> dict[str, Any]:
    seeds = random.Random(2)
    moments = [moment for moment in accumulate(seeds.expovariate(RATE) for _ in range(9999)) if moment < SECONDS]
    bodies = [body_of(words, seeds.randrange(2 * NUM_FAMILIES), 1 + turn) for turn, _ in enumerate(moments)]
    async with contextlib.AsyncExitStack() as stack:
        command = (sys.executable, "-m", "bench.router.picker_site", str(words))
        site = await stack.enter_async_context(process(*command))
        to_picker = (await stack.enter_async_context(channel(await first_line(site)))).stream_stream(
            f"/{NAME}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        spare_the_started()
        loop = asyncio.get_running_loop()
        start, running = loop.time(), list[Any]()
        with console.status("endpoint picker"):
            for moment, body in zip(moments, bodies, strict=True):
                await asyncio.sleep(start + moment - loop.time())
                running.append(asyncio.ensure_future(exchange(to_picker, body, seeds.expovariate(1))))
            seen = await asyncio.gather(*running)
        assert site.stdin is not None
        site.stdin.write(f"{WARM_UP}\n".encode())
        picker = json.loads(await first_line(site))
    return {
        "requests": len(seen) - WARM_UP,
        "body_bytes": len(bodies[0]),
        "picker": picker,
        "gateway": quantiles_ms(seen[WARM_UP:]),
    }


def measure(console: Console) -> tuple[list[Bar], dict[str, Any]]:
    figures = {name: uvloop.run(load(words, console)) for name, words in WORDS.items()}
    what = f"endpoint picker at {RATE:g} requests/s, 64 endpoints, {WORDS['short']} words"
    picker = figures["short"]["picker"]
    return [
        Bar(f"{what}: decision, ms p50", picker["decision"]["p50_ms"], MAX_P50_MS),
        Bar("the same, ms from a body's end to its answer, p50", picker["answer"]["p50_ms"], MAX_P50_MS),
    ], figures
