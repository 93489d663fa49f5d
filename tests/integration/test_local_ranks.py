"""Several workers of a group by one program: their settings, and their common end."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.config import WorkerConfig
from support.processes import children_running, gone
from support.sim_directories import write_sim_model
from tandem.local.local_cluster import RoleProcess, start_role, stop_process
from worker.local_ranks import configs_of

COUNT = 3


def config_of(folder: Path, **others: object) -> WorkerConfig:
    folder.mkdir(exist_ok=True)
    model = write_sim_model(folder / "model", 1000)
    group = {"data_parallel": 2 * COUNT, "data_parallel_local": COUNT}
    return WorkerConfig.parse({"model": str(model), "engine": "sim", "worker_id": "w", "drain_s": 0.1} | group | others)


def test_each_has_a_rank_a_name_ports_and_cores_of_its_own(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        data_parallel_rank=3,
        port=5000,
        metrics_port=6000,
        health_port=7000,
        cores=tuple(range(7)),
    )
    configs = configs_of(config, "decode")
    assert [(each.data_parallel_rank, each.data_parallel_local, each.worker_id) for each in configs] == [
        (3, 1, "w-0"),
        (4, 1, "w-1"),
        (5, 1, "w-2"),
    ]
    assert [(each.port, each.metrics_port, each.health_port) for each in configs] == [
        (5000, 6000, 7000),
        (5001, 6001, None),
        (5002, 6002, None),
    ]
    assert [each.cores for each in configs] == [(0, 1), (2, 3), (4, 5)]
    free = configs_of(config_of(tmp_path / "free", port=0), "decode")
    assert {(each.port, each.metrics_port) for each in free} == {(0, None)}


async def start(folder: Path) -> tuple[RoleProcess, list[int]]:
    program = await start_role("decode_worker", "group", config_of(folder))
    workers = children_running(program.pid, "worker.local_ranks")
    assert len(workers) == COUNT, "the program serves once each of them does"
    return program, workers


async def ended(program: RoleProcess) -> int:
    async with asyncio.timeout(20):
        return await program.process.wait()


@pytest.mark.asyncio
async def test_they_end_together(tmp_path: Path) -> None:
    program, workers = await start(tmp_path)
    await stop_process(program.process)
    assert program.process.returncode == 0
    await gone(workers)


@pytest.mark.asyncio
async def test_one_that_dies_ends_the_others_and_the_program(tmp_path: Path) -> None:
    program, workers = await start(tmp_path)
    os.kill(workers[1], signal.SIGKILL)
    assert await ended(program) == 128 + signal.SIGKILL
    await gone(workers)


@pytest.mark.asyncio
async def test_no_worker_outlives_the_program(tmp_path: Path) -> None:
    program, workers = await start(tmp_path)
    program.process.kill()
    await ended(program)
    await gone(workers)
