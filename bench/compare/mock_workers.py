"""Mock decode workers that speak Tandem's own protocol, with the steps of `http_wire`: the router alone is measured.

`python -m bench.compare.mock_workers MODEL ROUTER COUNT STEP_MS` joins the router and prints one line.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from cluster.fair_turns import Waker
from cluster.network.mux import Channel
from cluster.network.mux_stream import MuxServer, MuxStream
from cluster.network.rpc import PROTOCOL, channel
from engine.model.model_dir import ModelDir
from protos import decode_pb2, membership_pb2, membership_pb2_grpc
from protos import inference_pb2 as pb

NUM_BLOCKS, BLOCK_TOKENS = 1 << 20, 32
REPORT_S = 0.02
TOKEN = pb.GenerateResponse(token_ids=[7], text=" w7").SerializeToString()


class MockDecode:
    """Decode worker: each step gives every running request one token, all in one frame."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.step = 0
        self.num_running = 0
        self.seen: dict[str, int] = {}
        """Highest placement of each router."""
        self.stream: asyncio.Future[MuxStream] = asyncio.get_running_loop().create_future()

    def accept(self, stream: MuxStream, opening: bytes) -> None:
        """Serve the router's connection."""
        arrived: dict[Channel, decode_pb2.DecodeRequest] = {}
        running: dict[Channel, tuple[int, decode_pb2.DecodeRequest]] = {}
        waker = Waker()

        def received(opened: Channel, opening: bytes) -> None:
            request = arrived[opened] = decode_pb2.DecodeRequest.FromString(opening)
            self.seen[request.router_id] = request.placement_sequence
            waker.wake()

        async def steps() -> None:
            while True:
                if not arrived and not running:
                    await waker.sleep()
                    continue
                running.update((opened, (request.sampling.max_tokens, request)) for opened, request in arrived.items())
                arrived.clear()
                await asyncio.sleep(self._step_s)
                self.step += 1
                for opened, (left, request) in tuple(running.items()):
                    if left == 1 or not opened.is_open:  # done or cancelled
                        del running[opened]
                        opened.send(_last(request))
                        opened.end()
                    else:
                        running[opened] = left - 1, request
                        opened.send(TOKEN)
                self.num_running = len(running)

        stream.on_channel = received
        stepping = asyncio.ensure_future(steps())
        stream.on_end.append(lambda _: stepping.cancel())
        self.stream.set_result(stream)


def _last(request: decode_pb2.DecodeRequest) -> bytes:
    """Return the last message, with a receipt as a worker writes it."""
    receipt = pb.Receipt(
        request_id=request.request_id,
        placement=request.placement,
        kv=pb.KvReceipt(block_tokens=BLOCK_TOKENS, computed_tokens=len(request.prompt_token_ids)),
        stages=[*request.router_stages, pb.Stage(name="decode", where="mock", duration_ms=1.0)],
        model=request.model,
    )
    usage = pb.Usage(
        prompt_tokens=len(request.prompt_token_ids), completion_tokens=request.sampling.max_tokens, cached_tokens=0
    )
    finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage, receipt=receipt)
    return pb.GenerateResponse(token_ids=[7], text=" w7", finish=finish).SerializeToString()


async def _stay_joined(router: str, hello: membership_pb2.Hello, worker: MockDecode) -> None:
    async def said() -> AsyncIterator[membership_pb2.WorkerMessage]:
        yield membership_pb2.WorkerMessage(hello=hello)
        await asyncio.get_running_loop().create_future()

    async def report() -> None:
        stream = await worker.stream
        while True:
            worker.step += 1
            load = membership_pb2.LoadReport(
                step=worker.step,
                running=worker.num_running,
                decoding=worker.num_running,
                available_blocks=NUM_BLOCKS,
                num_blocks=NUM_BLOCKS,
                placements_seen=worker.seen,
            )
            stream.mux.note(membership_pb2.WorkerMessage(load=load).SerializeToString())
            await asyncio.sleep(REPORT_S)

    reporting = asyncio.ensure_future(report())
    try:
        async with channel(router) as link:
            async for _ in membership_pb2_grpc.MembershipStub(link).Join(said()):
                pass
    finally:
        reporting.cancel()


async def main(model: Path, router: str, count: int, step_s: float) -> None:
    servers, joined, model_dir = [], [], ModelDir.open(model)
    for number in range(count):
        worker = MockDecode(step_s)
        server = MuxServer(worker.accept)
        port = await server.start("127.0.0.1", 0, "port")
        servers.append(server)  # a server ends when it is garbage collected
        hello = membership_pb2.Hello(
            worker_id=f"mock-{number}",
            incarnation=f"mock-{number}-{time.time_ns()}".encode(),
            role=membership_pb2.ROLE_DECODE,
            address=f"127.0.0.1:{port}",
            stream_address=f"127.0.0.1:{port}",
            model=model.name,
            model_fingerprint=b"mock",
            config_fingerprint=model_dir.config_fingerprint(),
            block_tokens=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            block_bytes=1 << 16,
            max_context_tokens=model_dir.max_context_tokens,
            transport="none",
            protocol=PROTOCOL,
        )
        joined.append(asyncio.ensure_future(_stay_joined(router, hello, worker)))
    print("joined", flush=True)
    await asyncio.wait(
        [*joined, asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)], return_when="FIRST_COMPLETED"
    )
    for each in joined:
        if each.done():
            each.result()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]) / 1e3))
