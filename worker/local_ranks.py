"""Several workers of a data-parallel group as child processes of one program, so that they see each other's GPUs.

The program starts `data_parallel_local` workers, waits until all serve, and announces the first of them as itself. Its
health port is the first worker's. When one ends, all end: a group does not compute without one of its workers.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import uvloop

from cluster.config import secrets_of, to_overrides
from cluster.launch import launch
from cluster.process.tasks import Tasks
from cluster.process.tree import die_with_parent
from cluster.roles import Role
from engine.config import WorkerConfig
from engine.process.spec import LOCAL_RANK

END_S = 10.0
"""Longest time for the others to end once one worker has failed, in seconds."""


def run_local_ranks(config: WorkerConfig, role: Role) -> int:
    """Run the group's workers of this program to their end; return the exit code of the first that failed.

    SIGINT and SIGTERM go to all of them.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_run(configs_of(config, role), role))
    return code if code >= 0 else 128 - code  # as a shell tells of an end by a signal


def configs_of(config: WorkerConfig, role: Role) -> list[WorkerConfig]:
    """Return the settings of each worker: its rank, name, ports and share of the cores."""
    count, name = config.data_parallel_local, config.id_for(role)
    each = len(config.cores or ()) // count
    configs = []
    for number in range(count):
        changes: dict[str, Any] = {
            "worker_id": f"{name}-{number}",
            "data_parallel_rank": config.data_parallel_rank + number,
            "data_parallel_local": 1,
            "member_index": None,
            "port": config.port and config.port + number,
        }
        for port in ("stream_port", "loan_port", "metrics_port"):
            if first := getattr(config, port):
                changes[port] = first + number
        if number:
            changes["health_port"] = None
        if config.cores and each:
            changes["cores"] = config.cores[number * each : (number + 1) * each]
        configs.append(config.model_copy(update=changes))
    return configs


async def _run(configs: Sequence[WorkerConfig], role: Role) -> int:
    processes = [await _start(config, role, number) for number, config in enumerate(configs)]
    loop = asyncio.get_running_loop()

    def tell(signum: int) -> None:
        for process in processes:
            if process.returncode is None:
                process.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, tell, signum)
    async with Tasks() as tasks:
        tasks.spawn(_announce(processes))
        ends = [tasks.spawn(process.wait()) for process in processes]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        code = next((end.result() for end in ends if end.done() and end.result()), 0)
        if code:
            tell(signal.SIGTERM)
            await asyncio.wait(ends, timeout=END_S)
            tell(signal.SIGKILL)
        await asyncio.wait(ends)
    return code or next((end.result() for end in ends if end.result()), 0)


async def _start(config: WorkerConfig, role: Role, number: int) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker.local_ranks", f"{role}_worker.program"),
        *to_overrides(config),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {LOCAL_RANK: str(number), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(secrets_of(config).encode())
    process.stdin.close()
    return process


async def _announce(processes: Sequence[asyncio.subprocess.Process]) -> None:
    """Print the first worker's line once each has announced itself."""
    lines = []
    for process in processes:
        assert process.stdout is not None
        lines.append(await process.stdout.readline())
    if all(lines):  # else one has ended
        print(json.dumps(json.loads(lines[0])), flush=True)


def _main() -> int:
    """Run one of the workers; the argument is its program's module, and the others are the program's own."""
    die_with_parent()
    return launch(sys.argv.pop(1))


if __name__ == "__main__":
    sys.exit(_main())
