"""Workers without a router: the benchmark decides who lends to whom."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from cluster.errors import Unavailable
from cluster.network.mux_stream import MuxStream
from cluster.network.rpc import Server
from engine.config import WorkerConfig
from kvcache.block_keys import block_keys, root_key
from loans.network import Blocks, Want
from loans.peers.connection import pack_want, unpack_lent
from protos import decode_pb2, loans_pb2, membership_pb2, membership_pb2_grpc
from protos import inference_pb2 as pb
from router.decode_client.decode_streams import DecodeStream
from router.placement.fleet.introductions import holder_of, peers_of
from router.placement.fleet.worker_records import WorkerRecord
from tandem.local.local_cluster import RoleProcess, start_role, stop_process

REQUEST_TIMEOUT_S = 900.0
"""Deadline of a request, in seconds: a CPU without bfloat16 products computes a long prompt for minutes."""


class _Listener(membership_pb2_grpc.MembershipServicer):
    """Membership service that names workers to each other as a router does, and places nothing."""

    def __init__(self) -> None:
        self.hellos: dict[str, membership_pb2.Hello] = {}
        """Workers that have joined."""
        self.reported: set[str] = set()
        """Workers that have sent a load report, which makes them ready."""
        self.links: dict[str, DecodeStream] = {}
        self.changed = asyncio.Event()

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[membership_pb2.WorkerMessage], context: Any
    ) -> AsyncIterator[membership_pb2.RouterMessage]:
        hello = (await anext(aiter(request_iterator))).hello
        self.hellos[hello.worker_id] = hello
        peers = peers_of(hello, map(WorkerRecord, self.hellos.values()))
        key = hello.worker_id.encode()
        welcome = membership_pb2.Welcome(router_id="bench", incarnation=b"bench", peers=peers, stream_key=key)
        yield membership_pb2.RouterMessage(welcome=welcome)

        def received(event: membership_pb2.WorkerMessage) -> None:
            if event.HasField("load"):
                self.reported.add(hello.worker_id)
                self.changed.set()

        link = DecodeStream(hello.stream_address, key, hello.worker_id, lambda: None, received, None)
        self.links[hello.worker_id] = link
        try:
            async for _ in request_iterator:
                pass
        finally:
            link.break_off(Unavailable("the worker left"))


class Workers:
    """Async context manager of started workers by id."""

    def __init__(self, **workers: dict[str, Any]) -> None:
        """Take settings by worker id; ids begin with the role."""
        self._settings = workers
        self._roles: list[RoleProcess] = []
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        self._listener, self._server = _Listener(), Server()
        membership_pb2_grpc.add_MembershipServicer_to_server(self._listener, self._server.grpc)
        self._port = await self._server.start("127.0.0.1", 0, [])
        await asyncio.gather(*(self.start(name, settings) for name, settings in self._settings.items()))
        return self

    async def start(self, name: str, settings: dict[str, Any]) -> None:
        """Start a worker, and wait until it is ready."""
        self._roles.append(await self._start(name, settings))
        while name not in self._listener.reported:
            self._listener.changed.clear()
            await asyncio.wait_for(self._listener.changed.wait(), 30)

    async def stop(self, name: str) -> None:
        """Stop a worker."""
        role = self.role(name)
        self._roles.remove(role)
        await stop_process(role.process)
        del self._listener.hellos[name]
        self._listener.reported.discard(name)

    async def _start(self, name: str, settings: dict[str, Any]) -> RoleProcess:
        config = WorkerConfig.parse({"worker_id": name, "routers": (f"127.0.0.1:{self._port}",)} | settings)
        return await start_role(f"{name.split('_')[0]}_worker", name, config)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(stop_process(role.process) for role in self._roles))
        await self._server.stop(0.1)

    def role(self, name: str) -> RoleProcess:
        return next(role for role in self._roles if role.name == name)

    def hello(self, name: str) -> membership_pb2.Hello:
        return self._listener.hellos[name]

    async def decode(
        self, name: str, prompt: Sequence[int], lender: str | None, may_compute: bool = True
    ) -> tuple[pb.Receipt, float]:
        """Decode one token of `prompt` on worker `name`; return its receipt and the seconds to the token."""
        request = self._request(name, prompt, lender, may_compute)
        started_at = time.perf_counter()
        last = [message async for message in self._listener.links[name].generate(request, REQUEST_TIMEOUT_S)][-1]
        return pb.GenerateResponse.FromString(last).finish.receipt, time.perf_counter() - started_at

    def _request(
        self, name: str, prompt: Sequence[int], lender: str | None, may_compute: bool
    ) -> decode_pb2.DecodeRequest:
        request = decode_pb2.DecodeRequest(
            request_id=f"bench-{next(self._numbers)}",
            worker_incarnation=self.hello(name).incarnation,
            prompt_token_ids=prompt,
            sampling=pb.Sampling(max_tokens=1, temperature=0, top_p=1, ignore_eos=True),
        )
        if lender is not None:
            request.lender.CopyFrom(decode_pb2.Lender(worker=holder_of(self.hello(lender)), may_compute=may_compute))
        return request

    async def lend(self, name: str, tokens: Sequence[int]) -> float:
        """Borrow without reading, so that `name` computes missing blocks; return seconds from start to last block."""
        hello = self.hello(name)
        root = root_key(hello.model_fingerprint, "")
        keys = block_keys(root, tokens, hello.block_tokens)
        request_id = f"bench-{next(self._numbers)}"
        want = Want(request_id, keys, 0, may_compute=True, token_ids=tokens, root=root)
        opening = loans_pb2.EngineHello(
            version=hello.loan_version,
            worker_id="bench",
            incarnation=request_id.encode(),
            wanted_incarnation=hello.incarnation,
            model_fingerprint=hello.model_fingerprint,
        )
        stream, ended = MuxStream(opening.SerializeToString()), asyncio.get_running_loop().create_future()
        await stream.connect(hello.loan_address, None)
        num_left, started_at = len(keys), 0.0

        def lent(messages: Sequence[bytes]) -> None:
            nonlocal num_left, started_at
            for message in map(unpack_lent, messages):
                if isinstance(message, Blocks):
                    num_left -= len(message.block_ids)
                else:
                    started_at = time.perf_counter()
            if not num_left and not ended.done():
                ended.set_result(time.perf_counter() - started_at)

        beating = asyncio.ensure_future(_beat(stream))
        loan = stream.mux.open(pack_want(want))
        loan.on_messages = lent
        loan.on_end = lambda reason: ended.set_exception(RuntimeError(reason.decode(errors="replace")))
        try:
            seconds: float = await ended
        finally:
            beating.cancel()
            loan.cancel()
            stream.end()
        return seconds


async def _beat(stream: MuxStream) -> None:
    """Send signs of life, as an engine's loop does: a lender gives up a silent borrower."""
    while True:
        await asyncio.sleep(1.0)
        stream.mux.beat()
