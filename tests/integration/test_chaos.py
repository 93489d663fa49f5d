"""Workers that join, leave, hang and die at random under load: nobody gets a wrong token, nobody waits for ever.

Router and sim workers in this process, over real gRPC; the workers' tokens are hashes of all KV they read. A slice of
it runs with the other tests; TANDEM_CHAOS_S gives the seconds of a longer storm.
"""

import asyncio
import gc
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.errors import DeadlineExceeded, Overloaded, Unavailable
from cluster.network.rpc import channel
from cluster.roles import Role
from engine.config import WorkerConfig
from protos import inference_pb2 as pb
from protos import membership_pb2, membership_pb2_grpc
from router.config import RouterConfig
from router.placement.fleet.fleet import Fleet
from router.runtime import start_router
from support.processes import until
from support.sim_cluster_model import SimClusterModel
from tandem.client import Client
from tandem.local.sim_workers import SimPool

STORM_S = float(os.environ.get("TANDEM_CHAOS_S", "10"))
NUM_STORMS = int(os.environ.get("TANDEM_CHAOS_STORMS", "1"))
RATE = 25.0
DEADLINE_S = 60.0
EVERY_S = 0.4
"""Between two blows."""
SILENCE_S = 1.0
LEAST = {"prefill": 1, "decode": 2}
MOST = {"prefill": 3, "decode": 4}
WORKER = {
    "engine": "sim",
    "kv_memory_mib": 1,
    "sim_step_ms": 4.0,
    "sim_prompt_token_us": 50.0,
    "drain_s": 0.3,
    "reserve_output_tokens": 32,
    "peer_silence_s": 1.0,
}


KINDS = ("join", "stop", "kill", "hang")


class Storm:
    """The workers, and what befalls them."""

    def __init__(self, model: Path, router: str, seed: int) -> None:
        self.pool = SimPool()
        self.seeds = random.Random(seed)
        self.blows: Counter[str] = Counter()
        self._model, self._router = model, router
        self._numbers = Counter[str]()
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def join(self, role: Role) -> None:
        self._numbers[role] += 1
        name = f"{role}-{self._numbers[role]}"
        config = WorkerConfig.parse(WORKER | {"model": self._model, "routers": (self._router,), "worker_id": name})
        await self.pool.start(role, config)

    async def blow(self) -> None:
        """One thing, at random; never so that too few are left who answer."""
        role: Role = self.seeds.choice(("prefill", "decode"))
        healthy = [name for name in self.pool.workers if name.startswith(role) and name not in self._ending]
        missing = [kind for kind in KINDS if not self.blows[kind]]
        kind = self.seeds.choice(missing or KINDS)  # each kind comes once, however short the storm
        if kind == "join" or len(healthy) <= LEAST[role]:
            if len(healthy) < MOST[role]:
                self.blows["join"] += 1
                await self.join(role)
            return
        victim = self.seeds.choice(healthy)
        self.blows[kind] += 1
        if kind == "kill":
            await self.pool.kill(victim)
            return
        if kind == "hang":
            self.pool.workers[victim].engine.hang()
        task = asyncio.ensure_future(self._end(victim, hung=kind == "hang"))
        self._ending[victim] = task
        task.add_done_callback(lambda _: self._ending.pop(victim))

    async def _end(self, victim: str, hung: bool) -> None:
        if not hung:
            await self.pool.stop(victim)
            return
        await asyncio.sleep(3 * SILENCE_S)  # the router gives it up long before
        await self.pool.kill(victim)

    async def calm(self) -> None:
        await asyncio.gather(*self._ending.values())


class Load:
    """Requests, each with the answer that is right."""

    def __init__(self, client: Client, model: SimClusterModel, seeds: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._client, self._model, self._seeds = client, model, seeds
        self._shared = [seeds.choices(range(model.vocab_size), k=150) for _ in range(4)]

    async def one(self) -> None:
        seeds = self._seeds
        prompt = self._seeds.choice(self._shared)[: seeds.randrange(150)]
        prompt = prompt + seeds.choices(range(self._model.vocab_size), k=seeds.randrange(1, 60))
        max_tokens, leaves_after = seeds.randrange(1, 60), seeds.choice((None, None, None, seeds.randrange(1, 20)))
        sampling = pb.Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        tokens: list[int] = []
        stream = self._client.generate(token_ids=prompt, sampling=sampling, timeout_s=DEADLINE_S)
        try:
            async for message in stream:
                tokens += message.token_ids
                if leaves_after is not None and len(tokens) >= leaves_after:
                    self.outcomes["left"] += 1
                    await stream.aclose()  # type: ignore[attr-defined]
                    break
            else:
                self.outcomes["completed"] += 1
                assert len(tokens) == max_tokens
        except (Unavailable, Overloaded, DeadlineExceeded) as error:  # nothing else may come
            self.outcomes[type(error).__name__] += 1
        assert tokens == self._model.answer(prompt, max_tokens)[: len(tokens)]


@pytest.mark.timeout(STORM_S + 900)
@pytest.mark.parametrize("seed", range(1, NUM_STORMS + 1))
async def test_a_storm(sim_model, seed: int) -> None:  # type: ignore[no-untyped-def]
    model = sim_model(997)
    name = f"storm-{seed}"
    settings = {"model": model, "router_id": name, "port": 0, "worker_silence_s": SILENCE_S, "no_worker_grace_s": 3.0}
    router = await start_router(RouterConfig.parse(settings))
    storm = Storm(model, router.address, seed)
    (fleet,) = [each for each in gc.get_objects() if type(each) is Fleet and each.router_id == name]
    try:
        for role in (*["prefill"] * MOST["prefill"], *["decode"] * MOST["decode"]):
            await storm.join(role)  # type: ignore[arg-type]
        async with Client(router.address) as client:
            await client.wait_for_workers(MOST["prefill"], MOST["decode"], 20)
            load = Load(client, SimClusterModel(model), random.Random(seed))
            requests, end = [], time.monotonic() + STORM_S
            next_blow = time.monotonic() + EVERY_S
            while time.monotonic() < end:
                requests.append(asyncio.ensure_future(load.one()))
                await asyncio.sleep(storm.seeds.expovariate(RATE))
                if time.monotonic() > next_blow:
                    await storm.blow()
                    next_blow = time.monotonic() + EVERY_S
            await asyncio.gather(*requests)
        await storm.calm()

        await until(
            lambda: {worker.worker_id for worker in fleet.workers} == set(storm.pool.workers),
            "the router knows who is left",
        )

        await until(
            lambda: all(view.running == view.queued_prefill_tokens == 0 for view in fleet.views()), "no load is left"
        )
        for worker in fleet.workers:
            assert not worker.unreported_decodes
            assert not worker.unreported_lends
        for name, worker in storm.pool.workers.items():
            async with channel(worker.worker.address) as link:
                books = await membership_pb2_grpc.WorkerStub(link).Audit(membership_pb2.AuditRequest(), timeout=60)
            assert not books.fault, f"{name}: {books.fault}"
            assert (books.held_blocks, books.reserved_blocks, books.loans) == (0, 0, 0), name
        print(f"\n{load.outcomes}, {storm.blows}")
        assert all(storm.blows[kind] for kind in KINDS)
        assert load.outcomes["completed"] > 0.6 * len(requests)
        assert load.outcomes["completed"] + load.outcomes["left"] > 0.9 * len(requests)
    finally:
        with suppress(asyncio.CancelledError):
            await storm.pool.close()
        await router.stop()
