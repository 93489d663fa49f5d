"""Attacks of a tenant that is limited to one request per second and one running sequence.

Each runs in a process of its own until it is killed: `python -m bench.neighbours.attacks NAME GRPC HTTP KEY`.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import socket
import struct
import sys
import zlib
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc

HIGHEST = (1 << 31) - 1
BODY_BYTES = (4 << 20) - 4096
NICENESS = 19
"""An attacker's own work is done on another machine; here it must not take the cluster's cores."""


class Attacker:
    """Connections of one attacking client."""

    def __init__(self, grpc_address: str, http_address: str, key: str) -> None:
        self._http = http_address
        self._key = key
        self._metadata = [("authorization", f"Bearer {key}")]
        limits = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(grpc_address, options=limits) for _ in range(4)]
        self._numbers = itertools.count()

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channels[next(self._numbers) % len(self._channels)]

    @property
    def stub(self) -> pb_grpc.InferenceStub:
        return pb_grpc.InferenceStub(self.channel)

    async def generate(self, request: pb.GenerateRequest) -> None:
        """Send a request and read what comes; most are refused."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in self.stub.Generate(request, metadata=self._metadata):
                pass

    async def batch(self, batch: pb.GenerateBatchRequest) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in self.stub.GenerateBatch(batch, metadata=self._metadata):
                pass

    async def post(self, path: str, body: bytes, withheld: int = 0, headers: str = "") -> bytes:
        """Send a body, but for its last `withheld` bytes, and return the answer; of no answer, nothing."""
        host, port = self._http.rsplit(":", 1)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n{headers}\r\n"
            writer.write(head.encode() + body[: len(body) - withheld])
            answer = await reader.read()
            writer.close()
            return answer
        return b""

    async def giant_prompts(self) -> None:
        body = json.dumps({"model": "model", "prompt": "the cat sat on " * (BODY_BYTES // 15), "max_tokens": 1})
        await _always(4, lambda: self.post("/v1/completions", body.encode()))

    async def giant_chats(self) -> None:
        most = pb.GenerateRequest(model="model", messages=[pb.ChatMessage(role="user", content="a")] * 4096)
        more = pb.GenerateRequest(model="model", messages=[pb.ChatMessage(role="user")] * (BODY_BYTES // 8))
        each = itertools.cycle((most, more))
        await _always(4, lambda: self.generate(next(each)))

    async def json_values(self) -> None:
        body = b'{"model": "model", "prompt": [' + b"[]," * (BODY_BYTES // 3) + b"[]]}"
        await _always(4, lambda: self.post("/v1/completions", body))

    async def grammars(self) -> None:
        """Wide ones that compile in about half a second, such as take too long, and deep ones."""
        await _always(4, lambda: self.generate(self._with_grammar()))

    def _with_grammar(self) -> pb.GenerateRequest:
        number = next(self._numbers)
        wide = {"type": "object", "properties": {f"p{number}_{i}": {"type": "integer"} for i in range(2200)}}
        slow = {"type": "object", "patternProperties": {f"^a{number}_{i}$": {"type": "integer"} for i in range(1500)}}
        deep = "".join(f'a{i}: (((((((((("y"|a{i + 1})))))))))) \n' for i in range(900)) + 'a900: "x"\n'
        texts = (
            pb.StructuredOutput(json_schema=json.dumps(wide)),
            pb.StructuredOutput(json_schema=json.dumps(slow)),
            pb.StructuredOutput(grammar=f"start: a0\n{deep}"),
        )
        structured = texts[number % 3]
        sampling = pb.Sampling(max_tokens=2, structured=structured)
        return pb.GenerateRequest(model="model", text="Once", sampling=sampling)

    async def batches(self) -> None:
        one = pb.GenerateRequest(model="model", text="a " * 4500, sampling=pb.Sampling(max_tokens=1))
        batch = pb.GenerateBatchRequest(requests=[one] * 400, max_concurrent=256)
        await _always(16, lambda: self.batch(batch))

    async def files(self) -> None:
        """Batches of files, whose lines are refused and tried again."""
        await _always(4, self._batch_of_a_file)

    async def _batch_of_a_file(self) -> None:
        asked = {"model": "model", "prompt": "a " * 4500, "max_tokens": 1}
        lines = [{"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": asked} for n in range(400)]
        content = "".join(f"{json.dumps(line)}\n" for line in lines)
        part = '--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
        form = part % ("purpose", "batch") + part % ('file"; filename="f', content) + "--x--\r\n"
        answer = await self.post("/v1/files", form.encode(), 0, "content-type: multipart/form-data; boundary=x\r\n")
        if (found := re.search(rb"file-[0-9a-f]{32}", answer)) is not None:
            body = {"input_file_id": found[0].decode(), "endpoint": "/v1/completions", "completion_window": "1m"}
            await self.post("/v1/batches", json.dumps(body).encode())

    async def slow_bodies(self) -> None:
        body = json.dumps({"model": "model", "prompt": "a" * (BODY_BYTES - 100), "max_tokens": 1}).encode()
        await _always(60, lambda: self.post("/v1/completions", body, withheld=1))

    async def stop_ids(self) -> None:
        most = pb.Sampling(max_tokens=1500, min_tokens=1500, stop_token_ids=range(3, 259), temperature=1.0)
        more = pb.Sampling(max_tokens=1500, min_tokens=1500, stop_token_ids=[3] * 500_000)
        each = itertools.cycle((most, more))
        await _always(2, lambda: self.generate(pb.GenerateRequest(model="model", text="Once", sampling=next(each))))

    async def penalties(self) -> None:
        options = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
        sampling = pb.Sampling(max_tokens=300, temperature=1.0, ignore_eos=True, **options)
        prompt = [3 + number % 2000 for number in range(1700)]
        request = pb.GenerateRequest(model="model", token_ids=prompt, sampling=sampling)
        await _always(2, lambda: self.generate(request))

    async def priorities(self) -> None:
        sampling = pb.Sampling(max_tokens=200, ignore_eos=True)
        top = pb.GenerateRequest(model="model", text="Once", sampling=sampling, priority=HIGHEST)
        usual = pb.GenerateRequest(model="model", text="Once", sampling=sampling)
        each = itertools.cycle((top, usual))
        await _always(64, lambda: self.generate(next(each)))

    async def pictures(self) -> None:
        """Files that announce or unpack to far more than they are, broken ones, and URLs of this host."""
        urls = [f"http://{self._http}/metrics", *(f"data:image/png;base64,{_png(*each)}" for each in PICTURES)]
        bodies = [_chat_with(url) for url in urls]
        each = itertools.cycle(bodies)
        await _always(4, lambda: self.post("/v1/chat/completions", next(each)))

    async def idle(self) -> None:
        """Health watches and connections that say nothing."""
        host, port = self._http.rsplit(":", 1)
        sockets = []
        for _ in range(500):
            sockets.append(socket.create_connection((host, int(port))))
            await asyncio.sleep(0)

        async def watch() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest()):
                    pass

        await _always(1000, watch)

    async def floods(self) -> None:
        tokenize = pb.TokenizeRequest(model="model", text="a " * 2000)
        explain = pb.GenerateRequest(model="model", text="Once upon a time")

        async def ask() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if next(self._numbers) % 2:
                    await self.stub.Tokenize(tokenize, metadata=self._metadata)
                else:
                    await self.stub.Explain(explain, metadata=self._metadata)

        await _always(32, ask)


PICTURES = ((65_535, 65_535, 64), (64, 64, 200 << 20), (8_000, 8_000, 8_000 * 24_001), (64, 64, 8))
"""Width and height of pictures that their files announce, and bytes that these unpack to."""


def _png(width: int, height: int, num_bytes: int) -> str:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(num_bytes), 9))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")).decode()


def _chat_with(url: str) -> bytes:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {"model": "seeing", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return json.dumps(body).encode()


ATTACKS = (
    "giant_prompts",
    "giant_chats",
    "json_values",
    "grammars",
    "batches",
    "files",
    "slow_bodies",
    "stop_ids",
    "penalties",
    "pictures",
    "priorities",
    "idle",
    "floods",
)


async def _always(num_tasks: int, work: Callable[[], Awaitable[object]]) -> None:
    """Do the work again and again, so many at a time; with a pause, so that refusals are no busy loop."""

    async def one() -> None:
        while True:
            await work()
            await asyncio.sleep(0.02)

    await asyncio.gather(*(one() for _ in range(num_tasks)))


if __name__ == "__main__":
    os.nice(NICENESS)
    _, name, grpc_address, http_address, key = sys.argv

    async def attack() -> None:
        await getattr(Attacker(grpc_address, http_address, key), name)()

    asyncio.run(attack())
