"""Workers that change their role while they serve: nobody's request fails, no token differs, and the cache is there."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ServiceError
from cluster.network.rpc import channel
from planner.executors import switch_role
from protos import membership_pb2, membership_pb2_grpc
from support.processes import (
    LENDER_ALWAYS,
    Asking,
    Stream,
    alive,
    engine_of,
    finished,
    named,
    running,
    until,
    workers_joined,
)
from tandem.client import Client

VOCAB = 600
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 5.0, "max_prefill_tokens": 32, "kv_memory_mib": 8}
NO_FAILURE = {"max_attempts": 1}


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


async def roles(client: Client) -> dict[str, str]:
    (model,) = (await client.cluster_status()).models
    return {worker.worker_id: worker.role for worker in model.workers}


async def test_workers_change_roles_under_load_and_no_answer_changes(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    """Decode to prefill, prefill to decode, and both back. What is handed over counts as no failed attempt."""
    settings = SIM | {"drain_s": 0.3}
    router = NO_FAILURE | LENDER_ALWAYS
    async with running(cluster_of(model, prefill=2, decode=2, router=router, **settings)) as (cluster, client):
        shapes = [(seed, 60 + 60 * seed, 20 + 150 * (seed % 3)) for seed in range(6)]
        asking = await Asking.begin(client, [(prompt_of(seed, length), count) for seed, length, count in shapes])
        handed_over = 0
        engines = [engine_of(worker) for worker in cluster.workers]
        for name, role in (("decode-1", "prefill"), ("prefill-0", "decode"), ("decode-1", "decode")):
            await asyncio.sleep(0.3)
            handed_over += await switch_role(named(cluster, name).address, role, None)
            assert (await roles(client))[name] == role
            asking.check()
        assert await roles(client) == {
            "decode-0": "decode",
            "decode-1": "decode",
            "prefill-0": "decode",
            "prefill-1": "prefill",
        }
        assert [engine_of(worker) for worker in cluster.workers] == engines, "their weights and caches stay"
        await workers_joined(client, 1, 3)
        await asking.end()
        assert handed_over > 0
        assert set(asking.attempts) >= {1, 2}
        await audit(alive(cluster))


async def test_what_it_had_computed_is_there_in_its_new_role(model, cluster_of, ask) -> None:  # type: ignore[no-untyped-def]
    """The two change places: what was lent is reused, and who decoded lends. What is no role is refused."""
    async with running(cluster_of(model, prefill=1, decode=1, router=LENDER_ALWAYS, **SIM)) as (cluster, client):
        decode = named(cluster, "decode-0").address
        assert await switch_role(decode, "decode", None) == 0  # which it is
        async with channel(decode) as link:
            with pytest.raises(Exception, match="role: must be ROLE_PREFILL or ROLE_DECODE, not 7"):
                await membership_pb2_grpc.WorkerStub(link).SwitchRole(membership_pb2.SwitchRoleRequest(role=7))  # type: ignore[arg-type]
        prompt = prompt_of(1, 400)
        first = await ask(client, prompt, max_tokens=5, ignore_eos=True)
        assert first.placement.lender == "prefill-0"
        lent = first.kv.moved_blocks
        assert lent == 24
        assert await switch_role(named(cluster, "prefill-0").address, "decode", None) == 0
        assert await switch_role(decode, "prefill", None) == 0
        assert await roles(client) == {"prefill-0": "decode", "decode-0": "prefill"}
        again = await ask(client, prompt, max_tokens=5, ignore_eos=True)
        assert again.placement.decode_worker == "prefill-0"
        assert again.kv.reused_blocks == lent
        assert again.token_ids == first.token_ids
        other = await ask(client, prompt_of(2, 400), max_tokens=5, ignore_eos=True)
        assert other.placement.lender == "decode-0"
        assert other.kv.moved_blocks == 24
        assert not other.kv.loan_failure


async def test_a_worker_that_is_told_to_stop_does_not_switch(model, cluster_of) -> None:  # type: ignore[no-untyped-def]
    """Whether it was told before, or while it switches: it leaves."""
    async with running(cluster_of(model, prefill=0, decode=2, **SIM, drain_s=30)) as (cluster, client):
        stream = Stream(client, prompt_of(1, 60), 600)
        await stream.reached(5)
        busy = named(cluster, stream_worker := (await busy_worker(client)))
        switching = asyncio.ensure_future(switch_role(busy.address, "prefill", None))
        await asyncio.sleep(0.2)
        busy.process.terminate()
        with pytest.raises(ServiceError):
            await switching
        await finished([stream])
        assert stream.receipt.placement.decode_worker == stream_worker
        assert await busy.process.wait() == 0


async def busy_worker(client: Client) -> str:
    running: list[str] = []

    async def known() -> bool:
        (model,) = (await client.cluster_status()).models
        running[:] = [worker.worker_id for worker in model.workers if worker.running]
        return bool(running)

    await until(known, "the router knows who runs")
    (name,) = running
    return name
