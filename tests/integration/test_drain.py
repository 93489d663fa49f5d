"""Workers and routers that are told to stop while they serve: nobody's request fails, and no token differs.

As in test_faults.py, a sim engine's tokens are hashes of the KV it read, held against a stream that nothing disturbed.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI

from cluster.errors import Draining, ServiceError
from cluster.network.rpc import channel
from protos import membership_pb2, membership_pb2_grpc
from support.long_runs import mostly_long
from support.processes import (
    LENDER_ALWAYS,
    Asking,
    Stream,
    alive,
    assert_equal_answers,
    busiest_decoder,
    engine_of,
    finished,
    lending,
    named,
    report_of,
    running,
    until,
    workers_joined,
)
from support.redis_server import RedisServer
from tandem.client import Client
from tandem.local.local_cluster import RoleProcess


class ServiceAddress:
    """A connection goes to one of those that are ready when it comes, in turn, and stays with it until it ends."""

    def __init__(self) -> None:
        self.ready: list[str] = []
        self.address = ""
        self._turns = count()
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["ServiceAddress"]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for connection in tuple(self._connections):
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        host, _, port = self.ready[next(self._turns) % len(self.ready)].rpartition(":")
        with contextlib.closing(writer):
            try:
                inner, outer = await asyncio.open_connection(host, int(port))
            except OSError:
                return
            with contextlib.closing(outer):
                await asyncio.wait(
                    [asyncio.ensure_future(_pass_on(reader, outer)), asyncio.ensure_future(_pass_on(inner, writer))],
                    return_when=asyncio.FIRST_COMPLETED,
                )


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()


BLOCK = 16
VOCAB = 600
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 8.0, "max_prefill_tokens": 32, "kv_memory_mib": 4}
DRAIN_S = 2.5
NO_FAILURE = {"max_attempts": 1}
"""Of a router. What is handed over counts as no failed attempt, or it would fail here."""


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


async def status_of(address: str) -> int:
    async with channel(address) as link:
        answer = await health_pb2_grpc.HealthStub(link).Check(health_pb2.HealthCheckRequest(), timeout=60)
        return int(answer.status)


async def says_that_it_stops(address: str) -> None:
    async def not_serving() -> bool:
        return await status_of(address) == health_pb2.HealthCheckResponse.NOT_SERVING

    await until(not_serving, f"{address} does not serve")


async def router_knows_that_it_stops(client: Client, worker_id: str) -> None:
    async def known() -> bool:
        (model,) = (await client.cluster_status()).models
        return all(worker.draining for worker in model.workers if worker.worker_id == worker_id)

    await until(known, f"the router knows that {worker_id} stops")


async def ended(role: RoleProcess) -> None:
    assert await role.process.wait() == 0


async def test_a_decode_worker_hands_over_what_it_cannot_finish(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    """Short streams end where they are; long ones go on elsewhere, and read there what they had here."""
    router = NO_FAILURE | LENDER_ALWAYS
    async with running(cluster_of(model, decode=2, router=router, **SIM, drain_s=DRAIN_S)) as (cluster, client):

        def start(salt: str, numbers: range, num_tokens: int) -> list[Stream]:
            return [Stream(client, prompt_of(n, 200), num_tokens, cache_salt=salt) for n in numbers]

        async def begun(streams: list[Stream]) -> list[Stream]:
            await asyncio.gather(*(stream.reached(5) for stream in streams))
            return streams

        many, few = range(4), range(4, 12)  # of so many, some come to whichever worker leaves
        undisturbed = await finished(start("undisturbed", many, 600) + start("undisturbed", few, 12))
        streams = await begun(start("disturbed", many, 600))
        leaving, num_here = await busiest_decoder(cluster)
        streams += await begun(start("disturbed", few, 12))
        leaving.process.send_signal(signal.SIGTERM)
        await says_that_it_stops(leaving.address)

        assert (await report_of(leaving.address)).requests > 0, "it still serves what it has"
        for number in range(3):
            (new,) = await finished([Stream(client, prompt_of(100 + number, 40), 3)])
            assert new.receipt.placement.decode_worker != leaving.name, "it gets nothing new"

        assert_equal_answers(await finished(streams), undisturbed)
        placed = [(s.receipt.placement.attempt, s.receipt.placement.decode_worker == leaving.name) for s in streams]
        assert set(placed[len(many) :]) <= {(1, True), (1, False)}
        assert (1, True) in placed[len(many) :]
        assert set(placed[: len(many)]) <= {(1, False), (2, False)}
        handed_over = [s for s in streams if s.receipt.placement.attempt == 2]
        assert len(handed_over) == num_here
        readers = [s for s in handed_over if s.receipt.placement.lender == leaving.name]
        assert readers, "it stayed readable"
        for stream in readers:
            assert stream.receipt.kv.moved_blocks > 200 // BLOCK, "the prompt's blocks and some of the answer's"
            assert not stream.receipt.kv.loan_failure
        await ended(leaving)
        await workers_joined(client, 1, 1)
        await audit(alive(cluster))


async def test_an_idle_worker_and_one_that_finishes_leave_at_once(model, cluster_of) -> None:  # type: ignore[no-untyped-def]
    """However long they would have; one by SIGTERM, the other by the call."""
    async with running(cluster_of(model, prefill=1, decode=2, **SIM, drain_s=60)) as (cluster, client):
        stream = Stream(client, prompt_of(1, 100), 100)
        await stream.reached(5)
        idle = named(cluster, "decode-1")
        async with channel(idle.address) as link:
            stub = membership_pb2_grpc.WorkerStub(link)
            reply = await stub.Drain(membership_pb2.DrainRequest(), timeout=60)
        assert (reply.worker_id, reply.requests, reply.loans) == ("decode-1", 0, 0)
        await ended(idle)
        cluster.prefill[0].process.send_signal(signal.SIGTERM)
        await ended(cluster.prefill[0])
        busy = named(cluster, "decode-0")
        busy.process.send_signal(signal.SIGTERM)
        await finished([stream])
        assert stream.receipt.placement.attempt == 1
        await ended(busy)


@pytest.mark.parametrize("drain_s", mostly_long([30.0, 0.2], 0.2))
async def test_a_lender_is_drained_under_load(model, cluster_of, audit, drain_s: float) -> None:  # type: ignore[no-untyped-def]
    """Loans under way end well if there is time, and otherwise cost a recompute; new ones go elsewhere."""
    async with running(
        cluster_of(model, prefill=1, decode=1, router=NO_FAILURE | LENDER_ALWAYS, **SIM | {"sim_step_ms": 20.0})
    ) as (
        cluster,
        client,
    ):
        (config,) = cluster.topology.prefill
        leaving = await cluster.add_worker(
            "prefill_worker", config.model_copy(update={"worker_id": "leaving", "drain_s": drain_s})
        )
        cluster.engines.append(engine_of(leaving))
        await workers_joined(client, 2, 1)

        def start(salt: str) -> list[Stream]:
            return [Stream(client, prompt_of(n, 1200), 10, cache_salt=salt) for n in range(4)]

        undisturbed = await finished(start("undisturbed"))
        streams = start("disturbed")
        await lending(leaving, num_loans=1, num_blocks=10)
        leaving.process.send_signal(signal.SIGTERM)
        await says_that_it_stops(leaving.address)
        await router_knows_that_it_stops(client, "leaving")
        after = Stream(client, prompt_of(50, 600), 5)
        assert_equal_answers(await finished(streams), undisturbed)
        there = [s for s in streams if s.receipt.placement.lender == "leaving"]
        assert there
        assert {s.receipt.placement.attempt for s in streams} == {1}
        failed = [s.receipt.kv for s in there if s.receipt.kv.loan_failure]
        assert all("told to stop" in kv.loan_failure for kv in failed)
        if drain_s > 1:  # what was under way; who was placed there just before may have come too late to be taken
            assert not any(kv.moved_blocks for kv in failed)
            assert len(failed) < len(there)
        else:
            assert failed
        await finished([after])
        assert after.receipt.placement.lender == "prefill-0"
        await ended(leaving)
        await workers_joined(client, 1, 1)
        await audit(alive(cluster))


async def test_a_second_signal_ends_a_worker_at_once(model, cluster_of) -> None:  # type: ignore[no-untyped-def]
    async with running(cluster_of(model, decode=2, router={}, **SIM, drain_s=60)) as (cluster, client):
        streams = [Stream(client, prompt_of(n, 50), 3000) for n in range(4)]
        await asyncio.gather(*(stream.reached(5) for stream in streams))
        leaving, _ = await busiest_decoder(cluster)
        leaving.process.send_signal(signal.SIGTERM)
        await says_that_it_stops(leaving.address)
        assert leaving.process.returncode is None
        leaving.process.send_signal(signal.SIGTERM)
        assert await leaving.process.wait() == -signal.SIGTERM
        for stream in streams:
            await stream.reached(len(stream.token_ids) + 50)  # more than was on its way
            await stream.cancel()


async def refusal_of(client: Client) -> ServiceError:
    try:
        await Stream(client, prompt_of(1, 20), 3).task
    except ServiceError as error:
        return error
    raise AssertionError("it was not refused")


async def test_a_router_finishes_its_streams_and_takes_no_more(model, cluster_of, audit, tmp_path) -> None:  # type: ignore[no-untyped-def]
    async with RedisServer(tmp_path) as redis:
        settings = {"redis_url": redis.url}
        cluster = cluster_of(model, router=settings | {"drain_s": 30}, routers=2, **SIM, **settings)
        async with running(cluster) as (_, client), Client(*cluster.addresses) as of_both:
            undisturbed = await finished([Stream(client, prompt_of(n, 100), 150, cache_salt="a") for n in range(3)])
            streams = [Stream(client, prompt_of(n, 100), 150, cache_salt="b") for n in range(3)]
            await asyncio.gather(*(stream.reached(5) for stream in streams))
            leaving = cluster.router
            leaving.process.send_signal(signal.SIGTERM)
            await says_that_it_stops(leaving.address)

            async def withdrawn() -> bool:
                return await redis.command("ZCARD", "tandem:routers") == 1

            await until(withdrawn, "it has withdrawn")
            refused = await refusal_of(client)
            assert isinstance(refused, Draining)
            assert "router-0" in refused.message
            (elsewhere,) = await finished([Stream(of_both, prompt_of(9, 20), 3)])
            assert elsewhere.receipt.stages[0].where == "router-1"
            assert not any(stream.task.done() for stream in streams)
            assert_equal_answers(await finished(streams), undisturbed)
            await ended(leaving)
            await audit(alive(cluster))


async def test_routers_behind_one_address_are_replaced_one_by_one_under_load(  # type: ignore[no-untyped-def]
    model, cluster_of, audit, tmp_path
) -> None:
    """A rolling update as Kubernetes does it: a router that is to go is taken from the address, then waited for, then
    told. Clients know that address only, and hold their connections. None of their requests fails; those that are under
    way end where they began."""
    async with RedisServer(tmp_path) as redis, ServiceAddress().open() as grpc, ServiceAddress().open() as http:
        settings = {"redis_url": redis.url}
        router = settings | {"drain_s": 20, "http_port": 0, "max_connection_s": 0.5}
        cluster = cluster_of(model, router=router, routers=2, **(SIM | {"sim_step_ms": 3.0}), **settings)
        async with running(cluster), Client(grpc.address) as client:
            grpc.ready, http.ready = list(cluster.addresses), [each.http_address for each in cluster.routers]
            wanted = [(prompt_of(seed, 40 + 30 * seed), 30 + 100 * (seed % 3)) for seed in range(6)]
            asking = await Asking.begin(client, wanted)
            completing = asyncio.ensure_future(complete_for_ever(http.address, prompt_of(1, 30)))
            for config in cluster.topology.routers:
                leaving = cluster.routers.pop(0)
                grpc.ready.remove(leaving.address)
                http.ready.remove(leaving.http_address)
                await asyncio.sleep(0.8)  # connections that there are go on to be used until they are old
                leaving.process.send_signal(signal.SIGTERM)
                await ended(leaving)
                successor = await cluster.add_router(config)
                grpc.ready.append(successor.address)
                http.ready.append(successor.http_address)
                await until_it_serves(successor.address)
                asking.check()
                assert not completing.done(), completing.result()
            await asking.end()
            completing.cancel()
            assert set(asking.attempts) == {1}
            await audit(alive(cluster))


async def complete_for_ever(address: str, prompt: list[int]) -> None:
    async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as openai:
        while True:
            answer = await openai.completions.create(model="", prompt=prompt, max_tokens=5)
            assert answer.choices[0].finish_reason == "length"


async def until_it_serves(address: str) -> None:
    """Placed requests need workers, which have to join it first."""
    async with Client(address) as client:
        await workers_joined(client, 1, 1)


async def test_a_router_ends_what_takes_too_long(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    """Running and waiting requests alike, with an error that names the router; nothing stays with the workers."""
    settings = SIM | {"kv_memory_mib": 1, "reserve_output_tokens": 5000}  # one at a time
    async with running(cluster_of(model, router={"drain_s": 0.5, "router_id": "leaves"}, **settings)) as (
        cluster,
        client,
    ):
        runs = Stream(client, prompt_of(1, 100), 5000)
        await runs.reached(5)
        waits = Stream(client, prompt_of(2, 100), 5000)
        await runs.reached(20)
        assert not waits.token_ids
        os.kill(cluster.router.pid, signal.SIGTERM)
        for stream in (runs, waits):
            with pytest.raises(Draining, match="leaves"):
                await stream.task
        await ended(cluster.router)
        await audit(alive(cluster))


async def test_a_draining_worker_lends_what_it_has_and_computes_for_nobody(model, cluster_of) -> None:  # type: ignore[no-untyped-def]
    async with running(cluster_of(model, router=LENDER_ALWAYS, **SIM, drain_s=30)) as (cluster, client):
        long = Stream(client, prompt_of(1, 100), 5000)
        await long.reached(5)
        (decode,) = cluster.decode
        decode.process.send_signal(signal.SIGTERM)
        await says_that_it_stops(decode.address)
        late = await cluster.add_worker(
            "decode_worker", cluster.topology.decode[0].model_copy(update={"worker_id": "late"})
        )
        cluster.engines.append(engine_of(late))

        async def joined() -> bool:
            return (await client.explain(token_ids=prompt_of(9, 50))).num_candidates > 0

        await until(joined, "the late one has joined")
        (reader,) = await finished([Stream(client, prompt_of(1, 100), 5)])
        assert reader.receipt.placement.decode_worker == "late"
        assert reader.receipt.kv.moved_blocks + reader.receipt.kv.computed_blocks == 7
        explained = await client.explain(token_ids=prompt_of(1, 100))
        assert {c.decode_worker for c in explained.candidates} == {"late"}
        await long.cancel()
        await ended(decode)
