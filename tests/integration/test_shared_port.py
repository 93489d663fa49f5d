"""Several routers behind one HTTP port."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cluster.errors import StartError
from router.config import RouterConfig
from support.ports import free_port
from support.processes import running, until
from tandem.local.local_cluster import RoleProcess, start_role

BODY: dict[str, Any] = {"model": "simulated", "prompt": "word1 word2", "max_tokens": 3, "temperature": 0}
CALLS = 40


async def ask(url: str) -> int:
    """Return the status of an answer on a new connection; 0 where the connection broke."""
    try:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=BODY) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0


async def answered_by(router: RoleProcess) -> float:
    """Return the number of requests that a router has completed."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{router.metrics_address}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tandem_request_success_total{"))


async def test_routers_of_one_port_share_the_connections(sim_model: Callable[..., Path], cluster_of: Any) -> None:
    """When one of them ends, the other one has all new connections."""
    shared = {"http_port": free_port(), "http_port_shared": True, "metrics_port": 0}
    cluster = cluster_of(sim_model(400, speaks=True), prefill=0, routers=2, router=shared, engine="sim")
    async with running(cluster) as (_, _):
        first, second = cluster.routers
        assert first.http_address == second.http_address
        url = f"http://{first.http_address}"

        async def all_are_answered() -> bool:
            return set(await asyncio.gather(*(ask(url) for _ in range(CALLS)))) == {200}

        await until(all_are_answered, "both routers know the worker")
        assert set(await asyncio.gather(*(ask(url) for _ in range(CALLS)))) == {200}
        counts = [await answered_by(role) for role in (first, second)]
        assert all(counts), counts
        second.process.kill()
        await second.process.wait()
        assert set(await asyncio.gather(*(ask(url) for _ in range(CALLS)))) == {200}


async def test_a_port_that_is_not_shared_is_refused_to_a_second_router(
    sim_model: Callable[..., Path], cluster_of: Any
) -> None:
    port = free_port()
    cluster = cluster_of(sim_model(400), prefill=0, router={"http_port": port}, engine="sim")
    async with running(cluster):
        config = RouterConfig.parse({"model": sim_model(400), "port": 0, "http_port": port, "http_port_shared": True})
        with pytest.raises(StartError, match=f"http_port: cannot listen on .*:{port}: {os.strerror(98)}"):
            await start_role("router", "second", config)


def test_a_shared_port_has_a_number() -> None:
    with pytest.raises(StartError, match="http_port_shared: needs `http_port` above 0"):
        RouterConfig.parse({"model": "m", "http_port": 0, "http_port_shared": True})
