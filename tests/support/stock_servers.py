"""`vllm serve` with TandemConnector, and what its HTTP API answers."""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.support.vllm_server import VllmServer
from support.vllm_engines import BLOCK, PYTHON, ROOT
from tandem.storyteller import STORYTELLER

OPTIONS = ("--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK), "--enable-prefix-caching")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered with status 200."""

    token_ids: Sequence[int]
    transfer: Mapping[str, Any]
    """Its `kv_transfer_params`."""

    @property
    def receipt(self) -> dict[str, Any]:
        receipt: dict[str, Any] = self.transfer["tandem"]
        return receipt


async def ask(url: str, prompt: Sequence[int] | str, key: str = "", **fields: Any) -> Answer:
    """Ask a server, or a proxy of servers, for what follows a prompt, or answers a chat. Raises aiohttp's errors."""
    path: str = "completions"
    asked: dict[str, Any] = {"prompt": prompt}
    if isinstance(prompt, str):
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": "m", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}, raise_for_status=True) as session,
        session.post(f"{url}/v1/{path}", json={**body, **asked, **fields}) as answer,
    ):
        found = await answer.json()
        return Answer(found["choices"][0]["token_ids"], found.get("kv_transfer_params") or {})


class StockServer(VllmServer):
    """Async context manager of a server; after `kill`, `start` begins it again at its address."""

    def __init__(self, folder: Path, core: int, port: int, extra: Mapping[str, Any], *options: str) -> None:
        """Create it; `extra` is its `kv_connector_extra_config`."""
        cores = sorted(os.sched_getaffinity(0))
        transfer = {
            "kv_connector": "TandemConnector",
            "kv_connector_module_path": "tandem_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        super().__init__(
            PYTHON.parent.parent,
            STORYTELLER,
            [cores[core % len(cores)]],
            folder,
            *("--kv-transfer-config", json.dumps(transfer), *OPTIONS, *options),
            port=port,
            variables={"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)},
        )

    async def start(self) -> None:
        await self.__aenter__()

    async def kill(self) -> None:
        """End it with all its processes, without a farewell."""
        os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        await self._stop()

    async def counters(self) -> dict[str, float]:
        """Return the connector's counters by name, of the server's `/metrics`."""
        async with self._session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith("vllm:tandem_"))
        return {name.partition("{")[0].removeprefix("vllm:tandem_"): float(value) for name, _, value in found}
