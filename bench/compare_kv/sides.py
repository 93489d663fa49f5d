"""Sides of the comparison: a lender and a borrower of KV, each in a network namespace of its own, as pods are."""

import asyncio
import json
import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.router.site import free_port
from bench.support.vllm_server import VllmServer
from bench.vllm.pair import ASK_PREFILL, offer_nixl
from cluster.process.tree import descendants
from engine.config import WorkerConfig
from router.config import RouterConfig
from support.namespaces import Namespace, Namespaces, run
from support.processes import LENDER_ALWAYS, report_of
from tandem.local.local_cluster import RoleProcess, start_role, stop_process
from tandem.members import await_members
from tandem.storyteller import STORYTELLER

VLLM = Path(".venv-vllm").absolute()
SHIM = Path(__file__).parent / "shim"
BLOCK, POOL_BLOCKS, CONTEXT = 32, 96, 1024
KV_MIB = 18
"""Memory of as many blocks of 192 KiB for a worker."""
OUTPUT_TOKENS = 16
LEASE_S = 6
"""Seconds for which NixlConnector keeps what nobody fetches; 30 by default, which would only make the trials longer."""
PROMPT_TOKENS = 20 * BLOCK + 1
HANG_S = 10.0
ASK_S = 14.0
"""Seconds until the client gives up: some more than a hang, since the fault may strike after the request was sent."""
UNHURRIED_S = 120.0
"""The same for requests that measure nothing."""
LINK_RATE = "8mbit"
"""Rate of the lender's link while a transfer is to be interrupted: 20 blocks take four seconds."""
BEGUN_BYTES = 300_000
MARGIN = 0.01
"""Lead in log probability; float32 sums in another order differ by less than 0.0001."""
KEPT_OF_RECEIPT = ("moved_blocks", "computed_blocks", "reused_blocks", "mismatched_blocks", "loan_failure")
HTTP_PORT, SIDE_PORT, LOAN_PORT, GRPC_PORT = 8000, 5600, 7700, 7600


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of a request, as its client sees it."""

    status: str
    """HTTP status, or `closed` where the connection ended without one, or `none` where nothing came."""
    tokens: Sequence[int] = ()
    error: str = ""
    sent_at: float = 0.0
    ended_at: float = 0.0
    """Time by the monotonic clock."""
    body: dict[str, Any] = field(default_factory=dict)


async def ask(url: str, prompt: Sequence[int], max_tokens: int, limit_s: float = ASK_S, **fields: Any) -> Answer:
    """Send a greedy request, and tell what came of it."""
    body = {"model": "m", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | fields
    sent_at = time.monotonic()
    try:
        # as a client would that closes its connection when it gives up
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit_s)) as session,
            session.post(f"{url}/v1/completions", json=body) as reply,
        ):
            read = await reply.json()
            if reply.status != 200:
                return Answer(str(reply.status), (), json.dumps(read), sent_at, time.monotonic())
            return Answer("200", read["choices"][0]["token_ids"], "", sent_at, time.monotonic(), read)
    except TimeoutError:
        return Answer("none", (), "", sent_at, time.monotonic())
    except (aiohttp.ClientError, ConnectionError) as error:
        return Answer("closed", (), f"{type(error).__name__}: {error}", sent_at, time.monotonic())


def random_prompt(rng: random.Random, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    return rng.choices(range(3, 2048), k=num_tokens)


Truth = Callable[[random.Random], Awaitable[tuple[list[int], Sequence[int]]]]
"""Function that draws a prompt, and returns it with its tokens on one server."""


def is_decided(top: Sequence[Mapping[str, float]]) -> bool:
    """Return whether at every token the best one leads by MARGIN: sums in another order must not change the choice."""
    ordered = [sorted(each.values(), reverse=True) for each in top]
    return all(len(values) > 1 and values[0] - values[1] > MARGIN for values in ordered)


@asynccontextmanager
async def one_server(scratch: Path, core: int) -> AsyncIterator[Truth]:
    """Serve by one `vllm serve`, whose second answer to a prompt has its prefix cached, as a borrower has it."""
    server = VllmServer(
        VLLM, STORYTELLER, [core], scratch, "--enable-prefix-caching", *SERVER_OPTIONS, port=free_port()
    )
    async with server:

        async def truth(rng: random.Random) -> tuple[list[int], Sequence[int]]:
            while True:
                prompt = random_prompt(rng)
                for _ in range(2):
                    answer = await ask(server.url, prompt, OUTPUT_TOKENS, UNHURRIED_S, logprobs=2)
                    if answer.status != "200":
                        raise RuntimeError(f"the server of the right tokens answers {answer.status}: {answer.error}")
                if is_decided(answer.body["choices"][0]["logprobs"]["top_logprobs"]):
                    return prompt, answer.tokens

        yield truth


class Node(ABC):
    """A server in a namespace of its own."""

    def __init__(self, name: str, namespace: Namespace, scratch: Path, *modules: Path) -> None:
        """Create it; `modules` are further folders to import from."""
        self.name = name
        self.namespace = namespace
        self.killed = False
        """Whether a case has killed the server since its last start."""
        self._modules = modules
        self._socket = scratch / "damage"
        scratch.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    async def start(self) -> None:
        """Start the server, and wait until it serves."""

    @abstractmethod
    async def stop(self) -> None:
        """End the server, orderly where it still runs."""

    @abstractmethod
    async def held(self) -> float:
        """Return what the server holds for others or for running requests: a share of the pool, or blocks.

        Raises RuntimeError where the server does not answer.
        """

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process whose descendants are the server's processes."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the server's first process has ended."""

    async def kill(self) -> None:
        """End all processes at once."""
        self.killed = True
        self.signal(signal.SIGKILL)
        while not self.ended:  # noqa: ASYNC110 - the process's own watcher sets it
            await asyncio.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes."""
        for pid in [self.pid, *descendants(self.pid)]:
            with suppress(ProcessLookupError):  # the end of the first one ends the others
                os.kill(pid, number)

    def throttle(self, on: bool) -> None:
        """Slow down what leaves the namespace, or no longer."""
        device = ("dev", "eth0", "root")
        if on:
            limits = ("tbf", "rate", LINK_RATE, "burst", "32kb", "latency", "400ms")
            run("tc", "-n", self.namespace.name, "qdisc", "replace", *device, *limits)
        else:
            run("tc", "-n", self.namespace.name, "qdisc", "replace", *device, "noqueue")

    def sent_bytes(self) -> int:
        """Return the bytes that have left the namespace."""
        return int(Path(f"/sys/class/net/{self.namespace.link}/statistics/rx_bytes").read_text())

    async def damage(self, order: str) -> int | None:
        """Give an order to the server's shim; return the block that it has changed, if any."""
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        writer.write(f"{order}\n".encode())
        struck: int | None = json.loads(await reader.read())["struck"]
        writer.close()
        return struck

    def _entered(self, command: list[str]) -> list[str]:
        path = ":".join(map(str, (SHIM, Path.cwd(), *self._modules)))
        return self.namespace.command(["env", f"TANDEM_DAMAGE={self._socket}", f"PYTHONPATH={path}", *command])


