"""Processes of the live parts: a router, sim workers in one process, and bare grpc.aio processes beside them."""

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models import sim_model
from router.config import RouterConfig
from tandem.client import Client
from tandem.local.local_cluster import RoleProcess, start_role, stop_process
from tandem.local.sim_workers import SimPoolConfig


@dataclass(frozen=True, slots=True)
class Site:
    router: RoleProcess
    workers: RoleProcess


@contextlib.asynccontextmanager
async def sim_site(router: dict[str, Any], **pool: Any) -> AsyncIterator[Site]:
    """Start a router and a SimPool with these settings; enter when all workers have joined."""
    with tempfile.TemporaryDirectory() as folder:
        model = sim_model(Path(folder) / "sim")
        started: list[RoleProcess] = []
        try:
            started.append(
                await start_role("router", "router", RouterConfig.parse({"model": model, "port": 0} | router))
            )
            parsed = SimPoolConfig.parse({"model": model, "routers": (started[0].address,)} | pool)
            started.append(await start_role("tandem.local.sim_workers", "workers", parsed))
            async with Client(started[0].address) as client:
                await client.wait_for_workers(parsed.prefill, parsed.decode, 60)
            yield Site(*started)
        finally:
            for role in reversed(started):
                await stop_process(role.process)


@dataclass(frozen=True, slots=True)
class Bare:
    """Process without any of Tandem's code."""

    address: str
    pid: int


@contextlib.asynccontextmanager
async def bare(role: str, *arguments: str, module: str = "bench.bare.chain") -> AsyncIterator[Bare]:
    async with process(sys.executable, "-m", module, role, *arguments) as started:
        yield Bare(await first_line(started), started.pid)


@contextlib.asynccontextmanager
async def process(*command: str, stderr: int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process that ends with the block.

    `stderr`: as in subprocess.
    """
    started = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def first_line(started: asyncio.subprocess.Process) -> str:
    """Return the line that the process prints when it serves."""
    assert started.stdout is not None
    return (await started.stdout.readline()).decode().strip()


def cpu_seconds(*pids: int) -> float:
    """Return the user and system time of processes so far; none of those that are over."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
