"""`vllm serve` as a user would start it here: all cores, and the preloaded libraries of its manual."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

PORT = 8797
START_TIMEOUT_S = 600.0
KV_GIB = 4


def cpu_variables(environment: Path, cores: Sequence[int], cache: Path, ranks: int = 1) -> dict[str, str]:
    """Return the variables of vLLM on these cores, shared out to its ranks, with the libraries of its manual."""
    share = len(cores) // ranks
    bound = [",".join(map(str, cores[share * rank : share * (rank + 1)])) for rank in range(ranks)]
    libraries = [*environment.rglob("libiomp5.so"), *environment.rglob("libtcmalloc*.so*")]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(bound),
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
    }


class VllmServer:
    """Async context manager of a server; `pause` stops its processes while another system is measured."""

    def __init__(
        self,
        environment: Path,
        model: Path,
        cores: Sequence[int],
        cache: Path,
        *options: str,
        host: str = "127.0.0.1",
        port: int = PORT,
        variables: Mapping[str, str] | None = None,
        entered: Callable[[list[str]], list[str]] = list,
    ) -> None:
        """Create it, without `cores` for a GPU; `entered` turns the server's command into the one that is run."""
        self._environment = environment
        self._host = host
        self._port = port
        self._entered = entered
        self._more_variables = dict(variables or {})
        self._model = model
        self._cores = cores
        self._cache = cache
        self._options = options

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """Leader of the server's process group."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def __aenter__(self) -> Self:
        self._cache.mkdir(parents=True, exist_ok=True)
        self._log = (self._cache / "server.log").open("w")
        command = [str(self._environment / "bin" / "vllm"), "serve", str(self._model), "--host", self._host]
        command += ["--port", str(self._port), "--served-model-name", "m", "--no-enable-prefix-caching"]
        self._process = await asyncio.create_subprocess_exec(
            *self._entered([*command, *self._options]),
            env=self._variables(),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            # the server closes idle connections while stopped
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        try:
            await self._await_ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.ended:
            self.resume()
        await self._stop()

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    async def generate(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
        """Yield the moments at which tokens arrive, by the monotonic clock."""
        request = {
            "model": "m",
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._session.post(f"{self.url}/v1/completions", json=request) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                    yield time.monotonic()

    def _variables(self) -> dict[str, str]:
        of_cpu = cpu_variables(self._environment, self._cores, self._cache) if self._cores else {}
        return os.environ | of_cpu | self._more_variables

    async def _await_ready(self) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up_at and not self.ended:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.25)
        raise RuntimeError(f"vllm serve did not start; see {self._log.name}")

    async def _stop(self) -> None:
        await self._session.close()
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # kills what is left of its process group
        self._log.close()