class ServerNode(Node):
    """`vllm serve` with a connector."""

    def __init__(
        self, name: str, namespace: Namespace, core: int, scratch: Path, transfer: Mapping[str, Any], *modules: Path
    ) -> None:
        super().__init__(name, namespace, scratch, *modules)
        ip = namespace.ip
        filled = json.dumps(transfer).replace("HOST", ip)
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": ip,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": ip,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_PORT),
        }
        self._server = VllmServer(
            VLLM,
            STORYTELLER,
            [core],
            scratch,
            *("--enable-prefix-caching", "--kv-transfer-config", filled, *SERVER_OPTIONS),
            host=ip,
            port=HTTP_PORT,
            variables=variables,
            entered=self._entered,
        )

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def ended(self) -> bool:
        return self._server.ended

    async def start(self) -> None:
        await self._server.__aenter__()

    async def stop(self) -> None:
        await self._server.__aexit__(None, None, None)

    async def held(self) -> float:
        # the gauge is of the last step, so there must be one after the release
        answer = await ask(self.url, [5, 6, 7], 1)
        if answer.status != "200":
            raise RuntimeError(f"{self.name} answers {answer.status}: {answer.error}")
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            families = text_string_to_metric_families(await reply.text())
        (usage,) = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "vllm:kv_cache_usage_perc"
        ]
        return usage


