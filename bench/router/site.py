"""What the live parts run on: a router, sim workers in one process, and bare grpc.aio processes beside them."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.config import RouterConfig
from tandem.client import Client
from tandem.local import RoleProcess, start_role, stop_process
from tandem.sim_pool import SimPoolConfig

VOCAB = 1000


@dataclass(frozen=True, slots=True)
class Site:
    router: RoleProcess
    workers: RoleProcess


@contextlib.asynccontextmanager
async def sim_site(router: dict[str, Any], **pool: Any) -> AsyncIterator[Site]:
    """Settings of the router, and of SimPoolConfig; entered when all workers have joined."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "sim"
        model.mkdir()
        config = {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 1 << 20}
        (model / "config.json").write_text(json.dumps(config))
        started: list[RoleProcess] = []
        try:
            started.append(
                await start_role("router", "router", RouterConfig.parse({"model": model, "port": 0} | router))
            )
            parsed = SimPoolConfig.parse({"model": model, "routers": (started[0].address,)} | pool)
            started.append(await start_role("tandem.sim_pool", "workers", parsed))
            async with Client(started[0].address) as client:
                await client.wait_for_workers(parsed.prefill, parsed.decode, 60)
            yield Site(*started)
        finally:
            for role in reversed(started):
                await stop_process(role.process)


@dataclass(frozen=True, slots=True)
class Bare:
    """A process of `bench.chain`."""

    address: str
    pid: int


@contextlib.asynccontextmanager
async def bare(role: str, *arguments: str) -> AsyncIterator[Bare]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.chain",
        role,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Bare((await process.stdout.readline()).decode().strip(), process.pid)
    finally:
        process.kill()
        await process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
