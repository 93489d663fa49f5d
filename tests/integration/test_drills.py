"""Faults that an operator injects into live workers, and the drill that reports what became of the streams."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Forbidden
from engine.config import WorkerConfig
from protos import inference_pb2 as public_pb
from support.processes import LENDER_ALWAYS, engine_of, named, running, state_of, until
from support.refusals import refusal_of
from tandem.drill.report import FAULTS, DrillCluster, FaultOptions
from tandem.local.local_cluster import LocalCluster
from tandem.local.sim_workers import SimPool

VOCAB = 600
SIM: dict[str, Any] = {
    "engine": "sim",
    "sim_step_ms": 4.0,
    "max_prefill_tokens": 64,
    "kv_memory_mib": 8,
    "peer_silence_s": 1.0,
}
ROUTER = LENDER_ALWAYS | {"learn_rates": False, "worker_silence_s": 5.0}
DELAY_S = 0.5
DELAY = ("--delay-ms", str(DELAY_S * 1e3))


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


@contextlib.asynccontextmanager
async def supervised(cluster: LocalCluster) -> AsyncIterator[None]:
    """Workers that die are started again, as Kubernetes or Ray would do."""

    async def supervise() -> None:
        while True:
            for worker in [each for each in cluster.workers if each.process.returncode is not None]:
                pool = cluster.decode if worker in cluster.decode else cluster.prefill
                pool.remove(worker)
                (again,) = [each for each in cluster.topology.workers() if each[1].worker_id == worker.name]
                cluster.engines.append(engine_of(await cluster.add_worker(*again)))  # type: ignore[attr-defined]
            await asyncio.sleep(0.02)

    supervising = asyncio.ensure_future(supervise())
    try:
        yield
        assert not supervising.done(), supervising.exception()
    finally:
        supervising.cancel()


async def fault_command(address: str, *options: str) -> tuple[int, str, str]:
    """`tandem fault`: its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem.cli", "fault", "--address", address, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


TRACES = {"kill": ("placed_again",), "corrupt": ("mismatched_blocks",), "partition": ("loans_failed",)}
"""What each fault leaves in receipts, unless placement chose no loan at that moment."""


async def drill_until(address: str, kind: str, has_struck: Callable[[dict[str, Any]], bool]) -> None:
    """Drill this fault alone, again and again, until it met streams at the moment for which it is made."""
    options = ("--drill", kind, "--seconds", "1.5", *DELAY, "--output-tokens", "200", "--json")
    struck = False
    while not struck:
        code, out, err = await fault_command(address, *options)
        assert code == 0, (out, err)
        struck = has_struck(json.loads(out))


def is_delayed(report: dict[str, Any]) -> bool:
    """A delay may also strike after the first tokens of its wave."""
    (ratio,) = [result["ttft_ratio"] for result in report["results"] if result["fault"] == "delay"]
    return bool(ratio * report["ttft_s"] > DELAY_S)


def has_left(kind: str, fields: Sequence[str], report: dict[str, Any]) -> bool:
    """Whether a fault met a stream or a loan."""
    return any(result[field] for result in report["results"] if result["fault"] == kind for field in fields)


@pytest.mark.timeout(900)
async def test_a_drill_of_all_faults_loses_nothing(model: Path, cluster_of: Any) -> None:
    """Each fault did happen, every stream ended with the right tokens, and all workers came back. Without anybody who
    starts a killed worker again, the drill says so."""
    drill = ("--drill", "all", "--seconds", "2.5", *DELAY, "--output-tokens", "200", "--json")
    async with running(cluster_of(model, decode=2, router=ROUTER, faults=True, **SIM)) as (cluster, _):
        async with supervised(cluster):
            code, out, err = await fault_command(cluster.address, *drill)
            assert code == 0, (out, err)
            report = json.loads(out)
            if not is_delayed(report):
                await drill_until(cluster.address, "delay", is_delayed)
            for kind, fields in TRACES.items():
                left = partial(has_left, kind, fields)
                if not left(report):
                    await drill_until(cluster.address, kind, left)
        results = {result["fault"]: result for result in report["results"]}
        assert tuple(results) == FAULTS
        for result in report["results"]:
            assert result["passed"]
            assert result["streams"] >= 16
            found = [result[name] for name in ("lost", "wrong", "stranded_blocks", "busy_workers", "broken", "errors")]
            assert found == [0, 0, 0, 0, [], []], result
        assert results["stop"]["worker"] == "prefill-0"
        assert results["stop"]["recovered_s"] >= 2.5
        assert results["partition"]["peer"] == "prefill-0"

        code, out, _ = await fault_command(cluster.address, "--drill", "kill", "--recovery-s", "0.5", "--json")
        assert code == 1
        (result,) = json.loads(out)["results"]
        assert (result["recovered_s"], result["lost"], result["wrong"]) == (None, 0, 0)


