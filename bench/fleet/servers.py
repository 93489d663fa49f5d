"""Stock vLLM servers on this machine, with the null executor."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp

from bench.compare.http_wire import MODEL_NAME
from bench.models import llama
from bench.router.site import free_port
from bench.support.report import OUT
from bench.support.vllm_server import cpu_variables

VLLM = Path(".venv-vllm")
BLOCK, CONTEXT = 32, 8192
TINY = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
START_S = 300.0


def tiny_model() -> Path:
    """Make the model of the servers once: what counts is only its tokenizer and its name."""
    return llama((OUT / "fleet" / MODEL_NAME).absolute(), TINY, "float32")


class StockServer:
    """One `vllm serve` with the null executor; after `kill` or `terminate`, `start` begins it again at its address."""

    def __init__(self, model: Path, scratch: Path, num_blocks: int, timing: Mapping[str, str], *options: str) -> None:
        """Create it; `timing` are the variables of the null executor."""
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._scratch = scratch
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        self._command = [str(VLLM / "bin/vllm"), "serve", str(model), "--served-model-name", MODEL_NAME]
        self._command += ["--port", str(self.port), "--host", "127.0.0.1", "--max-model-len", str(CONTEXT)]
        self._command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)]
        self._command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        self._command += ["--num-gpu-blocks-override", str(num_blocks), "--kv-events-config", json.dumps(events)]
        self._command += ["--distributed-executor-backend", "bench.fleet.null_executor.NullExecutor", *options]
        cores = sorted(os.sched_getaffinity(0))
        self._variables = cpu_variables(VLLM, cores[:1], scratch / "cache") | dict(timing)
        self._variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(Path.cwd())}
        self._variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    @property
    def entry(self) -> dict[str, object]:
        """Entry of a fleet's file."""
        return {"url": self.url, "kv_events_port": self.events_port, "kv_replay_port": self.replay_port}

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with (self._scratch / f"{self.port}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=os.environ | self._variables, stdout=log, stderr=log, start_new_session=True
            )
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while True:
                if self._process.returncode is not None:
                    raise RuntimeError(f"vllm serve ended: see {log.name}")
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.5)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def terminate(self) -> None:
        """Stop it as Kubernetes does, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()
        self.signal(signal.SIGKILL)

    async def reset_cache(self) -> None:
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/reset_prefix_cache") as answer:
            answer.raise_for_status()

    async def counters(self) -> dict[str, float]:
        """Return its counters of queried and hit prompt tokens."""
        found = {"queries": 0.0, "hits": 0.0}
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                for name in found:
                    if line.startswith(f"vllm:prefix_cache_{name}_total"):
                        found[name] += float(line.split()[-1])
        return found


@contextlib.asynccontextmanager
async def stock_servers(
    count: int, scratch: Path, num_blocks: int, timing: Mapping[str, str], *options: str
) -> AsyncIterator[list[StockServer]]:
    """Start servers, two at a time, and end them."""
    model = tiny_model()
    servers = [StockServer(model, scratch, num_blocks, timing, *options) for _ in range(count)]
    limit = asyncio.Semaphore(2)

    async def start(server: StockServer) -> None:
        async with limit:
            await server.start()

    try:
        await asyncio.gather(*(start(server) for server in servers))
        print(f"{count} servers are up", file=sys.stderr, flush=True)
        yield servers
    finally:
        for server in servers:
            if hasattr(server, "_process"):
                await server.kill()
