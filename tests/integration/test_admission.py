"""Admission at a real client of a real cluster: every refusal arrives typed, says why, and when to try again."""

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Overloaded, Unavailable
from cluster.network.error_status import to_proto
from cluster.network.mux import Channel
from cluster.network.mux_stream import MuxStream
from engine.model.model_dir import ModelDir
from protos import decode_pb2
from protos import inference_pb2 as pb
from router.config import RouterConfig
from support.fake_workers import fake_worker
from support.processes import Stream, alive, engine_of, finished, pause, role, running, until, workers_joined
from tandem.client import Client

VOCAB = 600
STEP_MS = 8.0
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": STEP_MS, "max_prefill_tokens": 64, "kv_memory_mib": 4}
ONE_AT_A_TIME: dict[str, Any] = SIM | {"kv_memory_mib": 1, "max_prefill_tokens": 8192}
LONG = 5000
"""Tokens of a prompt, of which a pool of that size holds one, and computes it in one step."""
FAST = {"learn_rates": False, "prefill_tokens_per_s": 1e6, "decode_prefill_tokens_per_s": 1e6}
"""Of a router: what it takes long prompts for is short beside the limits below."""
WINDOW_S = 10**9
"""Nobody sees it end: the next multiple is in the year 2033."""


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


def prompt_of(seed: int, num_tokens: int = 40) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


async def refused(stream: Stream) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        await stream.task
    assert not caught.value.permanent
    assert caught.value.retry_after_s is not None
    return caught.value


