"""`tandem cache drop` over a real cluster: blocks leave pool and stores, and the router's index hears of it."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from cluster.errors import InvalidRequest
from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import channel
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from support.processes import Stream, finished, running, until
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster

TEXT = " ".join(f"the {number} fox" for number in range(60))


async def tandem(*arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and what it printed."""
    command = [sys.executable, "-m", "tandem.cli", "cache", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def held(client: Client, prompt: list[int], tenant: str = "") -> int:
    """Return how many blocks of a prompt the router's index has for the decode worker, without the store."""
    explanation = await client.explain(token_ids=prompt, tenant=tenant)
    return max(candidate.blocks for candidate in explanation.candidates if not candidate.lender)


async def ask(cluster: LocalCluster, request: pb.CacheRequest) -> pb.CacheReport:
    async with channel(cluster.workers[0].address, None) as link:
        try:
            return await pb_grpc.WorkerStub(link).Cache(request, timeout=10.0)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


async def test_blocks_of_a_prompt_and_then_all_of_them(
    sim_model: Callable[..., Path], cluster_of: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    model = sim_model(600, speaks=True)
    store = tmp_path / "store"
    settings = {"engine": "sim", "kv_memory_mib": 1, "kv_store": str(store), "kv_store_writes": "computed"}
    settings |= {"sim_step_ms": 2.0}  # the last stream must not end before the drop
    settings |= {"kv_host_memory_mib": 4, "kv_disk_dir": str(tmp_path / "disk"), "kv_disk_mib": 8}
    router = {"isolate_tenants": True}
    async with running(cluster_of(model, prefill=0, decode=1, router=router, **settings)) as (cluster, client):
        prompt = await client.tokenize(TEXT)
        other = [number % 590 + 1 for number in range(300)]
        streams = [Stream(client, prompt, 3, tenant="acme"), Stream(client, other, 3)]
        await finished(streams)
        full, of_other = len(prompt) // 16, (len(other) - 1) // 16

        def objects() -> int:
            return sum(1 for path in store.rglob("*") if path.is_file() and len(path.name) == 32)

        both = full + len(other) // 16

        async def known() -> bool:
            return await held(client, prompt, "acme") == full

        await until(known, "the router's index has the prompt")

        await until(lambda: objects() >= both, "all blocks are in the store")
        code, printed = await tandem(
            "drop", TEXT, "--tenant", "acme", "--store", "--address", cluster.address, "--worker", "decode-0"
        )
        assert code == 0, printed
        words = " ".join(printed.split())
        assert (
            f"{full} blocks dropped from the pool, 0 from the local store, 0 in use stay, {full} objects removed"
            in words
        )
        assert objects() == both - full

        async def forgotten() -> bool:
            return await held(client, other) == of_other and not await held(client, prompt, "acme")

        await until(forgotten, "the router has heard of it")
        (again,) = await finished([Stream(client, prompt, 3, tenant="acme")])
        assert again.receipt.kv.computed_blocks == len(prompt) // 16 + 1
        assert again.token_ids == streams[0].token_ids

        for number in range(16):  # 8192 tokens fit: the first prompts fall into the local store
            await finished([Stream(client, [(7 * number + at) % 599 for at in range(1, 1001)], 3)])
        kept = Stream(client, other, 3000)
        await kept.reached(1)
        report = await ask(cluster, pb.CacheRequest(drop=pb.CacheDrop(all=True)))
        assert report.in_use >= of_other
        assert report.dropped_from_pool > 100
        assert report.dropped_from_tiers > 100
        kept.task.cancel()

        async def empty() -> bool:
            report = await ask(cluster, pb.CacheRequest(drop=pb.CacheDrop(all=True)))
            return not report.in_use and not report.filled_blocks and not await held(client, other)

        await until(empty, "nothing is cached, and the router has heard of it")


async def test_bad_drops_name_their_field(
    sim_model: Callable[..., Path], cluster_of: Callable[..., LocalCluster]
) -> None:
    cluster = cluster_of(sim_model(600), prefill=0, decode=1, engine="sim")
    async with running(cluster) as (_, client):
        (stream,) = await finished([Stream(client, list(range(1, 100)), 3)])
        for drop, field in (
            (pb.CacheDrop(), "drop.token_ids"),
            (pb.CacheDrop(all=True, token_ids=[1]), "drop.token_ids"),
            (pb.CacheDrop(all=True, store=True), "drop.store"),
            (pb.CacheDrop(token_ids=[1, 2], store=True), "drop.store"),
            (pb.CacheDrop(token_ids=[1, 999]), "drop.token_ids"),
            (pb.CacheDrop(token_ids=[1], adapter="none"), "drop.adapter"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await ask(cluster, pb.CacheRequest(drop=drop))
            assert refused.value.field.startswith(field)
        (again,) = await finished([Stream(client, list(range(1, 100)), 3)])
        assert again.receipt.kv.reused_blocks == 6
        assert again.finish.reason == public_pb.FINISH_REASON_LENGTH
        assert stream.token_ids == again.token_ids
        for words, said in (
            (("drop", "text", "--all"), "either a prompt or --all"),
            (("drop", "--store"), "give a prompt"),
        ):
            code, printed = await tandem(*words, "--address", cluster.address)
            assert code != 0
            assert said in " ".join(printed.split())
