"""Clusters of real processes under faults: their streams, and ways to stop, kill and audit them."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import Config
from cluster.errors import ServiceError
from cluster.network.rpc import channel
from cluster.process.tree import children
from protos import inference_pb2 as pb
from protos import membership_pb2, membership_pb2_grpc
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, RoleProcess, start_role, stop_process

PATIENCE_S = 90.0
"""Seconds to wait for what will come, on the slowest and busiest machine: no test measures how long it takes."""
LENDER_ALWAYS = {"decode_prefill_tokens_per_s": 100.0}
"""Of a router. Computing on a decode worker looks so slow that every loan is worth it, not so slow that requests are
refused since they would come too late."""


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = PATIENCE_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not (await met if isinstance(met := condition(), Awaitable) else met):
        assert time.monotonic() < give_up_at, f"waited in vain until {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def role(module: str, name: str, config: Config) -> AsyncIterator[RoleProcess]:
    """A role's process, which is stopped in the end."""
    started = await start_role(module, name, config)
    try:
        yield started
    finally:
        await stop_process(started.process)


class Stream:
    """One request under way, its messages as they come."""

    def __init__(self, client: Client, prompt: Sequence[int], max_tokens: int, **options: Any) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish: pb.Finish | None = None
        sampling = pb.Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._call = client.generate(token_ids=prompt, sampling=sampling, **({"timeout_s": 200.0} | options))
        self.task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> "Stream":
        try:
            async for message in self._call:
                assert self.finish is None, "nothing comes after the finish"
                self.token_ids += message.token_ids
                self.text += message.text
                if message.HasField("finish"):
                    self.finish = message.finish
        finally:
            await self._call.aclose()  # leaving the loop cancels the request
        assert self.finish is not None, "a stream that ends well has a finish"
        assert self.finish.usage.completion_tokens == len(self.token_ids)
        return self

    async def reached(self, num_tokens: int) -> None:
        """Raises what the stream failed with before that."""

        async def there() -> bool:
            if self.task.done() and len(self.token_ids) < num_tokens:
                self.task.result()
            return len(self.token_ids) >= num_tokens

        await until(there, f"{num_tokens} tokens have come")

    async def cancel(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, ServiceError):
            await self.task

    @property
    def receipt(self) -> pb.Receipt:
        assert self.finish is not None
        return self.finish.receipt


async def finished(streams: Sequence[Stream]) -> list[Stream]:
    return list(await asyncio.gather(*(stream.task for stream in streams)))


def assert_equal_answers(disturbed: Sequence[Stream], undisturbed: Sequence[Stream]) -> None:
    for one, other in zip(disturbed, undisturbed, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish is not None
        assert other.finish is not None
        assert one.finish.reason == other.finish.reason
        assert one.finish.usage.prompt_tokens == other.finish.usage.prompt_tokens


class Asking:
    """Eight clients who ask for the same again and again, each time of a cache of its own, while something happens.
    Every answer is what it was when nothing happened."""

    def __init__(self, client: Client, wanted: Sequence[tuple[list[int], int]], undisturbed: Sequence[Stream]) -> None:
        self._client, self._wanted, self._undisturbed = client, wanted, undisturbed
        self._over = False
        self.attempts: list[int] = []
        """Of each answer."""
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(8)]

    @classmethod
    async def begin(cls, client: Client, wanted: Sequence[tuple[list[int], int]]) -> "Asking":
        """`wanted`: prompts, and how many tokens each is to be continued by."""
        first = [Stream(client, prompt, count, cache_salt="first") for prompt, count in wanted]
        return cls(client, wanted, await finished(first))

    def check(self) -> None:
        """That nobody has failed."""
        assert not any(task.done() for task in self._tasks)

    async def end(self) -> None:
        """What is under way is answered yet."""
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, number: int) -> None:
        while not self._over:
            which = number % len(self._wanted)
            prompt, count = self._wanted[which]
            stream = Stream(self._client, prompt, count, cache_salt=f"{number}")
            await stream.task
            assert_equal_answers([stream], [self._undisturbed[which]])
            self.attempts.append(stream.receipt.placement.attempt)
            number += 8