async def test_a_stopped_worker_wakes(model: Path, cluster_of: Any) -> None:
    async with running(cluster_of(model, router=ROUTER, faults=True, **SIM)) as (cluster, client):
        worker = named(cluster, "decode-0")
        pids = [worker.pid, engine_of(worker)]
        drilled = DrillCluster(client, None)

        async def are(*letters: str) -> bool:
            return all(state_of(pid) in letters for pid in pids)

        await drilled.inject("stop", "decode-0", FaultOptions(seconds=2.0, front=True))
        await until(lambda: are("T"), "front and engine are stopped")
        await until(lambda: are("S", "R"), "both run")
        await drilled.inject("stop", "decode-0", FaultOptions(seconds=2.0))

        await until(lambda: [state_of(pid) == "T" for pid in pids] == [False, True], "the engine is stopped")
        await until(lambda: are("S", "R"), "the engine runs")


async def test_what_is_refused_names_its_field(model: Path, cluster_of: Any) -> None:
    """And begins nothing: a partition from nobody leaves the loans of its worker alone."""
    async with running(cluster_of(model, router=ROUTER, faults=True, **SIM)) as (cluster, client):
        drilled = DrillCluster(client, None)
        for field, fault, worker, options, peer in (
            ("worker", "kill", "nobody", FaultOptions(), ""),
            ("fault", "hit", "decode-0", FaultOptions(), ""),
            ("seconds", "stop", "decode-0", FaultOptions(seconds=0), ""),
            ("seconds", "stop", "decode-0", FaultOptions(seconds=601), ""),
            ("seconds", "partition", "decode-0", FaultOptions(seconds=float("nan")), "prefill-0"),
            ("delay_ms", "delay", "decode-0", FaultOptions(delay_ms=-1), ""),
            ("blocks", "corrupt", "decode-0", FaultOptions(blocks=0), ""),
            ("peer", "partition", "decode-0", FaultOptions(), "nobody"),
            ("peer", "partition", "decode-0", FaultOptions(), "decode-0"),
            ("peer", "partition", "decode-0", FaultOptions(), ""),
            ("peer", "kill", "decode-0", FaultOptions(), "prefill-0"),
        ):
            with refusal_of(field):
                await drilled.inject(fault, worker, options, peer)
        answers = [
            message
            async for message in client.generate(
                token_ids=[7] * 200, sampling=public_pb.Sampling(max_tokens=4, temperature=0)
            )
        ]
        assert answers[-1].finish.receipt.kv.moved_blocks == 12
        code, _, err = await fault_command(cluster.address, "kill", "--worker", "nobody")
        assert (code, err) == (2, "error: worker: unknown worker 'nobody'; known are decode-0, prefill-0\n")


async def test_a_worker_without_the_setting_takes_none(model: Path, cluster_of: Any) -> None:
    async with running(cluster_of(model, router=ROUTER, **SIM)) as (_, client):
        for fault in FAULTS:
            with refusal_of("faults", Forbidden, match="false in the settings of decode-0"):
                await DrillCluster(client, None).inject(
                    fault, "decode-0", FaultOptions(), "prefill-0" if fault == "partition" else ""
                )


async def test_a_worker_that_shares_its_process_is_not_killed(model: Path, cluster_of: Any) -> None:
    """Nor stopped: that would be all the workers of the process."""
    async with running(cluster_of(model, prefill=0, router=ROUTER, **SIM)) as (cluster, client):
        drilled, pool = DrillCluster(client, None), SimPool()
        settings = {"model": model, "worker_id": "shared", "faults": True, "routers": (cluster.address,)}
        await pool.start("decode", WorkerConfig.parse(SIM | settings))

        async def joined() -> bool:
            return "shared" in [worker.worker_id for worker in await drilled.workers()]

        await until(joined, "the worker has joined")
        for fault in ("kill", "stop"):
            with refusal_of(fault, match="no engine process of its own"):
                await drilled.inject(fault, "shared", FaultOptions())
        await pool.close()
