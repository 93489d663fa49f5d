"""Transfers of a known pattern between every ordered pair of real processes, by the configured transport."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from engine.config import WorkerConfig
from kvtransfer.ucx.lanes import GROUPS
from tandem.doctor.findings import Finding
from tandem.doctor.links import PeerGone, PeerLink, ProcessLink
from tandem.doctor.machine import Machine
from tandem.doctor.peer import PeerSpec

PATTERN_BYTES = 32 << 20
START_TIMEOUT_S = 60.0
PAIR_TIMEOUT_S = 45.0
"""Seconds for the reads of a pair and their check."""
PEER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "tandem.doctor.peer")


@dataclass(frozen=True, slots=True)
class PairResult:
    """Result of `reader` reading the pattern of `lender`."""

    reader: str
    lender: str
    gigabytes_per_s: float | None = None
    lanes: tuple[str, ...] = ()
    first_wrong_byte: int | None = None
    wrong_bytes: int = 0
    error: str = ""
    across_hosts: bool = False


def plan_peers(
    config: WorkerConfig, num_workers: int, gpu: bool, num_bytes: int = PATTERN_BYTES, seed: int = 1
) -> list[PeerSpec]:
    """Return a spec for each worker, each with its own pattern and name: `seed` and the following ones."""
    host = config.advertise_host or config.host
    return [
        PeerSpec(f"worker-{number - 1}", number, num_bytes, config.transport, host, config.strict_lanes, gpu)
        for number in range(seed, seed + num_workers)
    ]


class Peer:
    """One end of pairs, on this host or another."""

    def __init__(self, name: str, seed: int, link: PeerLink, elsewhere: bool = False) -> None:
        """Create a peer; `seed` is that of its pattern."""
        self.name = name
        self.elsewhere = elsewhere
        self._seed = seed
        self._link = link
        self._endpoint = ""
        self._error = ""
        """Reason why no pair with it can work any more."""

    async def prepare(self) -> None:
        reply = await self._hear(START_TIMEOUT_S)
        self._endpoint, self._error = reply.get("endpoint", ""), reply.get("error", "")

    async def read(self, lender: "Peer", timeout_s: float) -> PairResult:
        names, across = (self.name, lender.name), self.elsewhere or lender.elsewhere
        if self._error or lender._error:
            return PairResult(*names, error=self._error or lender._error, across_hosts=across)
        try:
            await self._link.send({"endpoint": lender._endpoint, "seed": lender._seed})
            reply = await self._hear(timeout_s)
        except PeerGone as error:
            reply = {"error": str(error)}
        if "error" in reply:
            return PairResult(*names, error=reply["error"], across_hosts=across)
        return PairResult(*names, **reply | {"lanes": tuple(reply["lanes"])}, across_hosts=across)

    async def stop(self) -> None:
        await self._link.stop()

    async def _hear(self, timeout_s: float) -> dict[str, Any]:
        """Return the peer's next message; a failure becomes its `error`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._link.receive()
        except PeerGone as error:
            self._error = str(error)
        except TimeoutError:  # a later answer would belong to this pair
            self._error = f"{self.name} said nothing for {timeout_s:g} s"
        return {"error": self._error}


async def start_peers(
    stack: AsyncExitStack, specs: Sequence[PeerSpec], command: Sequence[str] | None = None
) -> list[Peer]:
    """Start peers on this host; each ends with `stack`."""
    peers: list[Peer] = []
    for spec in specs:
        peer = Peer(spec.name, spec.seed, await ProcessLink.start(spec, command or PEER_COMMAND))
        stack.push_async_callback(peer.stop)
        peers.append(peer)
    return peers


async def measure_pairs(peers: Sequence[Peer], timeout_s: float = PAIR_TIMEOUT_S) -> list[PairResult]:
    """Measure one pair after the other, none longer than `timeout_s`."""
    await asyncio.gather(*(peer.prepare() for peer in peers))
    return [await reader.read(lender, timeout_s) for reader in peers for lender in peers if reader is not lender]


def judge_pairs(results: Sequence[PairResult], machine: Machine, config: WorkerConfig) -> list[Finding]:
    """Return a finding for each pair with a problem, or one for all."""
    findings = [finding for result in results if (finding := _judge(result, machine, config)) is not None]
    return findings or [Finding("pairs", "ok", f"all {len(results)} move KV right")]


def better_lanes(machine: Machine, config: WorkerConfig, across_hosts: bool = False) -> tuple[str, ...]:
    """Return lanes that processes of this host, or of two hosts, could use instead of TCP, in UCX's terms."""
    if across_hosts:
        return GROUPS["rdma"] if machine.host.active_rdma else ()
    if config.transport == "nixl":
        on_gpu = bool(machine.torch_gpus) and config.kind.may_use_gpu
        ours = machine.compiler is not None or not machine.ptrace_scope  # otherwise neither Tandem nor UCX can read it
        return ("cuda_ipc",) if on_gpu else ("posix",) if ours else ()
    return GROUPS["rdma"] if machine.host.active_rdma else ()


def fell_back(result: PairResult, machine: Machine, config: WorkerConfig) -> bool:
    """Return whether a pair used TCP although the host has better lanes."""
    used = {lane.partition("/")[0] for lane in result.lanes}
    return bool(better_lanes(machine, config, result.across_hosts)) and used == {"tcp"}


def _judge(result: PairResult, machine: Machine, config: WorkerConfig) -> Finding | None:
    pair = f"{result.reader} reading {result.lender}"
    if result.error:
        advice = "see the checks above; UCX_LOG_LEVEL=info says more"
        return Finding("pairs", "broken", f"{pair}: {result.error}", advice)
    if result.first_wrong_byte is not None:
        problem = f"{pair}: {result.wrong_bytes} bytes arrived wrong, the first at {result.first_wrong_byte}"
        return Finding(
            "pairs", "broken", problem, "do not serve with this transport; try the other, and test the memory"
        )
    if fell_back(result, machine, config):
        better = ", ".join(better_lanes(machine, config, result.across_hosts))
        problem = f"{pair}: over {', '.join(result.lanes)} where {better} would be possible"
        return Finding(
            "pairs", "warning", problem, "unset UCX_TLS and UCX_NET_DEVICES; see ptrace scope, GPUs and RDMA"
        )
    return None
