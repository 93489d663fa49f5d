"""Three routers over the same workers, found through a real redis-server: routers that die, come later and come twice,
and a Redis that is killed, hung and restarted empty under load.

As in test_faults.py, a sim engine's tokens are hashes of the KV it read, held against a stream that nothing disturbed.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError, Unavailable
from engine.config import WorkerConfig
from router.config import RouterConfig
from support.long_runs import long, mostly_long
from support.ports import free_port
from support.processes import Stream, alive, assert_equal_answers, engine_of, finished, running, until, workers_joined
from support.redis_server import RedisServer
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, RoleProcess, start_role, stop_process

VOCAB = 600
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 4.0, "max_prefill_tokens": 64, "kv_memory_mib": 4}


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


def prompt_of(seed: int, num_tokens: int = 150) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


@asynccontextmanager
async def clients_of(cluster: LocalCluster) -> AsyncIterator[list[Client]]:
    clients = [Client(address) for address in cluster.addresses]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


class Load:
    """Requests without end, through all routers in turn, some at a time; each answer is checked."""

    def __init__(self, clients: list[Client], undisturbed: list[Stream], at_a_time: int = 6) -> None:
        self._clients, self._undisturbed = clients, undisturbed
        self.num_answered = 0
        self._over = False
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(at_a_time)]

    async def _ask(self, number: int) -> None:
        while not self._over:
            seed = number % len(self._undisturbed)
            stream = Stream(self._clients[number % len(self._clients)], prompt_of(seed), 20, cache_salt=f"{number}")
            await stream.task
            assert_equal_answers([stream], [self._undisturbed[seed]])
            self.num_answered += 1
            number += len(self._tasks)

    async def answered(self, more: int) -> None:
        """So many further requests have been; raises what one failed with."""
        goal = self.num_answered + more

        async def there() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return self.num_answered >= goal

        await until(there, f"{goal} requests are answered")

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


async def undisturbed_by(client: Client) -> list[Stream]:
    return await finished([Stream(client, prompt_of(seed), 20, cache_salt="undisturbed") for seed in range(4)])


async def idle_at(router: RoleProcess, num_workers: int) -> None:
    """Of everything it placed, and others did, nothing is left in what the router believes of its workers."""

    async def idle() -> bool:
        async with Client(router.address) as client:
            # A candidate's delay is that of the streams that run there.
            explained = await client.explain(token_ids=prompt_of(99))
        decodes = {c.decode_worker: c for c in explained.candidates if not c.lender}
        assert len(decodes) == num_workers
        return all(c.decode_queue_ms == 0 and c.delay_ms == 0 for c in decodes.values())

    await until(idle, f"{router.name} believes its workers idle")


async def test_any_router_takes_any_request_and_one_that_dies_harms_no_other(  # type: ignore[no-untyped-def]
    model, cluster_of, audit, redis
) -> None:
    settings = {"redis_url": redis.url}
    cluster = cluster_of(model, prefill=2, decode=2, router=settings, routers=3, **SIM, **settings)
    async with running(cluster), clients_of(cluster) as clients:
        undisturbed = await undisturbed_by(clients[0])
        load = Load(clients, undisturbed)
        await load.answered(30)
        await load.end()
        # What one router's workers hold is known to the others.
        (warm,) = await finished([Stream(clients[2], prompt_of(0), 20, cache_salt="undisturbed")])
        assert warm.receipt.kv.reused_blocks + warm.receipt.kv.moved_blocks == (150 - 1) // 16
        assert warm.receipt.kv.computed_blocks <= 1
        for router in cluster.routers:
            await idle_at(router, 2)

        through_it = [Stream(clients[0], prompt_of(seed), 5000) for seed in range(4)]
        through_others = [Stream(clients[1 + seed % 2], prompt_of(seed), 400) for seed in range(4)]
        await asyncio.gather(*(stream.reached(5) for stream in [*through_it, *through_others]))
        cluster.router.process.kill()
        for stream in through_it:
            with pytest.raises(Unavailable, match=cluster.address):
                await stream.task
        load = Load(clients[1:], undisturbed)
        await load.answered(20)
        await load.end()
        for stream in await finished(through_others):
            assert stream.receipt.placement.attempt == 1
        await audit(alive(cluster))
        for router in cluster.routers[1:]:
            await idle_at(router, 2)

        async def forgotten() -> bool:
            return await redis.command("ZCARD", "tandem:routers") == 2

        await until(forgotten, "Redis has forgotten the router that was killed")
        # A client that knows them all does not notice.
        async with Client(*cluster.addresses) as client:
            assert_equal_answers(await finished([Stream(client, prompt_of(1), 20)]), undisturbed[1:2])


async def test_redis_is_killed_hung_and_restarted_empty_under_load(  # type: ignore[no-untyped-def]
    model, cluster_of, audit, redis
) -> None:
    settings = {"redis_url": redis.url, "cluster_name": "east"}
    cluster = cluster_of(model, prefill=2, decode=2, router=settings, routers=3, **SIM, **settings)
    async with running(cluster), clients_of(cluster) as clients:
        load = Load(clients, await undisturbed_by(clients[0]))
        await load.answered(10)

        await redis.kill()
        await load.answered(30)
        await redis.start()
        await load.answered(10)

        async def announced(num_routers: int) -> bool:
            return await redis.command("ZCARD", "east:routers") == num_routers

        await until(lambda: announced(3), "everybody has announced himself again")

        await redis.hang()
        await load.answered(30)
        redis.wake()
        await load.answered(10)

        # Who comes afterwards is found, and finds: a router and a worker.
        one_more = await cluster.add_router(RouterConfig(model=model, port=0, router_id="one-more", **settings))
        late = cluster.topology.decode[0].model_copy(update={"worker_id": "late"})
        cluster.engines.append(engine_of(await cluster.add_worker("decode_worker", late)))
        for router in cluster.routers:
            async with Client(router.address) as client:
                await workers_joined(client, 2, 3)
        async with Client(one_more.address) as client:
            (stream,) = await finished([Stream(client, prompt_of(7), 20)])
            assert stream.receipt.stages[0].where == "one-more"
        await load.end()
        assert await redis.command("KEYS", "*") == ["east:routers"]
        await audit(alive(cluster))


async def has_worker(client: Client, worker_id: str) -> bool:
    status = await client.cluster_status()
    return any(worker.worker_id == worker_id for each in status.models for worker in each.workers)


async def test_two_routers_of_one_id_are_refused_by_the_worker_that_sees_both(  # type: ignore[no-untyped-def]
    model, cluster_of, redis
) -> None:
    """Named in its settings or found in Redis, the worker stays with the first."""
    async with running(cluster_of(model, router={"router_id": "same"}, **SIM)) as (cluster, client):
        other = await start_role("router", "other", RouterConfig(model=model, port=0, router_id="same"))
        try:
            (config,) = cluster.topology.prefill
            both = {"worker_id": "sees-both", "routers": (cluster.address, other.address)}
            worker = await start_role("prefill_worker", "sees-both", config.model_copy(update=both))
            async with Client(other.address) as second:

                async def joined_one() -> bool:
                    return sum([await has_worker(each, "sees-both") for each in (client, second)]) == 1

                await until(joined_one, "one of both routers has it")
                await asyncio.sleep(2.5)  # some attempts to join the other one
                assert await joined_one()
            assert worker.process.returncode is None
            await stop_process(worker.process)
        finally:
            await stop_process(other.process)

    settings = {"redis_url": redis.url}
    async with running(cluster_of(model, router=settings | {"router_id": "same"}, **SIM, **settings)) as (
        cluster,
        client,
    ):
        second = await cluster.add_router(RouterConfig(model=model, port=0, router_id="same", **settings))

        async def both_announced() -> bool:
            return await redis.command("ZCARD", "tandem:routers") == 2

        await until(both_announced, "both have announced themselves")
        await asyncio.sleep(2.5)  # two listings of every worker
        await workers_joined(client, 1, 1)
        async with Client(second.address) as nobodys:
            await workers_joined(nobodys, 0, 0)
        await finished([Stream(client, prompt_of(1), 5)])


@long
async def test_a_worker_of_a_taken_name_is_refused_and_one_whose_predecessor_is_dead_is_not(  # type: ignore[no-untyped-def]
    model, cluster_of, monkeypatch, capfd
) -> None:
    async with running(cluster_of(model, **SIM)) as (cluster, client):
        (config,) = cluster.topology.decode
        first = cluster.decode[0]
        impostor = await cluster.add_worker("decode_worker", config)
        cluster.engines.append(engine_of(impostor))
        assert await impostor.process.wait() == 2
        said = capfd.readouterr().err
        assert first.address in said
        assert impostor.address in said
        await finished([Stream(client, prompt_of(1), 5)])
        first.process.kill()
        await first.process.wait()
        cluster.decode.clear()
        successor = await cluster.add_worker("decode_worker", config)
        cluster.engines.append(engine_of(successor))
        await workers_joined(client, 1, 1)
        (stream,) = await finished([Stream(client, prompt_of(1), 5)])
        assert stream.receipt.placement.attempt == 1


@pytest.mark.parametrize("kind", mostly_long(["router", "decode_worker"], "router"))
async def test_settings_of_redis_that_cannot_work_are_named_at_start(model, tmp_path, kind: str) -> None:  # type: ignore[no-untyped-def]
    def config(**settings: Any) -> RouterConfig | WorkerConfig:
        made: RouterConfig | WorkerConfig = (
            RouterConfig(model=model, port=0, **settings)
            if kind == "router"
            else WorkerConfig(model=model, engine="sim", **settings)
        )
        return made

    async with RedisServer(tmp_path, password="open-sesame") as server:
        for url in (f"redis://:wrong@127.0.0.1:{server.port}", "memcached://x", "redis://a:b"):
            with pytest.raises(StartError) as caught:
                await start_role(kind, kind, config(redis_url=url))
            assert caught.value.field == f"{kind}: redis_url"
            assert "wrong" not in caught.value.reason
        await server.command("SET", "tandem:routers", "x")
        with pytest.raises(StartError) as caught:
            await start_role(kind, kind, config(redis_url=server.url))
        assert caught.value.field == f"{kind}: cluster_name"
        if kind == "router":
            with pytest.raises(StartError) as caught:
                await start_role(kind, kind, config(redis_url=server.url, host="0.0.0.0"))
            assert caught.value.field == "router: advertise_host"
    nobody = config(redis_url=f"redis://127.0.0.1:{free_port()}")
    role = await start_role(kind, kind, nobody)
    await stop_process(role.process)


async def test_a_client_of_several_goes_to_the_next(model, cluster_of) -> None:  # type: ignore[no-untyped-def]
    nobody = f"127.0.0.1:{free_port()}"
    async with running(cluster_of(model, routers=2, **SIM)) as (cluster, _):
        async with Client(f"{nobody}, {cluster.addresses[0]}", cluster.addresses[1]) as client:
            await finished([Stream(client, prompt_of(1), 5)])
            assert (await client.list_models())[0].decode_workers == 1
            assert (await client.explain(token_ids=prompt_of(1))).num_candidates > 0
            stream = Stream(client, prompt_of(2), 1000)
            await stream.reached(3)
            cluster.router.process.kill()
            assert_equal_answers([await stream.task], await finished([Stream(client, prompt_of(2), 1000)]))
        async with Client(nobody) as client:
            with pytest.raises(Unavailable):
                await Stream(client, prompt_of(1), 5).task
