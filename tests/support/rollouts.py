"""Rollouts of a cluster of processes, in the order in which Kubernetes replaces the pods of the chart, under load."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import RevisionGone, ServiceError
from cluster.network.rpc import READINESS
from engine.config import WorkerConfig
from protos import inference_pb2 as pb
from router.config import RouterConfig
from support.ports import free_port
from support.processes import says, until
from tandem.client import Client
from tandem.local.local_cluster import RoleProcess, start_role, stop_process

STREAMS = 20
LONGEST_S = 60.0
"""Longest time of a start, a drain and a stream, in seconds."""


@dataclass(frozen=True)
class Revision:
    """Settings of one revision of the cluster."""

    model: Path
    adapters: dict[str, Path]
    tree: Path | None = None
    """Tree of Tandem's code that its processes run; None: this one."""

    def entered(self, command: list[str]) -> list[str]:
        """Return a command that runs in the revision's tree."""
        return command if self.tree is None else ["env", "-C", str(self.tree), f"PYTHONPATH={self.tree}", *command]


class Rollout:
    """Two routers at known ports, and three workers of each role, which are replaced one after the other."""

    def __init__(self, worker: dict[str, Any], router: dict[str, Any]) -> None:
        self._worker, self._router = worker, router
        self._ports = [free_port(), free_port()]
        self.addresses = [f"127.0.0.1:{port}" for port in self._ports]
        self.routers: list[RoleProcess] = []
        self.pools: dict[str, list[RoleProcess]] = {"prefill_worker": [], "decode_worker": []}
        self._generation = 0

    async def __aenter__(self) -> "Rollout":
        return self

    async def __aexit__(self, *_: object) -> None:
        roles = [*self.routers, *(worker for pool in self.pools.values() for worker in pool)]
        await asyncio.gather(*(stop_process(role.process, 0.1) for role in roles))

    async def start(self, revision: Revision, num_workers: int = 3) -> None:
        """Start the routers, and so many workers of each role; returns when both routers have all of them."""
        self.routers = list(await asyncio.gather(*(self.start_router(number, revision) for number in range(2))))
        starts = [self._start_worker(module, revision, n) for module in self.pools for n in range(num_workers)]
        for worker in await asyncio.gather(*starts):
            self.pools[worker.name.partition("-")[0]].append(worker)
        for address in self.addresses:
            async with Client(address) as client:
                await client.wait_for_workers(num_workers, num_workers, LONGEST_S)

    async def to(self, revision: Revision) -> None:
        """Replace everything: the routers from the last to the first, the pools beside them."""
        self._generation += 1
        await asyncio.gather(self._replace_routers(revision), *(self._replace_pool(m, revision) for m in self.pools))

    async def _replace_routers(self, revision: Revision) -> None:
        for number in (1, 0):
            await stop_process(self.routers[number].process, LONGEST_S)
            self.routers[number] = await self.start_router(number, revision)
            await self._ready(self.routers[number])

    async def _replace_pool(self, module: str, revision: Revision) -> None:
        """Start one, wait until it is ready, stop one: maxSurge 1 and maxUnavailable 0."""
        pool = self.pools[module]
        for number in range(len(pool)):
            started = await self._start_worker(module, revision, number)
            await self._ready(started)
            leaving, pool[number] = pool[number], started
            await stop_process(leaving.process, LONGEST_S)
            assert leaving.process.returncode == 0, f"{leaving.name} ended with {leaving.process.returncode}"

    async def start_router(self, number: int, revision: Revision) -> RoleProcess:
        values = {"model": revision.model, "port": self._ports[number], "router_id": f"router-{number}"}
        config = RouterConfig.parse(values | self._router)
        return await start_role("router", f"router-{number}", config, revision.entered)

    async def _start_worker(self, module: str, revision: Revision, number: int) -> RoleProcess:
        name = f"{module}-{self._generation}-{number}"
        values = {"model": revision.model, "worker_id": name, "adapters": revision.adapters, **self._worker}
        if "redis_url" not in values:
            values["routers"] = self.addresses
        return await start_role(module, name, WorkerConfig.parse(values), revision.entered)

    async def _ready(self, role: RoleProcess) -> None:
        async def ready() -> bool:
            assert role.process.returncode is None, f"{role.name} ended with {role.process.returncode}"
            return await says(role.address, READINESS)

        await until(ready, f"{role.name} is ready", LONGEST_S)


@dataclass
class Outcome:
    """End of one stream."""

    prompt: str
    token_ids: list[int]
    error: ServiceError | None
    receipt: pb.Receipt | None = None


class Load:
    """Streams without end, so many at a time, and the longest time without a first token of any."""

    def __init__(self, client: Client, model: str, prompts: Sequence[str], lengths: range) -> None:
        self._client, self._model, self._prompts, self._lengths = client, model, prompts, lengths
        self._rng = random.Random(7)
        self._over = False
        self._answered_at = time.monotonic()
        self.longest_gap_s = 0.0
        self.outcomes: list[Outcome] = []
        self._tasks = [asyncio.ensure_future(self._ask()) for _ in range(STREAMS)]

    async def _ask(self) -> None:
        while not self._over:
            prompt, length = self._rng.choice(self._prompts), self._rng.choice(self._lengths)
            outcome = Outcome(prompt, [], None)
            try:
                await self._follow(outcome, length)
            except ServiceError as error:
                outcome.error = error
            self.outcomes.append(outcome)

    async def _follow(self, outcome: Outcome, length: int) -> None:
        pieces = asked(self._client, self._model, outcome.prompt, length, LONGEST_S)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if not outcome.token_ids:
                    now = time.monotonic()
                    self.longest_gap_s = max(self.longest_gap_s, now - self._answered_at)
                    self._answered_at = now
                outcome.token_ids += piece.token_ids
                if piece.HasField("finish"):
                    outcome.receipt = piece.finish.receipt

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


def asked(client: Client, model: str, prompt: str, length: int, timeout_s: float) -> Any:
    sampling = pb.Sampling(max_tokens=length, temperature=0, ignore_eos=True)
    return client.generate(prompt, model=model, sampling=sampling, timeout_s=timeout_s)


async def answers(client: Client, model: str, prompts: Sequence[str], length: int) -> dict[str, list[int]]:
    """Return what the cluster answers undisturbed."""
    found: dict[str, list[int]] = {}
    for prompt in prompts:
        found[prompt] = []
        async for piece in asked(client, model, prompt, length, LONGEST_S):
            found[prompt] += piece.token_ids
    return found


def judged(outcomes: Sequence[Outcome], revisions: Sequence[dict[str, list[int]]]) -> Counter[str]:
    """Count the outcomes: whole answers, typed ends of a gone revision, and what must not be: mixed or lost ones."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        tokens = outcome.token_ids
        if not any(answer[outcome.prompt][: len(tokens)] == tokens for answer in revisions):
            counts["mixed"] += 1
        elif outcome.error is None:
            counts["whole"] += 1
        elif isinstance(outcome.error, RevisionGone):
            counts["revision gone"] += 1
        else:
            counts[f"lost: {type(outcome.error).__name__}: {outcome.error}"] += 1
    return counts
