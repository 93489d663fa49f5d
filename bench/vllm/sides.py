"""Plain vLLM, `vllm serve` and one aggregated Tandem worker, started with equal arguments."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.compare.http_wire import MODEL_NAME
from bench.router.site import free_port
from bench.support.vllm_server import VllmServer, cpu_variables
from bench.vllm.compared import BLOCK, Pausable
from bench.vllm.streams import Offered, StreamLoad
from tandem.local.local_cluster import LocalCluster
from tandem.topology import Topology, plan_topology

ROOT = Path(__file__).parents[2]
LEAD_S = 0.3
"""Seconds from asking the client processes to the start of a load, so that all of them begin together."""
END_S = 20.0
LAST_LINES = 15
VLLM, SERVE, TANDEM, TANDEM_HTTP = "vllm", "vllm serve", "tandem", "tandem http"
"""Columns of figures."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Model and arguments of both sides."""

    model: Path
    vocabulary: int
    dtype: str
    kv_mib: int
    step_tokens: int
    """Largest number of tokens in a step."""
    options: Mapping[str, Any]
    """Other arguments of vLLM's EngineArgs."""
    python: Path
    """Interpreter of vLLM's environment."""
    cores: Sequence[int] = ()
    """CPU cores that the engine computes on; none on a GPU."""
    other_cores: Sequence[int] = ()
    """CPU cores of all other processes: vLLM's front; Tandem's router, front and clients."""
    clients: int = 1
    """Client processes in front of Tandem's router."""
    ranks: int = 1
    """Tensor-parallel ranks of the engine; with several on CPUs, each computes on its part of `cores`."""

    def plain_arguments(self) -> dict[str, Any]:
        """Return the arguments of plain vLLM."""
        arguments = {
            "model": str(self.model),
            "dtype": self.dtype,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": (self.kv_mib << 20) // self.ranks,
            "tensor_parallel_size": self.ranks,
            "max_num_batched_tokens": self.step_tokens,
            **self.options,
        }
        # vLLM demands this share to be free although the size of its pool is given, and the other side uses the GPU too
        return arguments if self.cores else {"gpu_memory_utilization": 0.01} | arguments

    def worker(self) -> dict[str, Any]:
        """Return the settings of a Tandem worker."""
        settings = {
            "model": self.model,
            "model_name": MODEL_NAME,
            "engine": "vllm",
            "vllm_python": self.python,
            "dtype": self.dtype,
            "block_tokens": BLOCK,
            "kv_memory_mib": self.kv_mib,
            "max_batch_tokens": self.step_tokens,
            "max_prefill_tokens": self.step_tokens,
            "vllm_options": dict(self.options),
            "tensor_parallel": self.ranks,
        }
        return settings | ({"cores": tuple(self.cores)} if self.cores else {})

    def topology(self, num_prefill: int, num_decode: int, **router: Any) -> Topology:
        """Return a cluster whose vLLM engines have no cores but those that the setting names."""
        settings = {"models": [{"path": self.model, "name": MODEL_NAME}], "port": 0} | router
        cores = sorted(os.sched_getaffinity(0))
        return plan_topology(num_prefill, num_decode, settings, self.worker(), cores, finds_cores=lambda _: True)


