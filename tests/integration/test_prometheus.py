"""A real Prometheus scrapes a real cluster."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from support.ports import free_port
from support.processes import Stream, finished, until
from tandem.client import Client

PROMETHEUS = shutil.which("prometheus")


class Prometheus:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def value(self, query: str) -> float | None:
        """Of an instant query; None without a result, or while it starts."""
        try:
            async with self._session.get("/api/v1/query", params={"query": query}) as answer:
                if answer.status != 200:
                    return None
                found = (await answer.json())["data"]["result"]
        except aiohttp.ClientConnectionError:
            return None
        return float(found[0]["value"][1]) if found else None


@asynccontextmanager
async def prometheus(targets: list[str], folder: Path) -> AsyncIterator[Prometheus]:
    assert PROMETHEUS is not None
    address = f"127.0.0.1:{free_port()}"
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "tandem", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(f"http://{address}") as session:
            yield Prometheus(session)
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus server: apt-get install prometheus")
async def test_prometheus_scrapes_routers_and_workers(model: Path, cluster_of: Any, tmp_path: Path) -> None:
    router = {"metrics_port": 0, "decode_prefill_tokens_per_s": 100.0}
    async with cluster_of(model, prefill=1, decode=1, router=router, engine="sim", metrics_port=0) as cluster:
        targets = [role.metrics_address for role in [cluster.router, *cluster.workers]]
        assert all(targets)
        async with prometheus(targets, tmp_path) as scraped, Client(cluster.address) as client:
            await finished([Stream(client, list(range(start, start + 200)), 5) for start in (0, 300, 600)])

            async def counted() -> bool:
                done = await scraped.value('tandem_request_success_total{finished_reason="length"}')
                return done == 3 and await scraped.value("sum(up)") == 3

            await until(counted, "all are scraped, and three requests are counted")
            assert await scraped.value("tandem_prompt_tokens_total") == 600
            assert await scraped.value("tandem_generation_tokens_total") == 15
            moved = await scraped.value('tandem_kv_blocks_total{origin="moved"}')
            assert moved is not None
            assert moved == await scraped.value("tandem_kv_blocks_verified_total") >= 3 * 10
            assert await scraped.value("tandem_kv_blocks_mismatched_total") == 0
            assert await scraped.value('tandem_workers{role="decode"}') == 1
            assert await scraped.value("count(tandem_engine_steps_total)") == 2
            assert await scraped.value("tandem_time_to_first_token_seconds_count") == 3
