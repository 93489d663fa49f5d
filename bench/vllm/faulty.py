"""The two systems of the fault benchmark, with the same operations: stream, kill, start again, stop, flip a byte."""

import asyncio
import contextlib
import json
import mmap
import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.serving import children
from bench.support.namespaces import Namespace
from bench.support.workers import Workers
from bench.vllm.pair import VllmPair
from cluster.network.rpc import channel
from kvtransfer.memory_file import SECRET_BYTES
from protos import inference_pb2 as pb
from protos import membership_pb2, membership_pb2_grpc
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, RoleProcess
from tandem.storyteller import STORYTELLER
from tandem.topology import plan_topology

MODEL = STORYTELLER
BLOCK, MAX_LENGTH = 32, 1024


class Side(ABC):
    """One system of a prefill and a decode pool."""

    name: str

    @abstractmethod
    def stream(self, prompt: Sequence[int], num_tokens: int, salt: str) -> AsyncIterator[str]:
        """Yield the text of each token; raises when the stream is lost."""

    @abstractmethod
    async def flipped(self, prompt: Sequence[int], num_tokens: int) -> str:
        """Return the text of a request whose KV changes by one byte between its computation and its read."""

    @abstractmethod
    def signal(self, role: str, how: signal.Signals) -> None:
        """Send a signal to all processes of one worker."""

    @abstractmethod
    async def start_again(self, role: str) -> None:
        """Replace a killed worker."""

    @abstractmethod
    async def free(self) -> bool:
        """Return whether the workers that live hold no block for any request."""


