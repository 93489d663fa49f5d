"""Who lends to whom, over real processes, gRPC and NIXL: decode workers lend what they decoded, prefill workers read
from others what they lack, and what the pool evicted comes back from host memory.

The sim engine's tokens are hashes of the KV that was read, so equal tokens mean equal KV.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.processes import LENDER_ALWAYS, Stream, until
from tandem.client import Client
from tandem.local.local_cluster import stop_process

VOCAB = 1000
BLOCK = 16
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 2.0}
SLOWLY = {"sim_prompt_token_us": 5000.0}


def only_reading(cluster: Any) -> Any:
    """Decode workers that compute prompts so slowly that no silence of a lender on a busy machine makes them begin."""
    slow = [config.model_copy(update=SLOWLY) for config in cluster.topology.decode]
    cluster.replace_roles(decode=tuple(slow))
    return cluster


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


@asynccontextmanager
async def occupying(client: Client, prompt: list[int]) -> AsyncIterator[None]:
    """A stream that runs meanwhile, begun where nobody else runs."""

    async def idle() -> bool:
        (model,) = (await client.cluster_status()).models
        return not any(worker.running for worker in model.workers)

    await until(idle, "the router knows that nobody runs")
    stream = Stream(client, prompt, 4000)
    try:
        await stream.reached(1)
        yield
    finally:
        await stream.cancel()


async def would_read(client: Client, prompt: list[int], num_blocks: int, **placement: str) -> None:
    """The router has heard what the caches hold and who runs, and would place this prompt like this."""

    async def so() -> bool:
        first = (await client.explain(token_ids=prompt)).candidates[0]
        fields = {name: getattr(first, name) for name in placement}
        return fields == placement and first.hit_blocks >= num_blocks

    await until(so, f"the router would place at {placement}")


def other(decode_worker: str) -> str:
    return {"decode-0": "decode-1", "decode-1": "decode-0"}[decode_worker]


async def test_a_decode_worker_lends_what_it_decoded(model: Path, cluster_of: Any, ask: Any, audit: Any) -> None:
    cluster = only_reading(cluster_of(model, prefill=1, decode=2, router=LENDER_ALWAYS, **SIM))
    async with cluster, Client(cluster.address) as client:
        prompt = tokens(1, 10 * BLOCK)
        first = await ask(client, prompt, max_tokens=10 * BLOCK)
        history = [*prompt, *first.token_ids]  # of which its worker holds all that can be used, and nobody else does
        async with occupying(client, history):
            there = first.placement.decode_worker
            await would_read(client, history, 19, decode_worker=other(there), lender=there)
            second = await ask(client, history, max_tokens=8)
        assert second.placement.decode_worker != first.placement.decode_worker
        assert second.placement.lender == first.placement.decode_worker, second.placement.reason
        assert second.kv.moved_blocks == second.kv.verified_blocks == second.kv.lender_cached_blocks
        assert second.kv.moved_blocks >= 19, "what was decoded is among it"
        assert second.kv.loan_failure == ""
        alone = await ask(client, history, max_tokens=8, cache_salt="alone")
        assert second.token_ids == alone.token_ids
        await audit([worker.address for worker in cluster.workers])


async def test_what_a_lender_fetched_is_in_the_receipt(model: Path, cluster_of: Any, ask: Any, audit: Any) -> None:
    """A third worker decodes the next turn: its lender reads the history from the one that decoded it."""
    cluster = only_reading(cluster_of(model, prefill=1, decode=2, router=LENDER_ALWAYS, **SIM))
    async with cluster, Client(cluster.address) as client:
        prompt = tokens(6, 4 * BLOCK)
        first = await ask(client, prompt, max_tokens=20 * BLOCK)
        history = [*prompt, *first.token_ids]
        turn = [*history, *tokens(7, 12 * BLOCK)]
        async with occupying(client, tokens(8, 4)):
            there = first.placement.decode_worker
            await would_read(client, turn, 19, decode_worker=other(there), lender="prefill-0", source=there)
            second = await ask(client, turn, max_tokens=8)
        assert second.placement.decode_worker != first.placement.decode_worker
        assert (second.placement.lender, second.placement.source) == ("prefill-0", first.placement.decode_worker)
        kv = second.kv
        assert kv.lender_fetched_blocks >= 19
        assert kv.lender_computed_blocks <= 13
        assert kv.lender_cached_blocks + kv.lender_fetched_blocks + kv.lender_computed_blocks == kv.moved_blocks
        alone = await ask(client, turn, max_tokens=8, cache_salt="alone")
        assert second.token_ids == alone.token_ids
        await audit([worker.address for worker in cluster.workers])


TIERED: dict[str, Any] = SIM | {"kv_memory_mib": 1, "max_prefill_tokens": 2048, "sim_step_ms": 20.0}
"""A pool of 512 blocks of 2 KiB."""


async def fill(client: Client, ask: Any, seeds: range) -> None:
    """Push everything else out of the pool."""
    for seed in seeds:
        await ask(client, tokens(seed, 200 * BLOCK), max_tokens=1)


async def test_evicted_blocks_come_back_from_host_memory(model: Path, cluster_of: Any, ask: Any, audit: Any) -> None:
    cluster = cluster_of(model, prefill=0, decode=1, **TIERED, kv_host_memory_mib=4)
    async with cluster, Client(cluster.address) as client:
        prompt = tokens(10, 200 * BLOCK + 1)
        first = await ask(client, prompt, max_tokens=4)
        await fill(client, ask, range(11, 15))
        second = await ask(client, prompt, max_tokens=4)
        assert second.kv.restored_blocks > 150
        assert second.kv.computed_blocks < 50
        assert second.finish.usage.cached_tokens >= second.kv.restored_blocks * BLOCK
        assert "restore from local store" in [stage.name for stage in second.finish.receipt.stages]
        assert second.token_ids == first.token_ids
        await audit([worker.address for worker in cluster.workers])


async def test_a_lender_brings_back_what_it_evicted(model: Path, cluster_of: Any, ask: Any, audit: Any) -> None:
    cluster = cluster_of(model, prefill=1, decode=1, router=LENDER_ALWAYS, **TIERED, kv_host_memory_mib=4)
    async with cluster, Client(cluster.address) as client:
        prompt = tokens(20, 200 * BLOCK + 1)
        first = await ask(client, prompt, max_tokens=4)
        await fill(client, ask, range(21, 25))
        # The decode worker's own tier would do, so another one takes its place, with nothing.
        ((_, config),) = [(module, c) for module, c in cluster.topology.workers() if module == "decode_worker"]
        await stop_process(cluster.decode.pop().process)
        await cluster.add_worker("decode_worker", config.model_copy(update=SLOWLY | {"worker_id": "another"}))
        await would_read(client, prompt, 150, decode_worker="another", lender="prefill-0")
        second = await ask(client, prompt, max_tokens=4)
        assert second.kv.lender_fetched_blocks > 150, second.kv
        assert second.token_ids == first.token_ids
        await audit([worker.address for worker in cluster.workers])
