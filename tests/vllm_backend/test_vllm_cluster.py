"""A whole cluster of vLLM workers: router, fronts and engines as processes, KV over NIXL between them."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from cluster.errors import InvalidRequest
from engine.config import WorkerConfig
from protos import inference_pb2 as pb
from support.processes import LENDER_ALWAYS, Stream, busiest_decoder, engine_of, finished, kill_engine, running, until
from support.vllm_engines import BLOCK, OPTIONS, PYTHON, STORYTELLER, V2, need_vllm
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]
VLLM: dict[str, Any] = {
    "engine": "vllm",
    "vllm_python": PYTHON,
    "vllm_options": OPTIONS,
    "dtype": "float32",
    "kv_memory_mib": 64,
    "max_prefill_tokens": 64,
}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 2048), k=num_tokens)


class Site:
    """A cluster of one prefill and two decode workers, and a client of it."""

    def __init__(self, cluster: LocalCluster, client: Client, num_tokens: int) -> None:
        self.cluster, self.client, self.num_tokens = cluster, client, num_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.long)])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    settings = {"model": STORYTELLER, "faults": True} | VLLM | ({"vllm_python": V2} if request.param == "V2" else {})
    router = {"model": STORYTELLER, "port": 0} | LENDER_ALWAYS
    topology = plan_topology(1, 2, router, settings, [0, 1], 1)
    async with running(LocalCluster(topology)) as (cluster, client):
        # the interpreter of V2's kernels takes a tenth of a second for a step
        yield Site(cluster, client, 700 if request.param == "V1" else 24)


async def test_kv_moves_and_is_found_again(site: Site, ask, audit) -> None:  # type: ignore[no-untyped-def]
    prompt = prompt_of(1, 300)
    first = await ask(site.client, prompt, max_tokens=20, ignore_eos=True)
    assert (first.kv.moved_blocks, first.kv.transport) == ((len(prompt) - 1) // BLOCK, "nixl")
    assert first.kv.lender_computed_blocks == first.kv.moved_blocks

    async def told() -> bool:
        best = (await site.client.explain(token_ids=prompt)).candidates[0]
        return not best.lender and best.hit_blocks == first.kv.moved_blocks

    await until(told, "the router has learned what the decode worker holds")
    second = await ask(site.client, prompt, max_tokens=20, ignore_eos=True)
    assert second.token_ids == first.token_ids
    assert second.kv.reused_blocks == first.kv.moved_blocks
    salted = await ask(site.client, prompt, max_tokens=20, ignore_eos=True, cache_salt="another tenant")
    assert salted.token_ids == first.token_ids
    assert salted.kv.reused_blocks == salted.kv.lender_cached_blocks == 0
    await audit([worker.address for worker in site.cluster.workers])


async def test_what_vllm_cannot_do_is_refused_with_the_field(site: Site, ask) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest, match="beam_width"):
        await ask(site.client, prompt_of(2, 40), beam_width=2)
    with pytest.raises(InvalidRequest, match="vLLM reads at most 1023"):  # the model reads 2,048, vLLM was told 1,024
        await ask(site.client, prompt_of(2, 1024), max_tokens=2)


async def test_text_stops_and_structure_follow_the_request(site: Site, ask) -> None:  # type: ignore[no-untyped-def]
    prompt = prompt_of(3, 40)
    digits = pb.StructuredOutput(regex="[0-9]{12}")
    answer = await ask(site.client, prompt, max_tokens=40, structured=digits)
    assert answer.text.isdecimal()
    assert len(answer.text) == 12
    whole = await ask(site.client, prompt, max_tokens=30, ignore_eos=True)
    word = whole.text[5:9]
    stopped = await ask(site.client, prompt, max_tokens=30, ignore_eos=True, stop=[word])
    assert stopped.text == whole.text[: whole.text.index(word)]


async def test_streams_survive_a_decode_engine_and_a_decode_worker(site: Site) -> None:
    """The last test of this cluster: afterwards only one worker of each kind is left."""
    shapes = [(number, 60 + 41 * number, site.num_tokens) for number in range(4)]
    whole = [Stream(site.client, prompt_of(seed, size), count, cache_salt="w") for seed, size, count in shapes]
    undisturbed = [stream.token_ids for stream in await finished(whole)]
    streams = [Stream(site.client, prompt_of(seed, size), count, cache_salt="d") for seed, size, count in shapes]
    await asyncio.gather(*(stream.reached(5) for stream in streams))
    worker, _ = await busiest_decoder(site.cluster)
    kill_engine(worker)
    assert [stream.token_ids for stream in await finished(streams)] == undisturbed
    # Tokens may have been under way to the client when the engine was killed, up to the end of a stream.
    moved = [stream.receipt.placement for stream in streams if stream.receipt.placement.attempt > 1]
    assert moved, "the engine was killed while streams ran"
    assert worker.name not in {placement.decode_worker for placement in moved}


@pytest.mark.long
async def test_engines_of_both_kinds_serve_one_model_and_never_exchange_kv(ask) -> None:  # type: ignore[no-untyped-def]
    torch_settings = {"model": STORYTELLER, "dtype": "float32", "block_tokens": BLOCK, "kv_memory_mib": 64}
    router = {"model": STORYTELLER, "port": 0} | LENDER_ALWAYS
    topology = plan_topology(1, 1, router, torch_settings | {"max_prefill_tokens": 64}, [0], 1)
    async with running(LocalCluster(topology)) as (cluster, client):
        settings = {"model": STORYTELLER, "cores": (1,)} | VLLM
        added = [
            await cluster.add_worker(f"{role}_worker", WorkerConfig.parse(settings | {"worker_id": f"{role}-vllm"}))
            for role in ("prefill", "decode")
        ]
        cluster.engines += [engine_of(worker) for worker in added]  # type: ignore[attr-defined]
        asked = [ask(client, prompt_of(60 + i, 200), max_tokens=40, ignore_eos=True) for i in range(12)]
        answers = await asyncio.gather(*asked)
        pairs = {(answer.placement.decode_worker, answer.placement.lender) for answer in answers}
        assert pairs == {("decode-0", "prefill-0"), ("decode-vllm", "prefill-vllm")}
        assert all(answer.kv.moved_blocks == 6 and not answer.kv.loan_failure for answer in answers)
