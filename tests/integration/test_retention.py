"""Prompts that stay in workers' pools, and what `tandem cache` shows of them."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.processes import Stream as Generation
from support.processes import finished, running
from tandem.local.local_cluster import LocalCluster

POOL_TOKENS = 8192
"""1 MiB of the sim engine's blocks."""


async def tandem(*arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and what it printed."""
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_a_kept_prompt_outlives_a_flood_until_an_operator_lets_it_go(
    sim_model: Callable[..., Path], cluster_of: Callable[..., LocalCluster]
) -> None:
    model = sim_model(600, speaks=True)
    async with running(cluster_of(model, prefill=0, decode=1, engine="sim", kv_memory_mib=1)) as (cluster, client):
        kept, other = list(range(1, 200)), list(range(200, 399))
        (first,) = await finished([Generation(client, kept, 3, tenant="acme", cache_retention_s=600.0)])
        assert first.receipt.kv.pinned_blocks == 12
        await finished([Generation(client, other, 3)])

        async def flood() -> None:
            for number in range(2 * POOL_TOKENS // 1000):
                prompt = [(7 * number + place) % 599 for place in range(1, 1001)]
                await finished([Generation(client, prompt, 3)])

        async def reused(prompt: list[int]) -> int:
            (again,) = await finished([Generation(client, prompt, 3)])
            return again.receipt.kv.reused_blocks

        await flood()
        assert await reused(kept) == 12
        code, printed = await tandem("cache", "ls", "--address", cluster.address)
        assert code == 0, printed
        assert "acme: 12" in printed
        code, printed = await tandem("cache", "pin", "once upon a time", "--address", cluster.address)
        assert code == 0, printed
        assert "stay for 3600 s" in printed
        code, printed = await tandem("cache", "drop", "--tenant", "acme", "--address", cluster.address)
        assert code == 0, printed
        assert "12 blocks may be evicted again" in printed
        await flood()
        assert await reused(kept) == 0
        code, printed = await tandem("cache", "melt", "--address", cluster.address)
        assert code != 0
        assert "known are ls, pin, warm, drop" in printed
