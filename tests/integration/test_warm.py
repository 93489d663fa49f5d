"""Prompts that are placed on several workers before anybody asks: over real clusters of sim engines."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unauthenticated
from router.security.api_keys import PREFIX, hash_of
from support.api_keys import keys_file
from support.processes import LENDER_ALWAYS, Stream, finished, kill_worker, named, running, until
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.storyteller import STORYTELLER

PROMPT = [number % 590 + 1 for number in range(300)]
FULL = len(PROMPT) // 16
Clusters = Callable[..., LocalCluster]
Models = Callable[..., Path]


@pytest.mark.parametrize("prefill", [0, 1])
async def test_after_it_each_worker_has_all_full_blocks(sim_model: Models, cluster_of: Clusters, prefill: int) -> None:
    router = LENDER_ALWAYS if prefill else {}
    cluster = cluster_of(sim_model(600), prefill=prefill, decode=3, router=router, engine="sim")
    async with running(cluster) as (_, client):
        prompt = PROMPT[: FULL * 16]
        answer = await client.warm(token_ids=PROMPT, workers=2, request_id="w")
        assert (answer.request_id, answer.prompt_tokens, answer.blocks) == ("w", 300, FULL)
        names = {each.worker_id for each in answer.workers}
        assert len(names) == 2
        for each in answer.workers:
            kv = each.receipt.kv
            assert not each.status
            assert (each.held_blocks, each.pinned_blocks, each.stored_blocks) == (FULL, 0, 0)
            assert kv.reused_blocks + kv.moved_blocks + kv.computed_blocks == FULL
            assert bool(kv.moved_blocks) == bool(prefill)
            assert kv.computed_tokens == 16 * kv.computed_blocks

        async def known(workers: set[str]) -> bool:
            candidates = (await client.explain(token_ids=[*prompt, 7])).candidates
            return workers == {each.decode_worker for each in candidates if not each.lender and each.blocks == FULL}

        await until(lambda: known(names), "the router's index has it")
        again = await client.warm(token_ids=prompt, workers=3)
        came = {each.worker_id: each.receipt.kv.reused_blocks for each in again.workers}
        assert sorted(came.values()) == [0, FULL, FULL]
        assert {worker_id for worker_id, count in came.items() if count} == names
        assert sum(each.receipt.kv.moved_blocks for each in again.workers) in (0, FULL), "read from who has it"
        await until(lambda: known(set(came)), "the router's index has it for all")
        streams = [Stream(client, [*prompt, 7], 60) for _ in range(6)]
        await finished(streams)
        assert {each.receipt.placement.decode_worker for each in streams} == {each.worker_id for each in again.workers}
        assert all(each.receipt.kv.reused_blocks == FULL for each in streams)
        past = await client.decisions("w-0")
        assert past.placements[0].candidates[0].decode_worker == answer.workers[0].worker_id


async def test_cache_retention_store_and_the_command(sim_model: Models, cluster_of: Clusters, tmp_path: Path) -> None:
    settings = {"engine": "sim", "kv_store": str(tmp_path / "store"), "kv_memory_mib": 1}
    cluster = cluster_of(STORYTELLER, prefill=0, decode=2, **settings)
    async with running(cluster) as (_, client):
        answer = await client.warm(token_ids=PROMPT, cache_retention_s=60.0, store=True)
        (worker,) = answer.workers
        assert (worker.held_blocks, worker.pinned_blocks, worker.stored_blocks) == (FULL, FULL, FULL)

        def objects() -> int:
            return sum(1 for path in (tmp_path / "store").rglob("*") if path.is_file() and len(path.name) == 32)

        await until(lambda: objects() == FULL, "its blocks are in the store")
        chat = [("user", "tell me of the fox " * 12)]
        of_chat = await client.warm(messages=chat)
        assert of_chat.prompt_tokens == len(await client.tokenize(messages=chat))
        assert of_chat.blocks == of_chat.prompt_tokens // 16 > 0
        file = tmp_path / "prompt.txt"
        file.write_text(" ".join(f"the {number} fox" for number in range(60)))
        command = [sys.executable, "-m", "tandem.cli", "cache", "warm", "--prompt-file", str(file), "--workers", "2"]
        command += ["--retention", "30", "--address", cluster.address]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = (await process.communicate())[0].decode()
        assert process.returncode == 0, printed
        full = len(await client.tokenize(file.read_text())) // 16
        assert printed.count(f"holds {full}:") == 2
        assert printed.count(f"{full} stay") == 2


async def test_it_is_charged_counted_and_bounded_like_requests(
    sim_model: Models, cluster_of: Clusters, tmp_path: Path
) -> None:
    text = f"{PREFIX}{'a' * 43}"
    keys = keys_file(tmp_path, {"name": "a", "sha256": hash_of(text), "tenant": "a"})
    tenants = {"a": {"quota_tokens": 2 * FULL * 16 + 100, "quota_window_s": 3600}}
    router = {"api_keys_file": keys, "internal_port": 0, "tenants": tenants}
    cluster = cluster_of(sim_model(600), prefill=0, decode=2, router=router, engine="sim")
    async with cluster, Client(cluster.address, api_key=text) as client, Client(cluster.address) as nobody:
        await Stream(client, [1, 2, 3], 2).task
        with pytest.raises(Unauthenticated):
            await nobody.warm(token_ids=PROMPT)
        await client.warm(token_ids=PROMPT, workers=2)
        (total,) = await client.usage()
        assert (total.requests, total.input_tokens, total.output_tokens) == (3, 3 + 2 * FULL * 16, 2)
        with pytest.raises(Overloaded) as refused:
            await client.warm(token_ids=PROMPT, workers=2)
        assert refused.value.limit is not None


async def test_bad_requests_name_their_field(sim_model: Models, cluster_of: Clusters) -> None:
    cluster = cluster_of(sim_model(600), prefill=1, decode=2, engine="sim")
    async with running(cluster) as (_, client):
        for options, field, words in (
            ({"workers": 3}, "workers", "3 are requested, but only 2 decode workers serve"),
            ({"store": True}, "store", "share a store"),
            ({"token_ids": PROMPT[:15]}, "token_ids", "has 15 tokens, less than one KV block of 16"),
            ({"token_ids": []}, "text", "none|one|give|prompt"),
            ({"token_ids": [999]}, "token_ids", "999"),
            ({"cache_retention_s": -1.0}, "cache_retention_s", "above 0"),
        ):
            with pytest.raises(InvalidRequest, match=words) as refused:
                await client.warm(**({"token_ids": PROMPT} | options))  # type: ignore[arg-type]
            assert refused.value.field.startswith(field), options


async def test_deadline_cancel_and_death(sim_model: Models, cluster_of: Clusters, audit: Callable[..., object]) -> None:
    """A slow engine's call is cut off, and leaves nothing; a dead worker's place is taken by another."""
    settings = {"engine": "sim", "sim_step_ms": 50.0, "max_prefill_tokens": 16}
    router = {"no_worker_grace_s": 1.0}
    cluster = cluster_of(sim_model(600), prefill=0, decode=3, router=router, **settings)
    async with running(cluster) as (_, client):
        with pytest.raises(DeadlineExceeded):
            await client.warm(token_ids=PROMPT, workers=3, timeout_s=0.3)
        call = asyncio.ensure_future(client.warm(token_ids=PROMPT[::-1], workers=3, timeout_s=30.0))
        await asyncio.sleep(0.3)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

        await audit([worker.address for worker in cluster.workers])  # type: ignore[misc]
        prompt = [number % 580 + 2 for number in range(300)]
        call = asyncio.ensure_future(client.warm(token_ids=prompt, workers=2, timeout_s=30.0))

        async def busy() -> list[str]:
            (model,) = (await client.cluster_status()).models
            return [worker.worker_id for worker in model.workers if worker.running]

        await until(busy, "a worker computes it")
        victim = (await busy())[0]
        kill_worker(named(cluster, victim))
        answer = await call
        assert victim not in {each.worker_id for each in answer.workers}
        assert [(each.held_blocks, each.status) for each in answer.workers] == [(FULL, b"")] * 2
        assert len({each.worker_id for each in answer.workers}) == 2