class WorkerNode(Node):
    """A worker of Tandem's with the engine vLLM."""

    def __init__(self, module: str, namespace: Namespace, core: int, scratch: Path, router: str) -> None:
        super().__init__(module, namespace, scratch)
        self._config = WorkerConfig.parse(
            {
                "worker_id": module,
                "routers": (router,),
                "host": namespace.ip,
                "port": GRPC_PORT,
                "loan_port": LOAN_PORT,
                "cores": (core,),
                "model": STORYTELLER,
                "engine": "vllm",
                "vllm_python": VLLM / "bin" / "python",
                "vllm_options": {"enforce_eager": True, "max_model_len": CONTEXT, "max_num_seqs": 8},
                "dtype": "float32",
                "block_tokens": BLOCK,
                "kv_memory_mib": KV_MIB,
                "max_prefill_tokens": CONTEXT,  # as `vllm serve` does here: chunks change sums in their last bits
                "drain_s": 0.0,
            }
        )
        self._role: RoleProcess

    @property
    def pid(self) -> int:
        return self._role.pid

    @property
    def ended(self) -> bool:
        return self._role.process.returncode is not None

    async def start(self) -> None:
        self._role = await start_role(self.name, self.name, self._config, self._entered)

    async def stop(self) -> None:
        await stop_process(self._role.process)

    async def held(self) -> float:
        report = await report_of(self._role.address)
        if report.fault:
            raise RuntimeError(f"{self.name}: {report.fault}")
        return report.held_blocks + report.reserved_blocks + report.quarantined_blocks


@dataclass
class Side(ABC):
    """A lender, a borrower, and how requests reach them."""

    lender: Node
    borrower: Node
    one_phase: ClassVar[bool] = False
    """Whether one request computes, moves and decodes."""

    @abstractmethod
    async def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Have the lender compute a prompt, where that is a request of its own; return the reference to it."""

    @abstractmethod
    async def decode(self, prompt: Sequence[int], reference: Mapping[str, Any]) -> Answer:
        """Ask for the tokens after a prompt whose KV the borrower is to fetch."""

    @abstractmethod
    async def compute(self, prompt: Sequence[int]) -> None:
        """Have both compute a prompt for its own sake."""

    @abstractmethod
    def receipt_of(self, answer: Answer) -> dict[str, Any]:
        """Return where an answer's blocks came from, as far as the side tells."""

    async def restart_ended(self) -> list[str]:
        """Start the servers whose processes have ended; return those that no case has killed."""
        ended = [node for node in (self.lender, self.borrower) if node.ended]
        crashed = [node.name for node in ended if not node.killed]
        await self.restart(*ended)
        return crashed

    async def restart(self, *nodes: Node) -> None:
        for node in nodes:
            await node.stop()
            await node.start()
            node.killed = False
        await self.joined()

    async def joined(self) -> None:  # noqa: B027 - servers of a pair serve when they have started
        """Wait until requests reach both."""


class PairSide(Side):
    """Two `vllm serve`, and a client in the place of a proxy of two phases."""

    lender: ServerNode
    borrower: ServerNode

    async def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        answer = await ask(self.lender.url, prompt, 1, kv_transfer_params=ASK_PREFILL)
        if answer.status != "200" or not (reference := answer.body.get("kv_transfer_params")):
            raise RuntimeError(f"prefill answers {answer.status}, without a reference: {answer.error}")
        return dict(reference)

    async def decode(self, prompt: Sequence[int], reference: Mapping[str, Any]) -> Answer:
        return await ask(self.borrower.url, prompt, OUTPUT_TOKENS, kv_transfer_params=reference)

    def receipt_of(self, answer: Answer) -> dict[str, Any]:
        return dict((answer.body.get("kv_transfer_params") or {}).get("tandem", {}))

    async def compute(self, prompt: Sequence[int]) -> None:
        for node in (self.lender, self.borrower):
            answer = await ask(node.url, prompt, 1, UNHURRIED_S)
            if answer.status != "200":
                raise RuntimeError(f"{node.name} answers {answer.status}: {answer.error}")


