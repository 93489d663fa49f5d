"""Workers that join and report, and that nobody can reach: they look idle, and harm nobody for it."""

import asyncio
import random
import socket
from pathlib import Path
from typing import Any

from cluster.errors import DeadlineExceeded, Overloaded
from engine.config import WorkerConfig
from support.ports import free_port
from support.processes import LENDER_ALWAYS, Stream, finished, running, until, workers_joined
from tandem.client import Client

SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 4.0, "kv_memory_mib": 4}
NOBODY = "127.0.0.9"
"""No worker listens there."""


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


async def condition(client: Client, name: str) -> tuple[bool, list[str]]:
    (model,) = (await client.cluster_status()).models
    (worker,) = [worker for worker in model.workers if worker.worker_id == name]
    return worker.failing, list(worker.failing_lenders)


async def test_a_decode_worker_that_cannot_be_reached(model: Path, cluster_of: Any) -> None:
    async with running(cluster_of(model, prefill=0, router={"learn_rates": False}, **SIM)) as (cluster, client):
        config = WorkerConfig(model=model, worker_id="a-cut-off", advertise_host=NOBODY, **SIM)
        await cluster.add_worker("decode_worker", config)
        await workers_joined(client, 0, 2)
        for burst in range(4):  # each would use up its attempts there
            streams = await finished([Stream(client, prompt_of(100 * burst + n, 64), 20) for n in range(12)])
            assert {stream.receipt.placement.decode_worker for stream in streams} == {"decode-0"}

        async def said() -> bool:
            return (await condition(client, "a-cut-off"))[0]

        await until(said, "the router says so")


async def test_a_decode_worker_that_is_silent_costs_few_requests_their_deadline(model: Path, cluster_of: Any) -> None:
    """Something listens there and says nothing: a connection is tried for longer than these requests have."""
    port = free_port(NOBODY, "127.0.0.1")
    with socket.create_server((NOBODY, port)):
        async with running(cluster_of(model, prefill=0, router={"learn_rates": False}, **SIM)) as (cluster, client):
            config = WorkerConfig(model=model, worker_id="a-silent", advertise_host=NOBODY, port=port, **SIM)
            await cluster.add_worker("decode_worker", config)
            await workers_joined(client, 0, 2)
            failures: list[BaseException] = []
            for burst in range(8):
                streams = [Stream(client, prompt_of(100 * burst + n, 64), 5, timeout_s=0.7) for n in range(6)]
                ended = await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
                failures += [end for end in ended if isinstance(end, BaseException)]
            assert all(isinstance(failure, DeadlineExceeded | Overloaded) for failure in failures)
            assert len(failures) <= 12, "half of all, did the router not notice"


async def test_a_lender_that_cannot_be_reached(model: Path, cluster_of: Any) -> None:
    async with running(cluster_of(model, router=LENDER_ALWAYS, **SIM)) as (cluster, client):
        config = WorkerConfig(model=model, worker_id="a-cut-off", advertise_host=NOBODY, **SIM)
        await cluster.add_worker("prefill_worker", config)
        await workers_joined(client, 2, 1)
        lenders = [
            (await finished([Stream(client, prompt_of(n, 400), 3)]))[0].receipt.placement.lender for n in range(30)
        ]
        assert lenders.count("prefill-0") > 15
        assert await condition(client, "decode-0") == (False, ["a-cut-off"])
