"""Usage of tenants on real processes: no client has a receipt that the ledger lacks, whatever is killed."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import InvalidRequest, ServiceError
from conftest import ModelFactory
from protos import inference_pb2 as pb
from router.redis_usage import RedisUsage
from router.usage import UsageEntry, UsageTotal
from support.batch_site import kill_router, start_router_again
from support.openai_http import call, http_cluster
from support.processes import until
from support.redis_server import RedisServer
from tandem.client import Client

TENANTS = ("alice", "bob")
ENTRY = UsageEntry("r", 1_795_600_800.0, "alice", "m", 100, 60, 20, 5, True)


async def ask_again_and_again(address: str, tenant: str, receipts: dict[str, pb.Finish]) -> None:
    """Ask until the router is gone; keep the finish of each answer."""
    async with Client(address) as client:
        for number in range(10_000):
            sampling = pb.Sampling(max_tokens=1 + number % 7, n=1 + number % 2, ignore_eos=True)
            finishes = []
            with suppress(ServiceError):
                async for message in client.generate(
                    token_ids=range(1, 40 + number % 50), sampling=sampling, tenant=tenant, timeout_s=20
                ):
                    finishes += [message.finish] if message.HasField("finish") else []
            if not finishes or not finishes[-1].HasField("receipt"):
                return
            last = finishes[-1]
            last.usage.completion_tokens = sum(finish.usage.completion_tokens for finish in finishes)
            receipts[last.receipt.request_id] = last


async def test_a_ledger_has_every_receipt_after_kills(sim_model: ModelFactory, tmp_path: Path) -> None:
    file = tmp_path / "usage.jsonl"
    receipts: dict[str, pb.Finish] = {}
    async with http_cluster(sim_model(400), router={"usage_ledger": file}, engine="sim", sim_step_ms=1) as cluster:
        for _ in range(2):
            address = cluster.address
            async with Client(address) as client:
                await client.wait_for_workers(1, 1, 120)
            asking = [
                asyncio.ensure_future(ask_again_and_again(address, tenant, receipts))
                for tenant in TENANTS
                for _ in range(6)
            ]
            known = len(receipts)
            while len(receipts) < known + 150:
                await asyncio.sleep(0.01)
                assert not all(task.done() for task in asking)
            await kill_router(cluster)
            await asyncio.gather(*asking)
            await start_router_again(cluster)
        async with Client(cluster.address) as client:
            await client.wait_for_workers(1, 1, 120)
            with suppress(ServiceError):
                async for _ in client.generate(token_ids=[1, 2], sampling=pb.Sampling(max_tokens=300), tenant="left"):
                    break

            async def is_known() -> bool:
                return any(total.tenant == "left" and total.output_tokens for total in await client.usage())

            await until(is_known, "the request that its client left is in the ledger")
        entries = [UsageEntry.of_line(line) for line in file.read_bytes().splitlines()]
        written = {entry.request_id: entry for entry in entries if entry.is_complete}
        assert len(written) == sum(entry.is_complete for entry in entries), "each request is written once"
        for name, finish in receipts.items():
            entry, usage = written[name], finish.usage
            assert (entry.input_tokens, entry.cached_tokens) == (usage.prompt_tokens, usage.cached_tokens)
            assert entry.output_tokens == usage.completion_tokens
        assert len(receipts) >= 300
        status, _, said = await asyncio.to_thread(call, cluster.router.http_address, "/v1/usage?days=2")
        assert status == 200
        for tenant in TENANTS:
            own = [entry for entry in entries if entry.tenant == tenant]
            (total,) = [each for each in said["data"] if each["tenant"] == tenant]
            assert total["requests"] == len(own)
            assert total["output_tokens"] == sum(entry.output_tokens for entry in own)
        async with Client(cluster.address) as client:
            totals = await client.usage(days=2)
            assert sorted(total.tenant for total in totals) == sorted(each["tenant"] for each in said["data"])
            with pytest.raises(InvalidRequest, match="days"):
                await client.usage(days=1000)


async def test_routers_keep_one_ledger_in_redis(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.redis_usage.today", lambda: "2026-11-26")
    ledgers = [RedisUsage(redis.url, "test", 35) for _ in range(2)]
    entries = [replace(ENTRY, request_id=f"r{number}", tenant=TENANTS[number % 2]) for number in range(40)]
    entries += [replace(ENTRY, request_id="later", at=ENTRY.at + 86_400, tenant='a "b": \n')]
    await asyncio.gather(*(ledgers[number % 2].add(entry) for number, entry in enumerate(entries)))
    await ledgers[0].write(entries[0])  # a call whose answer was lost is made again
    expected = [UsageTotal("2026-11-25", tenant, "m", 20, 2000, 1200, 400, 100) for tenant in TENANTS]
    expected.append(UsageTotal("2026-11-26", 'a "b": \n', "m", 1, 100, 60, 20, 5))
    assert await ledgers[1].since(2) == expected
    stream: Any = await redis.command("XRANGE", "test:usage", "-", "+")
    assert sorted(json.loads(fields["entry"])["request_id"] for _, fields in stream) == sorted(
        e.request_id for e in entries
    )
    await redis.hang()
    await ledgers[0].add(replace(ENTRY, request_id="while it hung"))
    redis.wake()
    await ledgers[0].add(replace(ENTRY, request_id="afterwards"))
    assert (await ledgers[1].since(2))[0].requests == 22, "what could not be written was written later, once"
    for ledger in ledgers:
        await ledger.close()
