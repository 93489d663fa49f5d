"""Every ordered pair of real processes moves a known pattern through the configured transport."""

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from engine.worker.config import WorkerConfig
from kvtransfer.strict_lanes import GROUPS
from tandem.doctor.findings import Finding
from tandem.doctor.machine import Machine
from tandem.doctor.peer import PeerSpec

PATTERN_BYTES = 32 << 20
START_TIMEOUT_S = 60.0
PAIR_TIMEOUT_S = 45.0
"""More than the reads of a pair may take together with their check, less than anybody's patience."""
PEER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "tandem.doctor.peer")


@dataclass(frozen=True, slots=True)
class PairResult:
    """What became of `reader` reading what `lender` lends."""

    reader: str
    lender: str
    gigabytes_per_s: float | None = None
    lanes: tuple[str, ...] = ()
    first_wrong_byte: int | None = None
    wrong_bytes: int = 0
    error: str = ""


def plan_peers(config: WorkerConfig, num_workers: int, gpu: bool, num_bytes: int = PATTERN_BYTES) -> list[PeerSpec]:
    """One for each worker, each with a pattern of its own."""
    host = config.advertise_host or config.host
    return [
        PeerSpec(f"worker-{number}", number + 1, num_bytes, config.transport, host, config.strict_lanes, gpu)
        for number in range(num_workers)
    ]


class _Peer:
    def __init__(self, spec: PeerSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.endpoint = ""
        self.error = ""
        self._process = process

    @classmethod
    async def start(cls, spec: PeerSpec, command: Sequence[str]) -> "_Peer":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command,
            json.dumps(asdict(spec)),
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            limit=1 << 24,
        )
        return cls(spec, process)

    async def prepare(self) -> None:
        said = await self.hear(START_TIMEOUT_S)
        self.endpoint, self.error = said.get("endpoint", ""), said.get("error", "")

    async def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next thing that it says; what is wrong with it is its `error`."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while line := await self._process.stdout.readline():
                    with suppress(ValueError):  # a library's own words
                        said: dict[str, Any] = json.loads(line)
                        return said
                return {"error": f"{self.spec.name} ended with code {await self._process.wait()}"}
        except TimeoutError:
            return {"error": f"{self.spec.name} said nothing for {timeout_s:g} s"}

    async def read(self, lender: "_Peer", timeout_s: float) -> PairResult:
        names = self.spec.name, lender.spec.name
        if self.error or lender.error:
            return PairResult(*names, error=self.error or lender.error)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"endpoint": lender.endpoint, "seed": lender.spec.seed}).encode() + b"\n")
        said = await self.hear(timeout_s)
        if "error" not in said:
            return PairResult(*names, **said | {"lanes": tuple(said["lanes"])})
        if self._process.returncode is not None or "said nothing" in said["error"]:
            self.error = said["error"]  # whatever it says later belongs to this pair
        return PairResult(*names, error=said["error"])

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def measure_pairs(
    specs: Sequence[PeerSpec], timeout_s: float = PAIR_TIMEOUT_S, command: Sequence[str] | None = None
) -> list[PairResult]:
    """One pair after the other. No pair takes longer than `timeout_s`, and no process outlives this."""
    peers: list[_Peer] = []
    async with AsyncExitStack() as stack:
        for spec in specs:
            peer = await _Peer.start(spec, command or PEER_COMMAND)
            stack.push_async_callback(peer.stop)
            peers.append(peer)
        await asyncio.gather(*(peer.prepare() for peer in peers))
        return [await reader.read(lender, timeout_s) for reader in peers for lender in peers if reader is not lender]


def judge_pairs(results: Sequence[PairResult], machine: Machine, config: WorkerConfig) -> list[Finding]:
    """A finding for each pair that is not all right; one for all when all are."""
    findings = [finding for result in results if (finding := _judge(result, machine, config)) is not None]
    return findings or [Finding("pairs", "ok", f"all {len(results)} move KV right")]


def better_lanes(machine: Machine, config: WorkerConfig) -> tuple[str, ...]:
    """What processes of this host could use instead of TCP, in UCX's words."""
    if config.transport == "nixl":
        on_gpu = bool(machine.torch_gpus) and config.device != "cpu"
        return ("cuda_ipc",) if on_gpu else () if machine.ptrace_scope else ("cma",)
    return GROUPS["rdma"] if machine.host.active_rdma else ()


def fell_back(result: PairResult, machine: Machine, config: WorkerConfig) -> bool:
    """It went over TCP alone although the host has better."""
    used = {lane.partition("/")[0] for lane in result.lanes}
    return bool(better_lanes(machine, config)) and used == {"tcp"}


def _judge(result: PairResult, machine: Machine, config: WorkerConfig) -> Finding | None:
    pair = f"{result.reader} reading {result.lender}"
    if result.error:
        advice = "see the checks above; UCX_LOG_LEVEL=info says more"
        return Finding("pairs", "broken", f"{pair}: {result.error}", advice)
    if result.first_wrong_byte is not None:
        found = f"{pair}: {result.wrong_bytes} bytes arrived wrong, the first at {result.first_wrong_byte}"
        return Finding("pairs", "broken", found, "do not serve with this transport; try the other, and test the memory")
    if fell_back(result, machine, config):
        better = ", ".join(better_lanes(machine, config))
        found = f"{pair}: over {', '.join(result.lanes)} where {better} would be possible"
        return Finding("pairs", "warning", found, "unset UCX_TLS and UCX_NET_DEVICES; see ptrace scope, GPUs and RDMA")
    return None
