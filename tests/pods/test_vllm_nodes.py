"""One vLLM worker over two nodes, each a network namespace, beside a worker on one: its tokens, and the loss of a node.

TANDEM_ROUNDS=n makes n rounds of each fault.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from cluster.process.tree import descendants
from engine.config import WorkerConfig
from router.config import RouterConfig
from support.namespaces import Namespace, Namespaces, missing
from support.processes import Stream, until
from support.vllm_engines import OPTIONS, PYTHON, V2, need_vllm
from tandem.client import Client
from tandem.local.local_cluster import RoleProcess, start_role, stop_process
from tandem.storyteller import STORYTELLER

pytestmark = [
    need_vllm,
    pytest.mark.skipif(bool(reason := missing()), reason=reason),
    pytest.mark.timeout(0),
    pytest.mark.long,
]
ROUNDS = int(os.environ.get("TANDEM_ROUNDS", "1"))
START_S = 300.0
VLLM: dict[str, Any] = {
    "model": STORYTELLER,
    "engine": "vllm",
    "vllm_options": OPTIONS,
    "dtype": "float32",
    "kv_memory_mib": 64,
    "max_prefill_tokens": 64,
    "log_level": "info",
}
SHAPES = {
    "ranks": {"tensor_parallel": 2, "vllm_python": PYTHON},
    "stages": {"pipeline_parallel": 2, "vllm_python": V2},
}


class Supervised:
    """A role's process, which is started again when it ends."""

    def __init__(self, module: str, name: str, config: Any, namespace: Namespace) -> None:
        self.name, self._module, self._config, self._namespace = name, module, config, namespace
        self.process: RoleProcess | None = None
        self.num_starts = 0
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> RoleProcess:
        self.process = await start_role(self._module, self.name, self._config, self._namespace.command)
        self.num_starts += 1
        return self.process

    def keep(self) -> None:
        self._keeping = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while True:
            if self.process is None:
                with contextlib.suppress(StartError):
                    await self.start()
                continue
            await self.process.process.wait()
            self.process = None

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self.process is not None:
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            await stop_process(self.process.process)

    def kill(self) -> None:
        """Kill all processes of the namespace, with its first one."""
        self.process.process.kill()

    def signal_all(self, signum: int) -> None:
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


class Site:
    def __init__(self, client: Client, nodes: list[Supervised], namespaces: list[Namespace], num_tokens: int) -> None:
        self.client, self.nodes, self.namespaces, self.num_tokens = client, nodes, namespaces, num_tokens
        self.expected: list[list[int]] = []

    def ask(self, salt: str) -> list[Stream]:
        """Ask for all that is wanted, uncached."""
        prompts = [random.Random(seed).choices(range(3, 2048), k=60 + 30 * seed) for seed in range(6)]
        return [
            Stream(self.client, prompt, self.num_tokens, cache_salt=f"{salt}-{number}", timeout_s=300.0)
            for number, prompt in enumerate(prompts)
        ]

    async def answered(self, streams: Sequence[Stream]) -> None:
        """All streams end well, with the tokens of one host."""
        async with asyncio.timeout(300):
            await asyncio.gather(*(stream.task for stream in streams))
        assert [stream.token_ids for stream in streams] == self.expected

    async def all_joined(self) -> None:
        async def joined() -> bool:
            return [model.decode_workers for model in await self.client.list_models()] == [2]

        await until(joined, "both workers have joined", START_S)

    async def serves_on_both(self, salt: str) -> None:
        """Both workers serve, and blocks of one are borrowed by the other."""
        await self.all_joined()
        for attempt in range(5):
            streams = self.ask(f"{salt}-{attempt}")
            await self.answered(streams)
            if len({stream.receipt.placement.decode_worker for stream in streams}) == 2:
                return
        pytest.fail("one worker got no request")


@asynccontextmanager
async def site_of(shape: str, folder: Path) -> AsyncIterator[Site]:
    settings = VLLM | SHAPES[shape]
    one = {key: value for key, value in settings.items() if not key.endswith("_parallel")}
    with Namespaces() as namespaces:
        hosts = [namespaces.add(f"node-{number}") for number in range(2)]
        beside = namespaces.add("other")
        router = await start_role(
            "router", "router", RouterConfig.parse({"model": STORYTELLER, "host": namespaces.host_ip, "port": 0})
        )
        members = {"routers": (router.joined_at,), "drain_s": 1.0}
        other = Supervised(
            "decode_worker",
            "other",
            WorkerConfig.parse(one | members | {"host": beside.ip, "worker_id": "other"}),
            beside,
        )
        nodes = [
            Supervised(
                "decode_worker",
                f"node-{number}",
                WorkerConfig.parse(
                    settings
                    | members
                    | {"host": host.ip, "nodes": 2, "node_rank": number, "master_addr": hosts[0].ip}
                    | {"worker_id": "wide"}
                ),
                host,
            )
            for number, host in enumerate(hosts)
        ]
        try:
            await asyncio.gather(other.start(), *(node.start() for node in nodes))
            for node in nodes:
                node.keep()
            async with Client(router.address) as client:
                yield Site(client, nodes, hosts, 60 if shape == "ranks" else 8)
        finally:
            await asyncio.gather(other.stop(), *(node.stop() for node in nodes))
            await stop_process(router.process)


async def killed(site: Site, rng: random.Random) -> None:
    """All processes of the second node end at once."""
    site.nodes[1].kill()


async def cut_off(site: Site, rng: random.Random) -> None:
    """The cable of the second node is out for a while."""
    site.namespaces[1].set_up(False)
    await asyncio.sleep(rng.choice([12.0, 20.0]))
    site.namespaces[1].set_up(True)


async def stopped(site: Site, rng: random.Random) -> None:
    """The second node's processes stand still for a while."""
    site.nodes[1].signal_all(signal.SIGSTOP)
    await asyncio.sleep(12.0)
    site.nodes[1].signal_all(signal.SIGCONT)


FAULTS = (killed, cut_off, stopped)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_worker_over_two_nodes_loses_no_request_with_a_node(shape: str, fault: Any, tmp_path: Path) -> None:
    async with site_of(shape, tmp_path) as site:
        await site.all_joined()
        site.expected = []
        first = site.ask("undisturbed")
        await asyncio.gather(*(stream.task for stream in first))
        site.expected = [stream.token_ids for stream in first]
        await site.serves_on_both("whole")
        rng = random.Random(fault.__name__)
        for number in range(ROUNDS):
            starts = site.nodes[0].num_starts
            streams = site.ask(f"{fault.__name__}-{number}")
            await streams[0].reached(2)
            began = time.monotonic()
            await fault(site, rng)
            await site.answered(streams)
            answered_s = time.monotonic() - began

            async def again(starts: int = starts) -> bool:
                return site.nodes[0].num_starts > starts

            await until(again, f"node 0 has started again after {fault.__name__}", START_S)
            await site.serves_on_both(f"after {fault.__name__}-{number}")
            whole_s = time.monotonic() - began
            print(f"\n{shape}, {fault.__name__}: answered in {answered_s:.0f} s, whole in {whole_s:.0f} s")
