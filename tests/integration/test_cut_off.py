"""Workers that nobody can reach, at their port for routers or at that for loans: they harm nobody for it."""

import asyncio
import random
import socket
from pathlib import Path
from typing import Any

from engine.config import WorkerConfig
from support.cut_link import CutLink
from support.ports import free_port
from support.processes import LENDER_ALWAYS, Stream, finished, running, workers_joined

SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 4.0, "kv_memory_mib": 4}
NOBODY = "127.0.0.9"
"""No worker listens there."""


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


async def test_a_decode_worker_whose_port_is_silent_gets_no_request(model: Path, cluster_of: Any) -> None:
    """Something listens there and says nothing. The worker tries to join again and again, and harms no request."""
    port = free_port(NOBODY, "127.0.0.1")
    with socket.create_server((NOBODY, port)) as listening:
        async with running(cluster_of(model, prefill=0, router={"learn_rates": False}, **SIM)) as (cluster, client):
            config = WorkerConfig(model=model, worker_id="a-silent", advertise_host=NOBODY, stream_port=port, **SIM)
            await cluster.add_worker("decode_worker", config)
            caller, _ = await asyncio.to_thread(listening.accept)
            for burst in range(4):
                streams = await finished([Stream(client, prompt_of(100 * burst + n, 64), 20) for n in range(12)])
                assert {stream.receipt.placement.decode_worker for stream in streams} == {"decode-0"}
                assert {stream.receipt.placement.attempt for stream in streams} == {1}
            caller.close()


async def test_a_lender_that_cannot_be_reached_lends_over_connections_of_its_own(model: Path, cluster_of: Any) -> None:
    stream_port = free_port(NOBODY, "127.0.0.1")
    async with (
        CutLink(NOBODY, stream_port, "127.0.0.1"),
        running(cluster_of(model, router=LENDER_ALWAYS, **SIM)) as (cluster, client),
    ):
        where = {"advertise_host": NOBODY, "stream_port": stream_port}
        await cluster.add_worker("prefill_worker", WorkerConfig(model=model, worker_id="a-cut-off", **where, **SIM))
        await workers_joined(client, 2, 1)
        receipts = [(await finished([Stream(client, prompt_of(n, 400), 3)]))[0].receipt for n in range(20)]
        assert {receipt.placement.lender for receipt in receipts} == {"a-cut-off", "prefill-0"}
        assert {receipt.kv.loan_failure for receipt in receipts} == {""}
