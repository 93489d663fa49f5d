"""Engines in processes of their own, without fronts. They reach each other by their own sockets."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster.errors import StartError
from cluster.roles import Role
from engine.config import WorkerConfig
from engine.core_types import SamplingParams, TokenLogprobs
from engine.messages.from_engine import (
    Audited,
    Filled,
    FromEngine,
    ItemsWanted,
    PromptScored,
    Ready,
    Rejected,
    StartFailed,
    StepTokens,
    Token,
)
from engine.messages.to_engine import Audit, Generate, ToEngine
from engine.process.front.engine_client import ChildEngine, EngineListener
from engine.process.spec import EngineSpec
from kvcache.block_keys import block_keys, root_key
from loans.account import KvAccount
from loans.network import Blocks, Lender, Lent, LoanGiven, LoanTaken, Peer, Started, Want
from loans.peers.socket_network import NetworkSettings, SocketNetwork
from support.processes import PATIENCE_S, gone, ranks_of
from worker.front.item_fetches import ItemFetches

START_S = 300.0


class RealEngine(EngineListener):
    """One engine, and all it said so far."""

    def __init__(self, name: str, model: Path, role: Role = "decode", **settings: Any) -> None:
        config = WorkerConfig.parse({"model": model, "kv_memory_mib": 8} | settings)
        self.name, self.incarnation = name, os.urandom(16)
        agent_name = f"{name}-{os.getpid()}-{id(self)}"
        self.host = ChildEngine(EngineSpec(config, role, agent_name, name, self.incarnation))
        self.tokens: dict[str, list[Token]] = {}
        self.said: list[FromEngine] = []
        self.end = ""
        self.fetches = ItemFetches(self)
        self._heard = asyncio.Event()
        self.ready: Ready

    async def start(self) -> "RealEngine":
        """Raises StartError."""
        self.host.start(self)
        await self.until(lambda: self.has_said(Ready, StartFailed), START_S)
        for message in self.said:
            if isinstance(message, StartFailed):
                field, _, reason = message.reason.partition(": ")
                raise StartError(field, reason)
            if isinstance(message, Ready):
                self.ready = message
        return self

    def on_messages(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            match message:
                case StepTokens():
                    for token in message.each():
                        self.tokens.setdefault(token.request_id, []).append(token)
                case ItemsWanted():
                    self.fetches.start(message)
                case _:
                    self.said.append(message)
        self._heard.set()

    def ended(self, how: str) -> None:
        self.end = how
        self._heard.set()

    def send(self, *messages: ToEngine) -> None:
        self.host.send(messages)

    async def until(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Of what the engine has said, which lives that long."""
        async with asyncio.timeout(patience_s):
            while not condition():
                assert not self.end, self.end
                self._heard.clear()
                await self._heard.wait()

    async def rejected(self) -> str:
        """Why."""
        await self.until(lambda: self.has_said(Rejected))
        (message,) = [message for message in self.said if isinstance(message, Rejected)]
        self.said.remove(message)
        return message.reason

    async def has_ended(self) -> str:
        """How."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.end:
                self._heard.clear()
                await self._heard.wait()
        return self.end

    def has_said(self, *kinds: type[FromEngine]) -> bool:
        return any(isinstance(message, kinds) for message in self.said)

    async def answer(self, request: Generate, lender: "RealEngine | None" = None) -> list[Token]:
        """All that comes of it."""
        self.send(request if lender is None else lent_by(lender, request))
        await self.until(lambda: self.over(request) or self.has_said(Rejected))
        assert not self.has_said(Rejected), self.said
        return self.tokens[request.request_id]

    async def filled(self, request: Generate) -> KvAccount:
        """Account of a request without output, once its blocks are there."""
        self.send(request)

        def ends() -> list[Filled]:
            return [m for m in self.said if isinstance(m, Filled) and m.request_id == request.request_id]

        await self.until(lambda: bool(ends()) or self.has_said(Rejected))
        assert ends(), self.said
        return ends()[0].account

    def over(self, request: Generate) -> bool:
        ends = sum(token.finish is not None for token in self.tokens.get(request.request_id, ()))
        return ends == request.sampling.n

    def scored(self, request_id: str) -> list[TokenLogprobs]:
        """Of its prompt."""
        found = [message for message in self.said if isinstance(message, PromptScored)]
        return [each for message in found if message.request_id == request_id for each in message.logprobs]

    async def audited(self) -> Audited:
        """Once nothing is held."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.send(Audit(1))
                await self.until(lambda: self.has_said(Audited))
                (found,) = [message for message in self.said if isinstance(message, Audited)]
                self.said.clear()
                assert found.fault == ""
                if found.held_blocks == found.loans == found.quarantined_blocks == 0:
                    return found

    @property
    def peer(self) -> Peer:
        """As other engines reach it."""
        return Peer(self.name, self.ready.loan_address, self.incarnation)

    @property
    def pid(self) -> int:
        return self.host.processes()[0]

    def rank_pids(self) -> list[int]:
        """Of the other ranks."""
        return ranks_of(self.pid)


