"""Which router runs a batch: leases in a real Redis, locks of real processes, and routers that die or hang."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types import Batch

from batches.claims import Claim, LockClaims
from batches.redis_claims import RedisClaims
from batches.storage.disk import Disk
from batches.storage.file_store import BatchFolder
from cluster.errors import StartError
from conftest import ModelFactory
from support.batch_site import batches_pid, begin, client_of, completion, content_of, ended
from support.long_runs import mostly_long
from support.processes import pause, until
from support.redis_server import RedisServer
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

QUICK = {"expiry_s": 3.0, "heartbeat_s": 0.1}
HOLDS = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def batch(tmp_path: Path) -> BatchFolder:
    return BatchFolder(tmp_path, Disk())


def claims_at(redis: RedisServer) -> RedisClaims:
    return RedisClaims(redis.url, "test", **QUICK)


async def taken(claims: RedisClaims, batch: BatchFolder) -> Claim:
    """The claim, as soon as it can be had."""
    found: list[Claim] = []

    async def has_it() -> bool:
        claim = await claims.claim(batch)
        found.extend([claim] if claim is not None else [])
        return claim is not None

    await until(has_it, "the batch can be claimed")
    return found[0]


async def test_a_lease_is_kept_released_and_taken_over(redis: RedisServer, batch: BatchFolder) -> None:
    one, other = claims_at(redis), claims_at(redis)
    lease = await taken(one, batch)
    for _ in range(35):  # longer than a lease
        assert await other.claim(batch) is None
        await asyncio.sleep(0.1)
    assert not lease.lost.is_set()
    await lease.release()
    second = await other.claim(batch)
    second.keeping.cancel()  # type: ignore[attr-defined] # as if its router was killed
    third = await taken(one, batch)
    assert second.lost.is_set()
    await second.release()
    assert not third.lost.is_set()
    assert await other.claim(batch) is None, "a late release gives away nothing of another's"
    await third.release()
    assert await redis.command("KEYS", "*") == []
    await one.close()
    await other.close()


async def test_leases_end_with_a_redis_that_does_not_answer(redis: RedisServer, batch: BatchFolder) -> None:
    claims = claims_at(redis)
    lease = await taken(claims, batch)
    await redis.hang()
    await lease.lost.wait()
    assert await claims.claim(BatchFolder(batch.path / "another", Disk())) is None
    redis.wake()
    await lease.release()
    await (await taken(claims, batch)).release()
    await claims.close()


async def test_a_lease_survives_a_redis_that_comes_back_empty(redis: RedisServer, batch: BatchFolder) -> None:
    one, other = claims_at(redis), claims_at(redis)
    lease = await taken(one, batch)
    await redis.kill()
    await redis.start()

    async def renewed() -> bool:
        return bool(await redis.command("KEYS", "*"))

    await until(renewed, "its holder has it again")
    assert await other.claim(batch) is None
    assert not lease.lost.is_set()
    await lease.release()
    await one.close()
    await other.close()


async def test_a_wrong_url_stops_the_start() -> None:
    with pytest.raises(StartError, match="redis_url"):
        RedisClaims("http://x", "test")


async def test_a_lock_ends_with_its_process(batch: BatchFolder) -> None:
    claims = LockClaims()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDS, str(batch.lock)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    await process.stdout.readline()
    assert await claims.claim(batch) is None
    process.send_signal(signal.SIGKILL)
    await process.wait()
    claim = await claims.claim(batch)
    await claim.release()


# ------------------------------------------------------------------ routers


def routers_on(folder: Path, model: Path, redis: RedisServer) -> LocalCluster:
    """Two routers on one folder, which share a worker by Redis."""
    shared: dict[str, Any] = {"model": model, "redis_url": redis.url}
    router = shared | {"port": 0, "http_port": 0, "batches_folder": folder, "batch_concurrency": 8}
    worker = shared | {"engine": "sim", "kv_memory_mib": 32, "sim_step_ms": 4}
    return LocalCluster(plan_topology(0, 1, router, worker, sorted(os.sched_getaffinity(0)), 2))


async def halfway(client: Any, batch_id: str, num_lines: int) -> Batch:
    while True:
        batch: Batch = await client.batches.retrieve(batch_id)
        if batch.request_counts is not None and batch.request_counts.completed >= num_lines // 3:
            assert batch.status == "in_progress"
            return batch
        await asyncio.sleep(0.02)


def runner_of(folder: Path, batch_id: str, pids: Sequence[int]) -> int:
    """Number of the router whose process of batches writes the batch's newest log."""
    logs = sorted(next(folder.rglob(batch_id)).glob("answers-*"))
    (number,) = [
        number
        for number, pid in enumerate(pids)
        if any(os.path.realpath(f"/proc/{pid}/fd/{fd}") == str(logs[-1]) for fd in os.listdir(f"/proc/{pid}/fd"))
    ]
    return number


@pytest.mark.parametrize(
    ("fault", "of"),
    mostly_long(
        itertools.product((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM), ("router", "batches")),
        *((signal.SIGKILL, "router"), (signal.SIGSTOP, "batches"), (signal.SIGTERM, "batches")),
    ),
    ids=lambda value: getattr(value, "name", value),
)
async def test_another_router_takes_a_batch_over(
    redis: RedisServer, tmp_path: Path, sim_model: ModelFactory, fault: signal.Signals, of: str
) -> None:
    """Whichever of the two processes beside each other dies, hangs or is told to stop."""
    folder, num_lines = (tmp_path / "made").resolve(), 150
    async with routers_on(folder, sim_model(400, speaks=True), redis) as cluster:
        pids = [batches_pid(router) for router in cluster.routers]
        clients = [client_of(router.http_address) for router in cluster.routers]
        lines = [completion(f"line-{number}", max_tokens=40) for number in range(num_lines)]
        batch = await begin(clients[0], lines)
        await halfway(clients[1], batch.id, num_lines)
        at_work = runner_of(folder, batch.id, pids)
        other = clients[1 - at_work]
        hit = pids[at_work] if of == "batches" else cluster.routers[at_work].pid
        if fault == signal.SIGSTOP:
            await pause(hit)
        else:
            os.kill(hit, fault)
        before = next(folder.rglob(batch.id))
        done = await ended(other, batch.id, 60)
        if fault == signal.SIGSTOP:
            os.kill(hit, signal.SIGCONT)  # it wakes with lines in flight, and finds the batch ended
            assert (await ended(clients[at_work], batch.id)).status == "completed"
            await asyncio.sleep(2)
        assert done.status == "completed"
        assert done.request_counts.completed == num_lines
        outputs = await content_of(other, done.output_file_id)
        assert [one["custom_id"] for one in outputs] == [one["custom_id"] for one in lines]
        assert done.error_file_id is None

        await until(
            lambda: not [path for path in before.iterdir() if path.suffix != ".json"], "the logs of answers are gone"
        )
        for client in clients:
            await client.close()
