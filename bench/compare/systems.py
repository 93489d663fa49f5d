"""Systems side by side: each serves the small model over HTTP, with two workers of one core each."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from bench.compare.workload import BLOCK_TOKENS
from bench.router.site import cpu_seconds, free_port
from cluster.errors import TandemError
from cluster.process.tree import children, descendants
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

ROOT = Path(__file__).parents[2]
VLLM, DYNAMO, ROUTERS = (ROOT / f".venv-{name}" for name in ("vllm", "dynamo", "routers"))
MODEL_NAME = "m"
"""Name of the model, which is that of its folder."""
MAX_LENGTH, NUM_BLOCKS, MAX_SEQS = 1536, 1500, 64
KV_MIB = NUM_BLOCKS * BLOCK_TOKENS * 8 * 2 * 4 * 64 * 2 >> 20
"""Memory of the pool in bfloat16: layers, keys and values, KV heads, head size."""
START_S = 150.0


class CannotRun(Exception):
    """Reason why a system does not run here."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Model, precision and cores that every system gets."""

    model: Path
    dtype: str
    cores: Sequence[int]


class System(ABC):
    """Async context manager of one running system."""

    name: str

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._stack = contextlib.AsyncExitStack()
        self.url = ""
        """Base URL of its OpenAI API."""
        self.roots: list[int] = []
        """Processes that it started; their descendants belong to it."""
        self._processes: list[tuple[asyncio.subprocess.Process, Path]] = []
        """Processes with their logs."""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
            await self._await_served()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @abstractmethod
    async def _start(self) -> None:
        """Start all processes and set `url` and `roots`. Raises CannotRun."""

    @abstractmethod
    def engines(self) -> set[int]:
        """Return the processes that compute."""

    def cpu_s(self) -> tuple[float, float]:
        """Return CPU seconds so far of engines, and of everything else."""
        engines = self.engines()
        everything = set(self.roots).union(*(descendants(root) for root in self.roots))
        return cpu_seconds(*engines), cpu_seconds(*(everything - engines))

    async def _launch(self, *command: str, log: str, variables: Mapping[str, str] | None = None) -> int:
        """Start a process group that ends with the system."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-compare-")))
        file = self._stack.enter_context((folder / log).open("w"))
        process = await asyncio.create_subprocess_exec(
            *command, env=os.environ | (variables or {}), stdout=file, stderr=file, start_new_session=True
        )
        self._stack.push_async_callback(_end, process)
        self.roots.append(process.pid)
        self._processes.append((process, folder / log))
        return process.pid

    async def _await_served(self) -> None:
        """Wait until a completion is answered. Raises CannotRun."""
        give_up_at, said = time.monotonic() + START_S, ""
        body = {"model": MODEL_NAME, "prompt": "w5 w6", "max_tokens": 2}
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < give_up_at:
                for process, log in self._processes:
                    if process.returncode is not None:
                        raise CannotRun(f"{self.name}: a process ended: {log.read_text()[-400:]}")
                try:
                    async with session.post(f"{self.url}/v1/completions", json=body) as answer:
                        if answer.status == 200:
                            return
                        said = (await answer.text())[:200]
                except aiohttp.ClientError as error:
                    said = str(error)
                await asyncio.sleep(0.5)
        logs = " ".join(f"{log.name}: {log.read_text()[-400:]}" for _, log in self._processes)
        raise CannotRun(f"{self.name}: no answer within {START_S:g} s: {said} {logs}")


class Tandem(System):
    """Workers of Tandem, on vLLM or on its own engine."""

    def __init__(self, machine: Machine, engine: str, num_prefill: int, num_decode: int) -> None:
        super().__init__(machine)
        self.name = (
            f"Tandem on {engine}, {f'{num_prefill} + {num_decode}' if num_prefill else f'{num_decode} aggregated'}"
        )
        self._engine, self._pools = engine, (num_prefill, num_decode)

    async def _start(self) -> None:
        worker: dict[str, Any] = {
            "model": self.machine.model,
            "engine": self._engine,
            "block_tokens": BLOCK_TOKENS,
            "dtype": self.machine.dtype,
            "kv_memory_mib": KV_MIB * (2 if self.machine.dtype == "float32" else 1),
        }
        if self._engine == "vllm":
            options = {"enforce_eager": True, "max_model_len": MAX_LENGTH, "max_num_seqs": MAX_SEQS}
            worker |= {"vllm_options": options}
        else:
            worker |= {"speculation": "off"}  # random weights repeat themselves, and every guess would be right
        router = {"model": self.machine.model, "port": 0, "http_port": 0}
        topology = plan_topology(*self._pools, router, worker, self.machine.cores)
        self._cluster = LocalCluster(topology)
        try:
            await self._stack.enter_async_context(self._cluster)
        except TandemError as error:
            raise CannotRun(f"{self.name}: {error}") from error
        self.url = f"http://{self._cluster.router.http_address}"
        self.roots = [self._cluster.router.pid, *(worker.pid for worker in self._cluster.workers)]

    @property
    def address(self) -> str:
        """Address of the router's gRPC."""
        return self._cluster.address

    def engines(self) -> set[int]:
        return {
            pid
            for worker in self._cluster.workers
            for engine in children(worker.pid)
            for pid in {engine, *descendants(engine)}
        }


