"""LoRA adapters as models of their own: a cluster whose workers have different ones."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from cluster.errors import UnknownModel
from support.adapters import LLAMA, adapter_weights, write_adapter
from support.processes import (
    LENDER_ALWAYS,
    Stream,
    busiest_decoder,
    finished,
    kill_worker,
    named,
    running,
    workers_joined,
)
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster

PROMPT = list(range(1, 60))


@pytest.fixture
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(600)


@pytest_asyncio.fixture
async def site(model: Path, tmp_path: Path, cluster_of: Any) -> AsyncIterator[tuple[LocalCluster, Client]]:
    """One prefill worker with both adapters; decode workers with both, with `legal`, and with none."""
    legal, poems = (write_adapter(tmp_path / name, adapter_weights(LLAMA, seed)) for seed, name in enumerate("ab"))
    cluster = cluster_of(
        model, prefill=1, decode=3, engine="sim", sim_step_ms=1.0, router=LENDER_ALWAYS | {"http_port": 0}
    )
    topology = cluster.topology
    sets = {"both": {"legal": legal, "poems": poems}, "legal-only": {"legal": legal}, "none": {}}
    decode = tuple(
        worker.model_copy(update={"worker_id": name, "adapters": adapters})
        for worker, (name, adapters) in zip(topology.decode, sets.items(), strict=True)
    )
    prefill = tuple(worker.model_copy(update={"adapters": sets["both"]}) for worker in topology.prefill)
    cluster.replace_roles(prefill=prefill, decode=decode)
    async with running(cluster) as (cluster, client):
        yield cluster, client


async def asked(client: Client, model: str, count: int = 6, **options: Any) -> list[Stream]:
    """Different prompts, at once."""
    streams = [Stream(client, [number + 1, *PROMPT], 5, model=model, **options) for number in range(count)]
    return await finished(streams)


async def test_requests_go_to_workers_that_have_the_adapter(site: tuple[LocalCluster, Client]) -> None:
    cluster, client = site
    listed = {model.name: model for model in await client.list_models()}
    base = next(name for name, model in listed.items() if not model.base_model)
    assert {name: model.base_model for name, model in listed.items()} == {base: "", "legal": base, "poems": base}
    assert [listed[name].decode_workers for name in (base, "legal", "poems")] == [3, 2, 1]

    answers = {}
    for name, allowed in (
        (base, {"both", "legal-only", "none"}),
        ("legal", {"both", "legal-only"}),
        ("poems", {"both"}),
    ):
        streams = await asked(client, name)
        assert {stream.receipt.placement.decode_worker for stream in streams} <= allowed
        assert {stream.receipt.model for stream in streams} == {name}
        answers[name] = [tuple(stream.token_ids) for stream in streams]
    for name, others in answers.items():  # nothing cached or lent of one is used for another
        assert [list(each) for each in others] == [s.token_ids for s in await asked(client, name)]
    for one, two, three in zip(*answers.values(), strict=True):
        assert len({one, two, three}) == 3

    with pytest.raises(UnknownModel, match="verse"):
        await asked(client, "verse", 1)
    async with (
        aiohttp.ClientSession(f"http://{cluster.router.http_address}") as http,
        http.get("/v1/models") as response,
    ):
        said = (await response.json())["data"]
    assert {model["id"]: model["parent"] for model in said} == {base: None, "legal": base, "poems": base}


async def test_an_adapter_fails_over_to_workers_that_have_it_and_goes_with_the_last(
    site: tuple[LocalCluster, Client],
) -> None:
    cluster, client = site
    (undisturbed,) = await asked(client, "legal", 1)
    stream = Stream(client, [1, *PROMPT], 3000, model="legal")
    await stream.reached(5)
    serving, num_requests = await busiest_decoder(cluster)
    assert num_requests, "the stream has not ended yet"
    kill_worker(serving)
    await finished([stream])
    assert stream.receipt.placement.decode_worker in {"both", "legal-only"} - {serving.name}
    assert stream.token_ids[:5] == undisturbed.token_ids
    left = ({"both", "legal-only"} - {serving.name}).pop()
    kill_worker(named(cluster, left))
    await workers_joined(client, 1, 1)
    with pytest.raises(UnknownModel):
        await asked(client, "legal", 1)
    await asked(client, "", 1)
