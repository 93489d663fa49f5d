"""Workers that connect before their first loan, and engines that are warm when they are ready."""

import asyncio
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import WorkerConfig
from engine.messages.from_engine import CacheChanged, CacheInspected, LoadReport
from engine.messages.to_engine import InspectCache, TakeSnapshot
from support.processes import LENDER_ALWAYS
from support.real_engines import RealEngine, engines
from tandem.client import Client
from tandem.local.local_cluster import stop_process

SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 1.0, "kv_memory_mib": 8, "log_level": "info"}


class Told:
    """What the workers wrote, so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self._text = ""

    def text(self) -> str:
        self._text += self._capfd.readouterr().err
        return self._text

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.text()))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - other processes write it
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("lanes", [(), ("tcp",)])
async def test_workers_connect_as_they_join_and_later_ones_too(
    cluster_of: Any, ask: Any, audit: Any, model: Path, lanes: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    told = Told(capfd)
    cluster = cluster_of(model, router=LENDER_ALWAYS, strict_lanes=lanes, **SIM)
    async with cluster, Client(cluster.address) as client:
        for one, other in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
            await told.until(lambda one=one, other=other: told.count(rf"\[{one}\].*connected to {other}") == 1)
        later = WorkerConfig.parse({"model": model, "worker_id": "decode-later", "strict_lanes": lanes} | SIM)
        await cluster.add_worker("decode_worker", later)
        await client.wait_for_workers(1, 2, 120)
        for one, other in (("prefill-0", "decode-later"), ("decode-later", "prefill-0")):
            assert told.count(rf"\[{one}\].*connected to {other}") == 1, "before it is a member"
        await audit([worker.address for worker in cluster.workers])
        prompt = random.Random(1).choices(range(600), k=200)
        answer = await ask(client, prompt)
        assert answer.kv.moved_blocks > 0
        assert not answer.kv.loan_failure
        assert "not connected" not in told.text()


async def test_a_worker_that_died_unseen_stops_no_start(
    cluster_of: Any, ask: Any, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = Told(capfd)
    async with cluster_of(model, router=LENDER_ALWAYS, **SIM) as cluster, Client(cluster.address) as client:
        cluster.decode[0].process.kill()
        later = WorkerConfig.parse({"model": model, "worker_id": "decode-later"} | SIM)
        await cluster.add_worker("decode_worker", later)
        await stop_process(cluster.decode[0].process)
        answer = await ask(client, random.Random(2).choices(range(600), k=200))
        assert answer.kv.moved_blocks > 0
        await told.until(lambda: told.count(r"\[decode-later\].*connected to prefill-0") == 1)


async def test_a_warm_torch_engine_has_computed_and_has_nothing(tiny_model: Path) -> None:
    engine = RealEngine("warm", tiny_model, engine="torch", dtype="float32")
    async with engines(engine):
        assert engine.ready.warm_up_s > 0
        await engine.audited()
        engine.send(InspectCache(2), TakeSnapshot())
        await engine.until(lambda: engine.has_said(CacheInspected) and engine.has_said(CacheChanged))
        await engine.until(lambda: engine.has_said(LoadReport))
        (inspected,) = [message for message in engine.said if isinstance(message, CacheInspected)]
        assert (inspected.held, inspected.filled) == (0, 0)
        assert all(not message.events for message in engine.said if isinstance(message, CacheChanged))
        loads = [message for message in engine.said if isinstance(message, LoadReport) and message.kv is not None]
        assert all(tier.queries == tier.hits == tier.used == 0 for load in loads for tier in load.kv.tiers)  # type: ignore[union-attr]