# ----------------------------------------------------------------------------------------------- processes


def state_of(pid: int) -> str:
    """Its letter in /proc: T is stopped; empty when there is no such process, or a dead one."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if letter in "ZX" else letter


def children_running(pid: int, module: str) -> list[int]:
    """Its child processes that run that module."""
    return [child for child in children(pid) if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]


def engine_of(role: RoleProcess) -> int:
    """The engine process behind a worker's front."""
    programs = ("engine.process.engine_process", "engine.process.vllm.process")
    (engine,) = [pid for program in programs for pid in children_running(role.pid, program)]
    return engine


def ranks_of(engine: int) -> list[int]:
    """Processes of an engine's ranks besides the engine process itself: vLLM's workers."""
    programs = ("spawn_main", "VLLM::Worker")
    return [pid for program in programs for pid in children_running(engine, program)]


async def gone(pids: Sequence[int]) -> None:
    """These processes have ended."""

    await until(lambda: not any(state_of(pid) for pid in pids), f"the processes {list(pids)} are gone")


def named(cluster: LocalCluster, name: str) -> RoleProcess:
    """The order of a cluster's workers is the one they became ready in."""
    (worker,) = [worker for worker in cluster.workers if worker.name == name]
    return worker


async def pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)

    await until(lambda: state_of(pid) == "T", f"{pid} is stopped")


@asynccontextmanager
async def running(cluster: LocalCluster) -> AsyncIterator[tuple[LocalCluster, Client]]:
    """The cluster and a client of it. Afterwards no engine that it ever had is left."""
    engines: list[int] = []
    async with cluster, Client(cluster.address) as client:
        engines += [engine_of(worker) for worker in cluster.workers]
        cluster.engines = engines  # type: ignore[attr-defined]  # tests that start more workers add theirs
        yield cluster, client
    await gone(engines)


async def says(address: str, service: str) -> bool:
    """Of a service, LIVENESS or READINESS, by gRPC's health protocol."""
    async with grpc.aio.insecure_channel(address) as link:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(link).Check(request, timeout=60)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def report_of(address: str) -> membership_pb2.AuditReport:
    async with channel(address) as link:
        stub = membership_pb2_grpc.WorkerStub(link)
        report: membership_pb2.AuditReport = await stub.Audit(membership_pb2.AuditRequest(), timeout=60)
        return report


async def busiest_decoder(cluster: LocalCluster) -> tuple[RoleProcess, int]:
    """The decode worker that most requests were placed on, and how many it has."""
    num_requests = [(await report_of(worker.address)).requests for worker in cluster.decode]
    most = max(num_requests)
    return cluster.decode[num_requests.index(most)], most


async def lending(worker: RoleProcess, num_loans: int, num_blocks: int) -> None:
    """So many loans are under way there, with so many blocks held for them."""

    async def busy() -> bool:
        report = await report_of(worker.address)
        return report.loans >= num_loans and report.held_blocks >= num_blocks

    await until(busy, f"{worker.name} lends")


async def workers_joined(client: Client, num_prefill: int, num_decode: int) -> None:
    async def joined() -> bool:
        served, *_ = await client.list_models()  # adapters come after their model
        return (served.prefill_workers, served.decode_workers) == (num_prefill, num_decode)

    await until(joined, f"{num_prefill} prefill and {num_decode} decode workers have joined")


def alive(cluster: LocalCluster) -> list[str]:
    return [worker.address for worker in cluster.workers if worker.process.returncode is None]


def kill_worker(role: RoleProcess) -> None:
    os.kill(engine_of(role), signal.SIGKILL)
    role.process.kill()


def kill_front(role: RoleProcess) -> None:
    role.process.kill()


def kill_engine(role: RoleProcess) -> None:
    os.kill(engine_of(role), signal.SIGKILL)
