"""Workers that connect before their first loan, and engines that are warm when they are ready."""

import asyncio
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.worker.front.introductions import MEET_S, Introductions
from engine.worker.front.lender_streams import LenderStreams

from cluster.network.rpc import channel
from engine.config import WorkerConfig
from engine.messages.from_engine import CacheChanged, CacheInspected, LoadReport
from engine.messages.to_engine import InspectCache, TakeSnapshot
from engine.process.front.engine_client import EngineClient
from engine.process.front.local_engine import LocalEngine
from engine.process.spec import EngineSpec
from kvtransfer.local import LocalNetwork
from protos import lend_pb2 as pb
from protos import lend_pb2_grpc as pb_grpc
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


async def test_peers_that_cannot_be_met_are_passed_over(model: Path, cluster_of: Any, ask: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and says nothing
        refused = socket.create_server(("127.0.0.1", 0))
        closed = f"127.0.0.1:{refused.getsockname()[1]}"
        refused.close()
        settings = {"model": model, "engine": "sim", "kv_memory_mib": 8}
        spec = EngineSpec(WorkerConfig.parse(settings), "decode", "alone", "alone")
        engine = EngineClient(LocalEngine(spec, LocalNetwork()))
        ready = await engine.start()
        lenders = LenderStreams(engine, ready.model_fingerprint, ready.block_tokens, 8.0)
        introductions = Introductions(engine, lenders, ready, b"me")
        peers = [
            pb.Holder(worker_id="closed", address=closed, incarnation=b"1"),
            pb.Holder(worker_id="silent", address=f"127.0.0.1:{silent.getsockname()[1]}", incarnation=b"2"),
        ]
        async with asyncio.timeout(MEET_S + 20):
            await introductions.meet(pb.Holder(worker_id="me", address="127.0.0.1:1", incarnation=b"me"), peers)
        audited = await engine.audit()
        assert (audited.fault, audited.held_blocks, audited.quarantined_blocks) == ("", 0, 0)
        await introductions.close()
        await engine.stop()


async def test_a_worker_is_met_by_its_incarnation_and_its_weights(model: Path, cluster_of: Any) -> None:
    async with cluster_of(model, **SIM) as cluster, channel(cluster.decode[0].address) as link:
        call = pb_grpc.LendStub(link).Meet(pb.MeetRequest(incarnation=b"another"))
        with pytest.raises(Exception, match="another worker process listens at this address"):
            await call


async def test_a_warm_torch_engine_has_computed_and_has_nothing(tiny_model: Path) -> None:
    engine = RealEngine("warm", tiny_model, engine="torch", dtype="float32")
    async with engines(engine):
        assert engine.ready.warm_up_s > 0
        await engine.audited()
        engine.send(InspectCache(2), TakeSnapshot())
        await engine.until(lambda: engine._said(CacheInspected) and engine._said(CacheChanged))
        await engine.until(lambda: engine._said(LoadReport))
        (inspected,) = [message for message in engine.said if isinstance(message, CacheInspected)]
        assert (inspected.held, inspected.filled) == (0, 0)
        assert all(not message.events for message in engine.said if isinstance(message, CacheChanged))
        loads = [message for message in engine.said if isinstance(message, LoadReport) and message.kv is not None]
        assert all(tier.queries == tier.hits == tier.used == 0 for load in loads for tier in load.kv.tiers)  # type: ignore[union-attr]