class OfVllm(System):
    """System whose engines are processes that vLLM names."""

    def engines(self) -> set[int]:
        everything = set().union(*(descendants(root) for root in self.roots))
        return {pid for pid in everything if _title(pid).startswith("VLLM::")}

    def _variables(self, core: int, environment: Path = VLLM) -> dict[str, str]:
        libraries = [*environment.rglob("libiomp5.so"), *environment.rglob("libtcmalloc*.so*")]
        return {
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join(map(str, libraries)),
        }

    def _engine_options(self) -> list[str]:
        options = ["--enforce-eager", "--dtype", self.machine.dtype, "--block-size", str(BLOCK_TOKENS)]
        options += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", str(MAX_SEQS)]
        return [*options, "--num-gpu-blocks-override", str(NUM_BLOCKS)]

    async def _serve(self, core: int, *options: str, variables: Mapping[str, str] | None = None) -> str:
        """Start `vllm serve`; return its address."""
        port = free_port()
        command = [str(VLLM / "bin/vllm"), "serve", str(self.machine.model), "--served-model-name", MODEL_NAME]
        command += ["--port", str(port), *self._engine_options(), *options]
        await self._launch(*command, log=f"vllm-{port}.log", variables=self._variables(core) | (variables or {}))
        return f"http://127.0.0.1:{port}"


class BehindRouter(OfVllm):
    """Two vLLM servers behind a cache-aware router written in Rust."""

    def __init__(self, machine: Machine, name: str, *router: str) -> None:
        super().__init__(machine)
        self.name, self._router = f"vLLM x 2 behind {name}", router

    async def _start(self) -> None:
        if not VLLM.exists() or not ROUTERS.exists():
            raise CannotRun(f"{self.name}: {VLLM.name} or {ROUTERS.name} is not installed")
        urls = [await self._serve(core) for core in (self.machine.cores[0], self.machine.cores[-1])]
        await asyncio.gather(*map(healthy, urls))
        port = free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--log-level", "error"]
        options += ["--prometheus-port", str(free_port()), "--worker-urls", *urls]
        await self._launch(*self._router, *options, log="router.log")
        self.url = f"http://127.0.0.1:{port}"


class NixlPair(OfVllm):
    """vLLM's own disaggregation: NixlConnector behind vllm-router's prefill/decode mode.

    Its NIXL agents sleep between events as Tandem's do: polling would take half of an engine's core.
    """

    name = "vLLM NixlConnector 1 + 1"

    async def _start(self) -> None:
        if not VLLM.exists() or not ROUTERS.exists():
            raise CannotRun(f"{self.name}: {VLLM.name} or {ROUTERS.name} is not installed")
        links = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        (installed,) = VLLM.glob("lib/python3*/site-packages/nixl_cu12")
        (links / "nixl").symlink_to(installed.resolve())
        transfer = {
            "kv_connector": "NixlCalm",
            "kv_connector_module_path": "bench.vllm.nixl_calm",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"num_threads": 0},
        }
        urls = []
        for core in (self.machine.cores[0], self.machine.cores[-1]):
            side = {
                "PYTHONPATH": f"{links}:{ROOT}",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }
            urls.append(await self._serve(core, "--kv-transfer-config", json.dumps(transfer), variables=side))
        await asyncio.gather(*map(healthy, urls))
        port = free_port()
        options = ["--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1], "--host", "127.0.0.1"]
        options += ["--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "error"]
        await self._launch(str(ROUTERS / "bin/vllm-router"), *options, log="router.log")
        self.url = f"http://127.0.0.1:{port}"


class Dynamo(OfVllm):
    """Dynamo's frontend with its KV router over two of its vLLM workers, without etcd or NATS."""

    name = "Dynamo, KV router, vLLM x 2"

    async def _start(self) -> None:
        if not DYNAMO.exists():
            raise CannotRun(f"{self.name}: {DYNAMO.name} is not installed")
        python, folder = str(DYNAMO / "bin/python"), self._stack.enter_context(tempfile.TemporaryDirectory())
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        common = {"DYN_FILE_KV": folder, "HF_HUB_OFFLINE": "1"}
        port = free_port()
        frontend = ["--http-port", str(port), "--router-mode", "kv", "--kv-cache-block-size", str(BLOCK_TOKENS)]
        await self._launch(python, "-m", "dynamo.frontend", *frontend, *planes, log="frontend.log", variables=common)
        for core in (self.machine.cores[0], self.machine.cores[-1]):
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{free_port()}",
                "topic": "kv-events",
            }
            worker = ["--model", str(self.machine.model), "--served-model-name", MODEL_NAME, *planes]
            worker += [*self._engine_options(), "--kv-events-config", json.dumps(events)]
            variables = self._variables(core, DYNAMO) | common
            await self._launch(python, "-m", "dynamo.vllm", *worker, log=f"worker-{core}.log", variables=variables)
        self.url = f"http://127.0.0.1:{port}"


def systems(machine: Machine) -> list[System]:
    """Return all systems, stopped."""
    python = str(ROUTERS / "bin/python")
    return [
        Tandem(machine, "vllm", 0, 2),
        Tandem(machine, "vllm", 1, 1),
        Tandem(machine, "torch", 0, 2),
        Tandem(machine, "torch", 1, 1),
        BehindRouter(machine, "sglang-router", python, "-m", "sglang_router.launch_router"),
        BehindRouter(machine, "vllm-router", str(ROUTERS / "bin/vllm-router")),
        NixlPair(machine),
        Dynamo(machine),
    ]


async def healthy(url: str) -> None:
    """Wait until the server answers, at most START_S."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
