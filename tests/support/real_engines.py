"""Engines in processes of their own, with their messages carried by hand instead of by fronts and gRPC."""

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
from engine.messages.from_engine import (Audited, CloseLoan, Filled, FromEngine, ItemsWanted, LendReady, LendRefused, LendStarting, OpenLoan, PromptScored, Ready, Rejected, ReleaseLoan, StartFailed, Token)
from loans.account import KvAccount
from engine.messages.to_engine import (
    Audit,
    Generate,
    Lend,
    LendClosed,
    LendReleased,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
    ToEngine,
)
from engine.process.front.child_engine import ChildEngine
from engine.process.front.engine_client import EngineListener
from engine.process.spec import EngineSpec
from engine.worker.front.item_fetches import ItemFetches
from kvcache.items import begun_items
from support.processes import PATIENCE_S, gone, ranks_of

START_S = 300.0


class RealEngine(EngineListener):
    """One engine, and all it said so far."""

    def __init__(self, name: str, model: Path, role: Role = "decode", **settings: Any) -> None:
        config = WorkerConfig.parse({"model": model, "kv_memory_mib": 8} | settings)
        self.host = ChildEngine(EngineSpec(config, role, f"{name}-{os.getpid()}-{id(self)}", name))
        self.tokens: dict[str, list[Token]] = {}
        self.said: list[FromEngine] = []
        self.lent: dict[str, tuple[RealEngine, Generate]] = {}
        """By request: the engine that lends for it, and the request."""
        self.borrowers: dict[str, RealEngine] = {}
        self.end = ""
        self._fetches = ItemFetches(self)
        self._heard = asyncio.Event()
        self.ready: Ready

    async def start(self) -> "RealEngine":
        """Raises StartError."""
        self.host.start(self)
        await self.until(lambda: self._said(Ready, StartFailed), START_S)
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
                case Token(request_id):
                    self.tokens.setdefault(request_id, []).append(message)
                case OpenLoan(request_id, first, end, may_compute):
                    lender, request = self.lent[request_id]
                    lender.borrowers[request_id] = self
                    items = begun_items(request.items, end * self.ready.block_tokens)
                    num_tokens = max(end * self.ready.block_tokens, items[-1].end if items else 0)
                    lend = Lend(request_id, request.prompt[:num_tokens], first, request.cache_salt, may_compute, 0)
                    lender.send(lend._replace(adapter=request.adapter, items=items, end_block=end))
                case ReleaseLoan(request_id, first, count):
                    self.lent[request_id][0].send(LendReleased(request_id, first, count))
                case CloseLoan(request_id):
                    self.lent[request_id][0].send(LendClosed(request_id))
                case LendStarting(loan_id, end, cached_end, queued_ms):
                    started = LoanStarted(loan_id, self.ready.endpoint, end, cached_end, queued_ms)
                    self.borrowers[loan_id].send(started)
                case LendReady(loan_id, first, block_ids, fingerprints, fetched):
                    self.borrowers[loan_id].send(LoanBlocks(loan_id, first, block_ids, fingerprints, fetched))
                case LendRefused(loan_id, reason):
                    self.borrowers[loan_id].send(LoanFailed(loan_id, reason))
                case ItemsWanted():
                    self._fetches.start(message)
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
        await self.until(lambda: self._said(Rejected))
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

    def _said(self, *kinds: type[FromEngine]) -> bool:
        return any(isinstance(message, kinds) for message in self.said)

    async def answer(self, request: Generate, lender: "RealEngine | None" = None) -> list[Token]:
        """All that comes of it."""
        if lender is not None:
            self.lent[request.request_id] = lender, request
        self.send(request._replace(borrow=lender is not None))
        await self.until(lambda: self.over(request) or self._said(Rejected))
        assert not self._said(Rejected), self.said
        return self.tokens[request.request_id]

    async def filled(self, request: Generate) -> KvAccount:
        """Account of a request without output, once its blocks are there."""
        self.send(request)

        def ends() -> list[Filled]:
            return [m for m in self.said if isinstance(m, Filled) and m.request_id == request.request_id]

        await self.until(lambda: bool(ends()) or self._said(Rejected))
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
                await self.until(lambda: self._said(Audited))
                (found,) = [message for message in self.said if isinstance(message, Audited)]
                self.said.clear()
                assert found.fault == ""
                if found.held_blocks == found.loans == found.quarantined_blocks == 0:
                    return found

    @property
    def pid(self) -> int:
        return self.host._process.pid

    def rank_pids(self) -> list[int]:
        """Of the other ranks."""
        return ranks_of(self.pid)


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
    return Generate(request_id, tuple(prompt), (), sampling, "", 0, borrow=False)


def chosen(tokens: Sequence[Token]) -> dict[int, list[int]]:
    """Token ids by choice."""
    by_choice: dict[int, list[int]] = {}
    for token in tokens:
        by_choice.setdefault(token.choice, []).append(token.token_id)
    return by_choice
