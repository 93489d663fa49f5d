"""Ray nodes in namespaces of their own: network, pid, ipc, mount and uts, with a private /tmp/ray and /dev/shm."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cluster.process.tree import children, descendants
from support.namespaces import Namespace, Namespaces

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
RAY = str(Path(sys.executable).with_name("ray"))
"""The command of this environment, which need not be in PATH."""
GCS_PORT = 6379
DEAD_AFTER_S = 6.0
"""Seconds without an answer after which Ray declares a node dead: four checks of one second, half a second apart. Ray's
default of a minute would only make each round as much longer."""
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
INIT = """
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && echo up &&
while :; do sleep 3600; done
"""
"""First process of a node, which outlives Ray's. Ray's sessions are the node's own, all else in /tmp is everybody's: a
clone of this repository may lie there."""


class RayNode:
    """One machine of a Ray cluster."""

    def __init__(self, namespace: Namespace, **resources: float) -> None:
        self.namespace = namespace
        self.ip = namespace.ip
        self._resources = resources
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        path = f"{BIN}:{os.environ['PATH']}"
        of_ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment = environment | of_ray | HEALTH_CHECKS | {"PYTHONPATH": str(ROOT), "PATH": path}
        command = namespace.command(["bash", "-c", INIT])
        self._unshare = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE)
        assert self._unshare.stdout is not None
        said = self._unshare.stdout.readline()
        assert said == b"up\n", said
        (self._init,) = children(self._unshare.pid)

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this node."""
        return ["nsenter", "--target", str(self._init), "--net", "--pid", "--ipc", "--mount", "--uts", *command]

    async def run(self, *command: str, timeout_s: float = 60.0) -> str:
        """Run a command on this node; return what it printed."""
        with tempfile.TemporaryFile() as output:  # no pipe: daemons that the command leaves behind would keep it open
            running = await asyncio.create_subprocess_exec(
                *self.inside(*command), env=self.environment, cwd=ROOT, stdout=output, stderr=output
            )
            try:
                await asyncio.wait_for(running.wait(), timeout_s)
            except TimeoutError:
                running.kill()
            output.seek(0)
            said = output.read().decode(errors="replace")
        assert running.returncode == 0, f"{command}: {said}"
        return said

    async def start_ray(self, head: "RayNode") -> None:
        where = ["--address", f"{head.ip}:{GCS_PORT}"]
        if head is self:
            where = ["--head", "--port", str(GCS_PORT), "--include-dashboard=false"]
        sizes = ("--num-cpus", "1", "--object-store-memory", str(80 << 20), "--resources", json.dumps(self._resources))
        await self.run(RAY, "start", *where, "--node-ip-address", self.ip, *sizes)

    async def start_ray_again(self, head: "RayNode") -> None:
        """Clear what a raylet that ended has left behind, and start another."""
        await self.run(RAY, "stop", "--force")
        await self.start_ray(head)

    def runs(self, program: str) -> bool:
        """Whether a process of this node has that in its command line."""
        return any(program.encode() in _command_line(pid) for pid in descendants(self._init))

    def close(self) -> None:
        """End all processes of the node: they end with the first one of their pid namespace."""
        self._unshare.kill()
        self._unshare.wait()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return b""


class RayNodes:
    """Context manager of a Ray cluster: a head without resources for workers, and nodes by their names."""

    def __init__(self, nodes: Mapping[str, Mapping[str, float]]) -> None:
        self._wanted = nodes
        self._namespaces = Namespaces()
        self.nodes: dict[str, RayNode] = {}

    @property
    def head(self) -> RayNode:
        return self.nodes["head"]

    async def __aenter__(self) -> Self:
        self._namespaces.__enter__()
        try:
            for name, resources in {"head": {}, **self._wanted}.items():
                self.nodes[name] = RayNode(self._namespaces.add(name), **resources)
            await self.head.start_ray(self.head)
            await asyncio.gather(*(self.nodes[name].start_ray(self.head) for name in self._wanted))
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self._namespaces.__exit__()