@dataclass
class WorkersSide(Side):
    """Tandem's router and workers: one request, which the router places and the borrower's loan serves."""

    url: str
    router: RoleProcess
    one_phase = True

    async def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return what a client could make up, since no request has a reference."""
        blocks = list(range(1, len(prompt) // BLOCK + 2))
        asked = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [blocks], "tp_size": 1}
        where = {"remote_host": self.lender.namespace.ip, "remote_port": LOAN_PORT}
        return asked | where | {"remote_engine_id": "prefill_worker", "remote_request_id": "cmpl-1"}

    async def decode(self, prompt: Sequence[int], reference: Mapping[str, Any]) -> Answer:
        return await ask(self.url, prompt, OUTPUT_TOKENS, kv_transfer_params=reference, receipt=True)

    def receipt_of(self, answer: Answer) -> dict[str, Any]:
        kv = answer.body.get("tandem", {}).get("kv", {})
        return {name: value for name, value in kv.items() if value and name in KEPT_OF_RECEIPT}

    async def compute(self, prompt: Sequence[int]) -> None:
        answer = await ask(self.url, prompt, 1, UNHURRIED_S)
        if answer.status != "200":
            raise RuntimeError(f"the router answers {answer.status}: {answer.error}")

    async def joined(self) -> None:
        await await_members(self.router.joined_at, None, 1, 1, 120)


SERVER_OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--block-size", str(BLOCK)),
    *("--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", str(POOL_BLOCKS)),
)
NIXL = {
    "kv_connector": "NixlCalm",
    "kv_connector_module_path": "bench.vllm.nixl_calm",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": LEASE_S},
}
TANDEM = {
    "kv_connector": "TandemConnector",
    "kv_connector_module_path": "tandem_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "loan_host": "HOST",
        "loan_port": LOAN_PORT,
        "advertise_host": "HOST",
        "secret_file": "SECRET",
    },
}
PAIRS: Mapping[str, Mapping[str, Any]] = {
    "nixl": NIXL,
    "nixl-recompute": NIXL | {"kv_load_failure_policy": "recompute"},
    "tandem": TANDEM,
}
"""Settings `--kv-transfer-config` of pairs; HOST is the server's address, SECRET a file that both can read."""
WORKERS = "workers"
TITLES = {
    "nixl": "vLLM's NixlConnector",
    "nixl-recompute": "the same, kv_load_failure_policy recompute",
    "tandem": "TandemConnector",
    WORKERS: "Tandem's workers",
}


@asynccontextmanager
async def opened(name: str, scratch: Path, cores: Sequence[int]) -> AsyncIterator[Side]:
    """Start a side; its processes and namespaces end with the context."""
    folder = scratch / name
    with Namespaces() as namespaces:
        spaces = [namespaces.add(role) for role in ("lender", "borrower")]
        own_cores = (cores[0], cores[-1])
        async with AsyncExitStack() as stack:
            side: Side
            if name == WORKERS:
                settings = {"models": [{"path": STORYTELLER, "name": "m"}], "host": namespaces.host_ip, "port": 0}
                config = RouterConfig.parse(settings | {"http_port": 0} | LENDER_ALWAYS)
                router = await start_role("router", "router", config)
                stack.push_async_callback(stop_process, router.process)
                nodes: list[Node] = [
                    WorkerNode(module, space, core, folder / module, router.joined_at)
                    for module, space, core in zip(("prefill_worker", "decode_worker"), spaces, own_cores, strict=True)
                ]
                side = WorkersSide(nodes[0], nodes[1], f"http://{router.http_address}", router)
            else:
                folder.mkdir(parents=True)
                secret = folder / "secret"
                secret.write_text(os.urandom(24).hex())
                transfer = json.loads(json.dumps(PAIRS[name]).replace("SECRET", str(secret)))
                modules = () if name == "tandem" else (offer_nixl(VLLM, scratch),)
                nodes = [
                    ServerNode(role, space, core, folder / role, transfer, *modules)
                    for role, space, core in zip(("lender", "borrower"), spaces, own_cores, strict=True)
                ]
                side = PairSide(nodes[0], nodes[1])
            async with asyncio.TaskGroup() as starts:
                for node in nodes:
                    starts.create_task(_start(node, stack))
            await side.joined()
            yield side


async def _start(node: Node, stack: AsyncExitStack) -> None:
    await node.start()
    stack.push_async_callback(node.stop)
