"""Two stock vLLM servers, one for prefill and one for decode, a core each, with NixlConnector or TandemConnector.

The client plays the router, which is the cheapest router there can be: it asks the prefill server for one token, and
sends the transfer parameters of the answer with the same prompt to the decode server.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from bench.support.vllm_server import VllmServer

SIDE_PORTS = {"prefill": 5600, "decode": 5700}


@dataclass(frozen=True, slots=True)
class Connector:
    """Connector of a pair, and the ports of its servers."""

    transfer: Mapping[str, Any]
    """The servers' `--kv-transfer-config`."""
    ports: Mapping[str, int]
    options: Sequence[str] = ()


NIXL = Connector(
    {
        "kv_connector": "NixlCalm",
        "kv_connector_module_path": "bench.vllm.nixl_calm",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"num_threads": 0},
    },
    {"prefill": 8798, "decode": 8799},
)
TANDEM = Connector(
    {
        "kv_connector": "TandemConnector",
        "kv_connector_module_path": "tandem_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lenders": "127.0.0.1:8796"},
    },
    {"prefill": 8796, "decode": 8795},
    ("--enable-prefix-caching",),
)
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # A paused server's steps take as long as the other side's turn.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",
}
ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmPair:
    """Async context manager of the two servers; `pause` stops their processes while the other side is measured."""

    def __init__(
        self,
        environment: Path,
        model: Path,
        cores: Sequence[int],
        scratch: Path,
        *options: str,
        connector: Connector = NIXL,
    ) -> None:
        self._environment = environment
        self._model = model
        self._cores = cores
        self._scratch = scratch
        self._options = options
        self._connector = connector
        self.servers: dict[str, VllmServer] = {}

    async def __aenter__(self) -> Self:
        self._links = offer_nixl(self._environment, self._scratch)
        self._stack = AsyncExitStack()
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0, force_close=True)
            )
        )
        await asyncio.gather(*(self._start(role) for role in self._connector.ports))
        return self

    async def _start(self, role: str) -> None:
        variables = {
            "PYTHONPATH": f"{self._links}:{Path.cwd()}",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_PORTS[role]),
        }
        server = VllmServer(
            self._environment,
            self._model,
            [self._cores[0 if role == "prefill" else -1]],
            self._scratch / role,
            *("--kv-transfer-config", json.dumps(self._connector.transfer), "--block-size", "32"),
            *(*self._connector.options, *self._options),
            port=self._connector.ports[role],
            variables=variables | SETTINGS,
        )
        self.servers[role] = server
        await server.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers.values():
            await server.__aexit__(kind, error, trace)
        await self._stack.aclose()

    def pause(self) -> None:
        for server in self.servers.values():
            server.pause()

    def resume(self) -> None:
        for server in self.servers.values():
            server.resume()

    async def generate(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
        """Yield the moments at which tokens arrive, by the monotonic clock. Raises aiohttp's errors."""
        common: dict[str, Any] = {"model": "m", "prompt": list(token_ids), "temperature": 0, "ignore_eos": True}
        first = common | {"max_tokens": 1, "kv_transfer_params": ASK_PREFILL}
        async with self._session.post(f"{self.servers['prefill'].url}/v1/completions", json=first) as answer:
            await _check(answer)
            transfer = (await answer.json())["kv_transfer_params"]
        then = common | {"max_tokens": max_tokens, "stream": True, "kv_transfer_params": transfer}
        async for moment in self._streamed(then):
            yield moment

    async def generate_directly(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
        """Yield the same for a request that only the decode server gets, which borrows by itself."""
        request = {"model": "m", "prompt": list(token_ids), "temperature": 0, "ignore_eos": True}
        async for moment in self._streamed(request | {"max_tokens": max_tokens, "stream": True}):
            yield moment

    async def _streamed(self, then: Mapping[str, Any]) -> AsyncIterator[float]:
        async with self._session.post(f"{self.servers['decode'].url}/v1/completions", json=then) as answer:
            await _check(answer)
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    message = json.loads(line[6:])
                    if "error" in message:
                        raise aiohttp.ClientPayloadError(str(message["error"]))
                    if message["choices"]:
                        yield time.monotonic()


async def _check(answer: aiohttp.ClientResponse) -> None:
    if not answer.ok:
        raise aiohttp.ClientPayloadError(f"{answer.url} answered {answer.status}: {await answer.text()}")


def offer_nixl(environment: Path, scratch: Path) -> Path:
    """Return a folder of modules that offers the NIXL wheel under the name that vLLM imports."""
    (installed,) = environment.glob("lib/python3*/site-packages/nixl_cu12")
    links = scratch / "links"
    links.mkdir(parents=True, exist_ok=True)
    if not (links / "nixl").exists():
        (links / "nixl").symlink_to(installed.resolve())
    return links
