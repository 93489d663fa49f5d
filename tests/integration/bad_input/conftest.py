"""One cluster of real processes over the sim engine for each file. After every test it serves and holds no block."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from engine.config import WorkerConfig
from protos import membership_pb2_grpc
from router.config import RouterConfig
from support.observed_cluster import CONTEXT, GOOD, VOCAB, OverhearingRouter, Site
from support.sim_directories import write_sim_model, write_tokenizer
from tandem.client import Client
from tandem.local.local_cluster import RoleProcess, start_role, stop_process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Of a module with ROUTER, its router has these settings, and its model a tokenizer."""
    model = write_sim_model(tmp_path_factory.mktemp("bad-input") / "simulated", VOCAB, CONTEXT)
    if settings_of_router := getattr(request.module, "ROUTER", {}):
        write_tokenizer(model, VOCAB)
    overhearing, listener = OverhearingRouter(), grpc.aio.server()
    membership_pb2_grpc.add_MembershipServicer_to_server(overhearing, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    router = await start_role("router", "router", RouterConfig.parse({"model": model, "port": 0} | settings_of_router))
    routers = (router.address, f"127.0.0.1:{port}")
    workers: list[RoleProcess] = []
    try:
        settings = {"model": model, "engine": "sim", "sim_step_ms": 1.0, "kv_memory_mib": 1, "routers": routers}
        starts = [
            start_role(f"{role}_worker", f"{role}-0", WorkerConfig.parse({"worker_id": f"{role}-0"} | settings))
            for role in ("prefill", "decode")
        ]
        workers += await asyncio.gather(*starts)
        async with Client(router.address) as client:
            await client.wait_for_workers(1, 1, 120)
        await asyncio.wait_for(overhearing.complete.wait(), 20)
        made = Site(router, workers, model, overhearing.hellos)
        yield made
        for link in made.links.values():
            await link.close()
    finally:
        await asyncio.gather(*(stop_process(role.process) for role in [*workers, router]))
        await listener.stop(None)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def still_serving(site: Site, ask: Any, audit: Any) -> AsyncIterator[None]:
    """After each test: the same processes serve, and hold nothing."""
    yield
    async with Client(site.router.address) as client:
        answer = await ask(client, GOOD, max_tokens=4, timeout_s=10.0)
        assert len(answer.token_ids) == 4
    assert all(role.process.returncode is None for role in [site.router, *site.workers])
    await audit([worker.address for worker in site.workers])