def end_on_sigterm() -> None:
    """Let SIGTERM, as `timeout` sends it, cancel the running task, so that no process of a benchmark is left."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


class Clients:
    """Async context manager of processes that answer loads, see `streams.py`."""

    def __init__(self, command: Sequence[str], count: int = 1, variables: Mapping[str, str] | None = None) -> None:
        self._command, self._count, self._variables = command, count, variables or {}
        self._processes: list[asyncio.subprocess.Process] = []
        self.about: dict[str, Any] = {}
        """Facts that the processes print when they have started; equal for all."""

    async def __aenter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by _stop
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | self._variables
        try:
            for _ in range(self._count):
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=self._log,
                    env=environment,
                    limit=1 << 28,
                    start_new_session=True,
                )
                self._processes.append(process)
            for process in self._processes:
                self.about = await self._line(process)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def offer(self, load: StreamLoad) -> Offered:
        """Offer a load, shared out to the processes. Raises RuntimeError when a stream is lost."""
        count = min(self._count, load.streams)
        began_at = time.monotonic() + LEAD_S
        firsts = [load.streams * number // count for number in range(count + 1)]
        for process, first, end in zip(self._processes, firsts, firsts[1:], strict=False):
            share = asdict(replace(load, streams=end - first, first=load.first + first)) | {"began_at": began_at}
            assert process.stdin is not None
            process.stdin.write(json.dumps(share).encode() + b"\n")
        whole = Offered(began_at)
        for part in [Offered(**await self._line(process)) for process in self._processes[:count]]:
            whole.ended_at = max(whole.ended_at, part.ended_at)
            whole.tokens += part.tokens
            for name in ("ttft_ms", "gaps_ms", "lost", "token_ids"):
                getattr(whole, name).extend(getattr(part, name))
        if whole.lost:
            raise RuntimeError(f"{len(whole.lost)} of {load.streams} streams were lost: {whole.lost[0]}")
        return whole

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, how: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)

    async def _line(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        if not (line := await process.stdout.readline()):
            self._log.seek(0)
            said = "\n".join(self._log.read().splitlines()[-LAST_LINES:])
            raise RuntimeError(f"{' '.join(self._command[:3])} ended: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _stop(self) -> None:
        self.resume()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                for process in self._processes:
                    await process.wait()
        self._signal(signal.SIGKILL)  # what is left of their process groups
        for process in self._processes:
            await process.wait()
        self._log.close()


def plain(setting: Setting, scratch: Path) -> Clients:
    """Return vLLM alone, not started: AsyncLLM, with the client in its process."""
    asked = {
        "arguments": setting.plain_arguments(),
        "cores": list(setting.cores),
        "other_cores": list(setting.other_cores),
    }
    environment = setting.python.parent.parent
    variables = cpu_variables(environment, setting.cores, scratch, setting.ranks) if setting.cores else {}
    return Clients([str(setting.python), "-m", "bench.vllm.plain", json.dumps(asked)], 1, variables)


@dataclass(frozen=True, slots=True)
class Started:
    """Processes of one side that are ready."""

    clients: Mapping[str, Clients]
    """Clients by the name of the column of their figures."""
    to_pause: Sequence[Pausable] = ()
    """Processes that are stopped while others are measured."""


@asynccontextmanager
async def alone(setting: Setting, scratch: Path) -> AsyncIterator[Started]:
    """Start vLLM alone."""
    async with plain(setting, scratch) as clients:
        yield Started({VLLM: clients}, [clients])


@asynccontextmanager
async def served(setting: Setting, scratch: Path) -> AsyncIterator[Started]:
    """Start `vllm serve`, with clients over HTTP."""
    options: list[str] = []
    for name, value in setting.plain_arguments().items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        elif name != "model":
            options += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    environment = setting.python.parent.parent
    variables = {} if setting.cores else {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    server = VllmServer(
        environment, setting.model, setting.cores, scratch / "serve", *options, port=free_port(), variables=variables
    )
    async with server, http_clients(int(server.url.rpartition(":")[2]), setting.clients) as clients:
        yield Started({SERVE: clients}, [server])


@asynccontextmanager
async def aggregated(setting: Setting, over_http: bool = False) -> AsyncIterator[Started]:
    """Start a router and one aggregated worker of Tandem; with `over_http` it has clients over HTTP, too."""
    async with AsyncExitStack() as stack:
        topology = setting.topology(0, 1, **{"http_port": 0} if over_http else {})
        cluster = await stack.enter_async_context(LocalCluster(topology))
        clients = {TANDEM: await stack.enter_async_context(clients_of(cluster, setting.clients))}
        if over_http:
            assert cluster.router.http_address is not None
            port = int(cluster.router.http_address.rpartition(":")[2])
            clients[TANDEM_HTTP] = await stack.enter_async_context(http_clients(port, setting.clients))
        yield Started(clients)


def http_clients(port: int, count: int) -> Clients:
    return Clients([sys.executable, "-m", "bench.null.client", str(port), "completions"], count)


def clients_of(cluster: LocalCluster, count: int) -> Clients:
    return Clients([sys.executable, "-m", "bench.vllm.client", cluster.address], count)
