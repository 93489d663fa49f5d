"""Processes that die, hang, come back or are told to stop, under real requests.

The sim engine samples a hash of the KV it reads, so a block that is lost, stale or half-written gives another token:
every stream here is held against one that nothing disturbed. Afterwards every surviving worker's books must balance
with nothing held, and no engine process may be left.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Unavailable
from cluster.network.mux import Channel
from cluster.network.mux_stream import MuxStream
from engine.model.model_dir import ModelDir
from protos import decode_pb2
from protos import inference_pb2 as pb
from router.config import RouterConfig
from support.fake_workers import fake_worker
from support.ports import free_port
from support.processes import (
    Stream,
    alive,
    assert_equal_answers,
    engine_of,
    finished,
    kill_engine,
    kill_front,
    kill_worker,
    named,
    pause,
    running,
    state_of,
    until,
    workers_joined,
)
from tandem.client import Client
from tandem.local.local_cluster import start_role, stop_process

BLOCK = 16
STEP_MS = 8.0
CHUNK = 32
"""Prompt tokens of one step: a prompt of 1,600 tokens takes 50 steps."""
VOCAB = 600

SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": STEP_MS, "max_prefill_tokens": CHUNK, "kv_memory_mib": 4}


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


@pytest.fixture(scope="module")
def speaking_model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB, speaks=True)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


# ------------------------------------------------------------------------------------ decode workers that die


async def test_streams_survive_their_decode_workers(speaking_model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    """The whole worker, its front alone, its engine alone: what ran there goes on elsewhere, token by token."""
    shapes = [(number, 40 + 37 * number, 160 + 5 * number) for number in range(6)]
    async with running(cluster_of(speaking_model, decode=2, router={}, **SIM)) as (cluster, client):

        def start(salt: str) -> list[Stream]:
            return [Stream(client, prompt_of(seed, length), count, cache_salt=salt) for seed, length, count in shapes]

        undisturbed = await finished(start("undisturbed"))
        assert any(stream.text for stream in undisturbed)
        config = cluster.topology.decode[0]
        for kill in (kill_worker, kill_front, kill_engine):
            victim = named(cluster, "decode-0")
            engine = engine_of(victim)
            streams = start(kill.__name__)
            await asyncio.gather(*(stream.reached(10) for stream in streams))
            assert not any(stream.task.done() for stream in streams)
            kill(victim)
            assert_equal_answers(await finished(streams), undisturbed)
            attempts = [stream.receipt.placement.attempt for stream in streams]
            assert 2 in attempts, "some ran there"
            assert 1 in attempts, "and some did not"
            assert {stream.receipt.placement.decode_worker for stream in streams} == {"decode-1"}
            await victim.process.wait()

            async def engine_gone(engine: int = engine) -> bool:
                return not state_of(engine)

            await until(engine_gone, "the engine followed its front")
            await audit(alive(cluster))

            # It comes back under its own name, and is used again.
            cluster.decode.remove(victim)
            await workers_joined(client, 1, 1)
            restarted = await cluster.add_worker("decode_worker", config)
            cluster.engines.append(engine_of(restarted))
            await workers_joined(client, 1, 2)
            again = start(f"after {kill.__name__}")
            assert_equal_answers(await finished(again), undisturbed)
            assert {stream.receipt.placement.decode_worker for stream in again} == {"decode-0", "decode-1"}
            assert {stream.receipt.placement.attempt for stream in again} == {1}
        await audit(alive(cluster))


async def test_the_last_decode_worker_dies(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    """Those that ran and those that waited alike are told so, within the grace and not at their deadline."""
    router = {"no_worker_grace_s": 0.5}
    one_at_a_time = {"kv_memory_mib": 1, "reserve_output_tokens": 5000}
    async with running(cluster_of(model, router=router, **SIM | one_at_a_time)) as (cluster, client):
        runs = Stream(client, prompt_of(1, 100), 5000)
        await runs.reached(5)
        waits = Stream(client, prompt_of(2, 100), 5000)
        await runs.reached(30)  # 200 ms later the other one is in the router's queue
        assert not waits.token_ids
        kill_worker(cluster.decode[0])
        for stream in (runs, waits):
            with pytest.raises(Unavailable, match="no decode worker"):
                await stream.task
        with pytest.raises(Unavailable, match="no decode worker"):
            await Stream(client, prompt_of(3, 100), 5).task
        await audit([worker.address for worker in cluster.prefill])


async def test_a_decode_worker_that_hangs_and_wakes(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    """Its streams move; when it wakes it drops what it had and is used again."""
    router = {"worker_silence_s": 4.0}
    async with running(cluster_of(model, decode=2, router=router, **SIM)) as (cluster, client):

        def start(salt: str) -> list[Stream]:
            return [Stream(client, prompt_of(seed, 200), 60, cache_salt=salt) for seed in range(6)]

        undisturbed = await finished(start("undisturbed"))
        streams = start("disturbed")
        await asyncio.gather(*(stream.reached(10) for stream in streams))
        engine = engine_of(named(cluster, "decode-0"))
        await pause(engine)
        assert_equal_answers(await finished(streams), undisturbed)
        by_attempt = {n: [s for s in streams if s.receipt.placement.attempt == n] for n in (1, 2)}
        assert len(by_attempt[1]) + len(by_attempt[2]) == 6
        assert {stream.receipt.placement.decode_worker for stream in by_attempt[2]} == {"decode-1"}
        assert "decode-1" in {stream.receipt.placement.decode_worker for stream in by_attempt[1]}

        # While it hangs, nothing is placed there.
        await workers_joined(client, 1, 1)
        (meanwhile,) = await finished([Stream(client, prompt_of(0, 200), 5, cache_salt="meanwhile")])
        assert meanwhile.receipt.placement.decode_worker == "decode-1"

        os.kill(engine, signal.SIGCONT)
        await workers_joined(client, 1, 2)
        again = await finished(start("afterwards"))
        assert_equal_answers(again, undisturbed)
        assert {stream.receipt.placement.decode_worker for stream in again} == {"decode-0", "decode-1"}
        await audit(alive(cluster))


# ------------------------------------------------------------------------------------------- the router itself


async def test_the_router_dies_and_comes_back(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    """Workers drop what the dead one had asked for, and join its successor by themselves."""
    port = free_port()
    async with running(cluster_of(model, decode=2, router={"port": port}, **SIM)) as (cluster, client):
        undisturbed = await finished([Stream(client, prompt_of(1, 300), 20, cache_salt="undisturbed")])
        streams = [Stream(client, prompt_of(seed, 300), 5000) for seed in range(4)]
        await asyncio.gather(*(stream.reached(2) for stream in streams))
        cluster.router.process.kill()
        await cluster.router.process.wait()
        for stream in streams:
            with pytest.raises(Unavailable):
                await stream.task
        await audit(alive(cluster))
        cluster.router = await start_role("router", "router", cluster.topology.router)
        await workers_joined(client, 1, 2)

        async def told() -> bool:
            """Workers tell what their caches hold after they have joined."""
            asked = await client.explain(token_ids=prompt_of(1, 300), cache_salt="undisturbed")
            return asked.candidates[0].hit_blocks == 300 // BLOCK

        await until(told, "the new router knows what the caches hold")
        again = Stream(client, prompt_of(1, 300), 20, cache_salt="undisturbed")
        assert_equal_answers(await finished([again]), undisturbed)
        assert again.receipt.kv.reused_blocks == 300 // BLOCK
        await audit(alive(cluster))


class TreacherousWorker:
    """A decode worker that says everything, and then fails before it has ended its request."""

    def __init__(self) -> None:
        self.attempts = 0

    def serve(self, stream: MuxStream, opened: Channel, request: decode_pb2.DecodeRequest) -> None:
        self.attempts += 1
        opened.send(pb.GenerateResponse(token_ids=[1, 2, 3]).SerializeToString())
        finish = pb.Finish(usage=pb.Usage(completion_tokens=3))
        opened.send(pb.GenerateResponse(finish=finish).SerializeToString())
        asyncio.get_running_loop().call_later(0.1, stream.end, Unavailable("died in the last moment"))


async def test_a_worker_that_dies_after_its_last_word_costs_nothing(model) -> None:  # type: ignore[no-untyped-def]
    """The client has its answer: no second attempt, and no error after the finish."""
    router, worker = await start_role("router", "router", RouterConfig(model=model, port=0)), TreacherousWorker()
    try:
        async with fake_worker(router.address, ModelDir.open(model), worker.serve), Client(router.address) as client:
            await workers_joined(client, 0, 1)
            (stream,) = await finished([Stream(client, [1, 2, 3], 3)])
            assert stream.token_ids == [1, 2, 3]
            assert worker.attempts == 1
    finally:
        await stop_process(router.process)