async def test_limits_of_tenants(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    tenants = {
        "slow": {"requests_per_s": 0.01, "burst": 2},
        "small": {"quota_tokens": 300, "quota_window_s": WINDOW_S},
        "brief": {"tokens_per_minute": 100},
        "single": {"max_running": 1},
        "batches": {"requests_per_s": 0.01, "burst": 1},
    }
    async with running(cluster_of(model, router={"tenants": tenants}, **SIM)) as (cluster, client):
        await finished([Stream(client, prompt_of(n), 5, tenant="slow") for n in range(2)])
        error = await refused(Stream(client, prompt_of(2), 5, tenant="slow"))
        assert "'slow' is at its requests_per_s of 0.01" in error.message
        assert 50 < (error.retry_after_s or 0) <= 100

        error = await refused_after(client, "brief")
        assert "'brief' is at its tokens_per_minute of 100" in error.message
        assert 0 < (error.retry_after_s or 0) <= 60

        # 40 + 200 are charged, of which the client takes a part: what it did not use comes back.
        cut_short = Stream(client, prompt_of(3), 200, tenant="small")
        await cut_short.reached(10)
        engine = engine_of(cluster.decode[0])
        await pause(engine)  # or it would go on to its end meanwhile
        error = await refused(Stream(client, prompt_of(4), 200, tenant="small"))
        assert "'small' is at its quota_tokens of 300 per 1000000000 s" in error.message
        assert (error.retry_after_s or 0) > 1e6
        await cut_short.cancel()
        os.kill(engine, signal.SIGCONT)
        assert len(cut_short.token_ids) < 100

        async def refunded() -> bool:
            try:
                await Stream(client, prompt_of(5), 100, tenant="small").task
            except Overloaded:
                return False
            return True

        await until(refunded, "what it did not use has come back")
        await refused(Stream(client, prompt_of(6), 100, tenant="small"))
        with pytest.raises(Overloaded, match="never be admitted") as caught:
            await Stream(client, prompt_of(7), 261, tenant="small").task
        assert caught.value.permanent

        first, second = (Stream(client, prompt_of(n), 60, tenant="single") for n in (8, 9))
        other = Stream(client, prompt_of(10), 60)
        await finished([first, second, other])
        queued_ms = [queue_ms(stream) for stream in (first, second, other)]
        assert max(queued_ms[:2]) >= 50 * STEP_MS, "one after the other"
        assert queued_ms[2] < max(queued_ms[:2])

        sampling = pb.Sampling(max_tokens=2)
        batch = [pb.GenerateRequest(token_ids=prompt_of(30), tenant="batches", sampling=sampling) for _ in range(3)]
        results = [result async for result in client.generate_batch(batch, timeout_s=20)]
        assert sum(bool(result.status) for result in results) == 2, "each is charged to the tenant that it names"
        await audit(alive(cluster))


async def refused_after(client: Client, tenant: str) -> Overloaded:
    await finished([Stream(client, prompt_of(20), 30, tenant=tenant)])
    return await refused(Stream(client, prompt_of(21), 30, tenant=tenant))


def queue_ms(stream: Stream) -> float:
    (stage,) = [stage for stage in stream.receipt.stages if stage.name == "router queue"]
    return stage.duration_ms


async def test_a_full_queue_and_who_is_displaced(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    async with running(cluster_of(model, router={"max_queued": 1}, **ONE_AT_A_TIME)) as (cluster, client):
        runs = Stream(client, prompt_of(1, LONG), 400)
        await runs.reached(5)
        waits = Stream(client, prompt_of(2, LONG), 5, priority=-1)
        await asyncio.sleep(0.2)
        error = await refused(Stream(client, prompt_of(3, LONG), 5, priority=-1))
        assert "1 requests wait already" in error.message
        urgent = Stream(client, prompt_of(4, LONG), 5, priority=5)
        error = await refused(waits)
        assert "displaced" in error.message
        assert not runs.task.done()
        await runs.cancel()
        await finished([urgent])
        assert queue_ms(urgent) > 0
        await audit(alive(cluster))


async def test_a_first_token_that_would_come_too_late(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    async with running(cluster_of(model, router=FAST, **ONE_AT_A_TIME)) as (cluster, client):
        idle = Stream(client, prompt_of(1, LONG), 100, max_ttft_ms=1e-3)
        await finished([idle])
        line = [Stream(client, prompt_of(n, LONG), 100, tenant="line") for n in range(2, 8)]
        await line[2].reached(1)

        error = await refused(Stream(client, prompt_of(10, LONG), 100, tenant="hasty", max_ttft_ms=5))
        assert "predicted to wait" in error.message, "said on arrival"

        # First in line of its class, it may wait, and is told as soon as it is in vain.
        error = await refused(Stream(client, prompt_of(11, LONG), 100, priority=1, max_ttft_ms=300))
        assert "can no longer come in time" in error.message
        for stream in line:
            await stream.cancel()
        await audit(alive(cluster))


async def test_without_workers_no_more_wait_than_the_line_has_places(model: Path) -> None:
    config = RouterConfig(model=model, port=0, max_queued=3, no_worker_grace_s=1.0)
    async with role("router", "router", config) as router, Client(router.address) as client:
        streams = [Stream(client, [1, 2, 3], 5) for _ in range(8)]
        ended = await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
        assert sum(isinstance(error, Unavailable) for error in ended) == 3
        refusals = [error for error in ended if isinstance(error, Overloaded)]
        assert len(refusals) == 5
        assert all("3 requests wait already" in error.message and error.retry_after_s for error in refusals)


# --------------------------------------------------------------------- a worker that has no room after all


class Refuser:
    """A decode worker that says it has room, and when asked has none, so many times."""

    def __init__(self, num_refusals: int) -> None:
        self.num_refusals = num_refusals
        self.asked_at: list[float] = []
        self.attempts: list[int] = []

    def serve(self, _: MuxStream, opened: Channel, request: decode_pb2.DecodeRequest) -> None:
        self.asked_at.append(time.monotonic())
        self.attempts.append(request.placement.attempt)
        if len(self.asked_at) <= self.num_refusals:
            opened.end(to_proto(Overloaded("no room")).SerializeToString())
        else:
            usage = pb.Usage(prompt_tokens=3, completion_tokens=1)
            opened.send(pb.GenerateResponse(token_ids=[7], finish=pb.Finish(usage=usage)).SerializeToString())
            opened.end()


@pytest.mark.parametrize(("num_refusals", "served"), [(6, True), (100, False)])
async def test_refusals_for_want_of_room_are_no_failed_attempts(model: Path, num_refusals: int, served: bool) -> None:
    refuser = Refuser(num_refusals)
    config = RouterConfig(model=model, port=0, max_attempts=2)
    async with (
        role("router", "router", config) as router,
        fake_worker(router.address, ModelDir.open(model), refuser.serve),
        Client(router.address) as client,
    ):
        await workers_joined(client, 0, 1)
        stream = Stream(client, [1, 2, 3], 5)
        if served:
            await stream.task
            assert stream.token_ids == [7]
            assert len(refuser.asked_at) == 7
        else:
            error = await refused(stream)
            assert "65 workers that seemed to have room" in error.message
            assert len(refuser.asked_at) == 65
        assert set(refuser.attempts) == {1}
        pauses = [later - earlier for earlier, later in itertools.pairwise(refuser.asked_at)]
        assert all(pause >= min(0.45, 0.009 * 2**number) for number, pause in enumerate(pauses)), (
            "ever longer: it does not spin"
        )
