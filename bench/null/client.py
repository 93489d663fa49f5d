"""Client of an HTTP server, as a process that answers loads: `python -m bench.null.client PORT completions|chat`.

It looks at arriving bytes only for the number of events, so that it takes little of the cores that it shares with the
servers.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import cast

import uvloop

from bench.compare.http_wire import MODEL_NAME
from bench.vllm.streams import FIRST_TOKENS, Offered, StreamLoad, private_output

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
COUNT = b'"completion_tokens":'


class _Stream(asyncio.Protocol):
    """Connection with one streamed request."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.times: list[float] = []
        """Times at which events arrived."""
        self.num_tokens = 0
        self.failure = ""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent_at = time.monotonic()
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self.failure = data[:300].decode(errors="replace")
        num_events = data.count(b"data: {")
        if num_events > (not self.times and b'"content":""' in data):  # a chat begins with an event without text
            self.times.append(time.monotonic())
        self._tail = (self._tail + data)[-4096:]

    def connection_lost(self, error: Exception | None) -> None:
        at = self._tail.rfind(COUNT)
        if at >= 0:
            number = self._tail[at + len(COUNT) :].lstrip()
            self.num_tokens = int(number[: next(i for i, c in enumerate(number) if not 48 <= c < 58)])
        self.over.set_result(None)


def _request(load: StreamLoad, number: int, api: str) -> bytes:
    options = load.options(number) | {"stream": True, "stream_options": {"include_usage": True}, "model": MODEL_NAME}
    prompt = load.prompt(number)
    if api == "chat":
        words = " ".join(f"w{token_id}" for token_id in prompt)
        body = options | {"messages": [{"role": "user", "content": words}]}
    else:
        body = options | {"prompt": prompt}
    data = json.dumps(body).encode()
    head = f"POST {PATHS[api]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


async def offer(load: StreamLoad, began_at: float, port: int, api: str) -> Offered:
    """Offer a load and return its times; a stream with too few tokens is lost."""
    numbers = range(load.first, load.first + load.streams)
    requests = [_request(load, number, api) for number in numbers]
    await asyncio.sleep(max(0.0, began_at - time.monotonic()))
    loop = asyncio.get_running_loop()
    streams = [_Stream(request) for request in requests]
    await asyncio.gather(*(loop.create_connection(lambda s=s: s, "127.0.0.1", port) for s in streams))  # type: ignore[misc]
    await asyncio.gather(*(stream.over for stream in streams))
    offered = Offered(began_at, ended_at=time.monotonic())
    for stream in streams:
        if stream.failure or stream.num_tokens != load.output_tokens or not stream.times:
            offered.lost.append(stream.failure or f"{stream.num_tokens} of {load.output_tokens} tokens")
            continue
        offered.tokens += stream.num_tokens
        offered.ttft_ms.append(1e3 * (stream.times[0] - stream.sent_at))
        offered.gaps_ms += [1e3 * (later - earlier) for earlier, later in pairwise(stream.times[FIRST_TOKENS:])]
    return offered


async def main(arguments: Sequence[str]) -> None:
    output, loop = private_output(), asyncio.get_running_loop()
    print("{}", file=output, flush=True)
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        asked = json.loads(line)
        began_at = asked.pop("began_at")
        offered = await offer(StreamLoad(**asked), began_at, int(arguments[0]), arguments[1])
        print(json.dumps(asdict(offered)), file=output, flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