def lent_by(lender: RealEngine, request: Generate) -> Generate:
    """The request, to borrow from an engine that computes what it lacks."""
    return request._replace(lender=Lender(lender.peer))


class Caller:
    """A peer in this process, over the network of engines, that asks an engine for blocks and reads none."""

    def __init__(self, engine: RealEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._on_readable: dict[int, Callable[[], object]] = {}
        settings = NetworkSettings("caller", os.urandom(16), "127.0.0.1", 0, "", silence_s=PATIENCE_S)
        self._network = SocketNetwork(settings, self)
        self._network.start(self, engine.ready.model_fingerprint, b"nowhere")
        self._turning = self._loop.create_task(self._turn())

    async def blocks(self, prompt: Sequence[int], compute: bool = False) -> list[int]:
        """Ask for all full blocks of a prompt, and return which blocks of its pool these are. It holds them.

        Without `compute` they are those that it has cached.
        """
        root = root_key(self._engine.ready.model_fingerprint, "")
        keys = block_keys(root, prompt, self._engine.ready.block_tokens)
        want = Want("caller", keys, 0, compute, tuple(prompt), root)
        asked = _Asked(self._network, self._engine.peer, want)
        while compute:  # until it has all
            cached = _Asked(self._network, self._engine.peer, want._replace(may_compute=False))
            await cached.until(lambda cached=cached: cached.is_whole)  # type: ignore[misc]
            if cached.started.end_block == len(keys):
                asked = cached
                break
            cached.taken.close()
        await asked.until(lambda: asked.is_whole)
        return asked.blocks

    def close(self) -> None:
        """Give up what it was lent."""
        self._turning.cancel()
        self._network.close()

    async def _turn(self) -> None:
        while True:
            self._network.turn()
            self._network.beat(is_alive=True)
            self._network.flush()
            await asyncio.sleep(0.005)

    # what the network calls, of its loop and of a lender

    def watch(self, descriptor: int, on_readable: Callable[[], object]) -> None:
        self._on_readable[descriptor] = on_readable
        self._loop.add_reader(descriptor, on_readable)

    def watch_writing(self, descriptor: int, is_wanted: bool) -> None:
        if is_wanted:
            self._loop.add_writer(descriptor, self._on_readable[descriptor])
        else:
            self._loop.remove_writer(descriptor)

    def unwatch(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)

    def wake(self) -> None:
        """Do nothing: it turns often."""

    def opened(self, loan: LoanGiven, want: Want) -> None:
        loan.refuse("this peer has nothing")

    def released(self, loan: LoanGiven, first: int, count: int) -> None: ...

    def closed(self, loan: LoanGiven) -> None: ...

    def met(self, endpoint: bytes) -> None: ...


class _Asked:
    """A loan that a caller asks for."""

    def __init__(self, network: SocketNetwork, peer: Peer, want: Want) -> None:
        self._lent: list[Lent] = []
        self._end = ""
        self.taken: LoanTaken = network.open(peer, want, self)

    def lent(self, message: Lent) -> None:
        self._lent.append(message)

    def ended(self, reason: str) -> None:
        self._end = reason

    @property
    def started(self) -> Started:
        started = self._lent[0]
        assert isinstance(started, Started)
        return started

    @property
    def blocks(self) -> list[int]:
        return [block for each in self._lent if isinstance(each, Blocks) for block in each.block_ids]

    @property
    def is_whole(self) -> bool:
        """Whether all has been announced that was cached."""
        return bool(self._lent) and len(self.blocks) >= self.started.cached_end_block

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                assert not self._end, self._end
                await asyncio.sleep(0.005)


async def cached_blocks(engine: RealEngine, prompt: Sequence[int], compute: bool = False) -> list[int]:
    """Blocks of the engine's pool that hold the prompt's full blocks; with `compute`, once they do."""
    caller = Caller(engine)
    try:
        return await caller.blocks(prompt, compute)
    finally:
        caller.close()


@asynccontextmanager
async def engines(*wanted: RealEngine) -> AsyncIterator[None]:
    """All of them started together. Afterwards none of their processes is left."""
    pids: list[int] = []
    try:
        starts: list[Awaitable[RealEngine]] = [engine.start() for engine in wanted]
        await asyncio.gather(*starts)
        for engine in wanted:
            pids += [engine.pid, *engine.rank_pids()]
        yield
    finally:
        await asyncio.gather(*(engine.host.stop() for engine in wanted))
    await gone(pids)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def greedy(request_id: str, prompt: Sequence[int], max_tokens: int = 12, **options: Any) -> Generate:
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0} | options)
    return Generate(request_id, tuple(prompt), (), sampling, "", 0, lender=None)


def chosen(tokens: Sequence[Token]) -> dict[int, list[int]]:
    """Token ids by choice."""
    by_choice: dict[int, list[int]] = {}
    for token in tokens:
        by_choice.setdefault(token.choice, []).append(token.token_id)
    return by_choice