class Tandem(Side):
    """One prefill and two decode workers on vLLM, behind a router; beside them a pair for flipped bytes."""

    name = "tandem"

    def __init__(self, cores: Sequence[int]) -> None:
        self._settings: dict[str, Any] = {
            "model": MODEL,
            "engine": "vllm",
            "block_tokens": BLOCK,
            "dtype": "float32",
            "kv_memory_mib": 64,
            "max_prefill_tokens": 64,
            "vllm_options": {"enforce_eager": True, "max_model_len": MAX_LENGTH, "max_num_seqs": 16},
        }
        router = {"model": MODEL, "port": 0, "decode_prefill_tokens_per_s": 100.0}
        self._topology = plan_topology(1, 2, router, self._settings, cores)
        self._cluster = LocalCluster(self._topology)
        self._pair = Workers(
            prefill_0=self._settings | {"cores": cores[:1]}, decode_0=self._settings | {"cores": cores[-1:]}
        )

    async def __aenter__(self) -> "Tandem":
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self._cluster)
        await self._stack.enter_async_context(self._pair)
        self._client = await self._stack.enter_async_context(Client(self._cluster.address))
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def stream(self, prompt: Sequence[int], num_tokens: int, salt: str) -> AsyncIterator[str]:
        sampling = pb.Sampling(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        call = self._client.generate(token_ids=prompt, sampling=sampling, cache_salt=salt, timeout_s=60.0)
        async with contextlib.aclosing(call) as messages:
            async for message in messages:
                for _ in message.token_ids[:-1]:
                    yield ""
                if message.token_ids or message.text:
                    yield message.text

    async def flipped(self, prompt: Sequence[int], num_tokens: int) -> str:
        await self._pair.lend("prefill_0", prompt)
        block = self._pair.lent_blocks[len(self._pair.lent_blocks) // 2]
        (engine,) = [pid for pid in children(self._pair.role("prefill_0").pid) if _has_kv(pid)]
        _flip(engine, block)
        receipt, text = await self._pair.text("decode_0", prompt, "prefill_0", num_tokens)
        _flip(engine, block)
        assert receipt.kv.mismatched_blocks >= 1, "the flipped byte was not seen"
        return text

    def signal(self, role: str, how: signal.Signals) -> None:
        os.killpg(self._worker(role).pid, how)

    async def start_again(self, role: str) -> None:
        dead = self._worker(role)
        await dead.process.wait()
        pool = self._cluster.prefill if role == "prefill" else self._cluster.decode
        pool.remove(dead)
        module, config = next(each for each in self._topology.workers() if each[1].worker_id == dead.name)
        await self._cluster.add_worker(module, config)  # at the end: the next victim is the other one

    async def free(self) -> bool:
        for worker in self._cluster.workers:
            if worker.process.returncode is not None:
                continue
            async with channel(worker.address) as link:
                stub = membership_pb2_grpc.WorkerStub(link)
                try:
                    found = await stub.Audit(membership_pb2.AuditRequest(), timeout=1)
                except Exception:
                    continue  # it is stopped
            assert not found.fault, found.fault
            if found.held_blocks or found.reserved_blocks or found.quarantined_blocks:
                return False
        return True

    def _worker(self, role: str) -> RoleProcess:
        return (self._cluster.prefill if role == "prefill" else self._cluster.decode)[0]


class Vllm(Side):
    """vLLM's pair with its NixlConnector."""

    name = "vllm"

    def __init__(
        self,
        environment: Path,
        cores: Sequence[int],
        scratch: Path,
        namespaces: Mapping[str, Namespace] | None = None,
    ) -> None:
        self._where = scratch / "where.json"
        options = ("--enforce-eager", "--dtype", "float32", "--max-model-len", str(MAX_LENGTH))
        if namespaces:
            options = (*options, "--host", "0.0.0.0")
        self.pair = VllmPair(environment, MODEL, cores, scratch, *options, where=self._where, namespaces=namespaces)

    async def __aenter__(self) -> "Vllm":
        self._session = aiohttp.ClientSession()
        await self.pair.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._session.close()
        await self.pair.__aexit__(None, None, None)

    async def stream(self, prompt: Sequence[int], num_tokens: int, salt: str) -> AsyncIterator[str]:
        async for _, text in self.pair.stream(prompt, num_tokens):
            yield text

    async def flipped(self, prompt: Sequence[int], num_tokens: int) -> str:
        pieces = [text async for _, text in self.pair.stream(prompt, num_tokens, between=self._flip)]
        return "".join(pieces)

    def _flip(self, transfer: dict[str, Any]) -> None:
        where = json.loads(self._where.read_text())
        blocks = transfer["remote_block_ids"]
        flat = [block for group in blocks for block in group] if isinstance(blocks[0], list) else blocks
        address = where["base"] + where["offsets"][1] + flat[len(flat) // 2] * where["block"] + 77
        with open(f"/proc/{where['pid']}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            (byte,) = memory.read(1)
            memory.seek(address)
            memory.write(bytes([byte ^ 0x40]))

    def signal(self, role: str, how: signal.Signals) -> None:
        self.pair.kill(role, how)

    async def start_again(self, role: str) -> None:
        await self.pair.servers[role].__aexit__(None, None, None)
        await self.pair.start(role)

    async def free(self) -> bool:
        for server in self.pair.servers.values():
            try:
                async with self._session.get(f"{server.url}/metrics", timeout=aiohttp.ClientTimeout(total=1)) as answer:
                    text = await answer.text()
            except (aiohttp.ClientError, TimeoutError):
                continue  # dead, or stopped
            (usage,) = re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", text, re.M)
            if float(usage) > 0:
                return False
        return True


def _has_kv(pid: int) -> bool:
    return any("memfd:tandem-kv" in os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())


def _flip(pid: int, block: int) -> None:
    """Change a byte of `block` in the second layer of the engine's KV memory."""
    entry = next(entry for entry in Path(f"/proc/{pid}/fd").iterdir() if "memfd:tandem-kv" in os.readlink(entry))
    with entry.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        layers = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
        plane = (len(memory) - SECRET_BYTES) // layers
        memory[plane + block * _span_bytes() + 77] ^= 0x40


def _span_bytes() -> int:
    config = json.loads((MODEL / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_key_value_heads"] * BLOCK * 2 * head_dim * 4)


async def settled(side: Side, limit_s: float) -> float:
    """Return the seconds until every block is free; infinite after `limit_s`."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    while not await side.free():
        if loop.time() - began_at > limit_s:
            return float("inf")
        await asyncio.sleep(0.02)
    return loop.time() - began_at
