"""Other hosts: `tandem doctor --listen PORT` lends a peer there to the doctor that names its address.

One gRPC stream per examination, with JSON messages, one answer to each:

    (nothing)                        {"host": its name, "findings": [...]}    report of that host
    {"clock": true}                  {"clock": seconds since 1970}
    {"start": {"seed": ..., ...}}    the peer's first message: an endpoint, or an error
    anything else                    the peer's answer

With the certificates of workers only members of the cluster may use it, like everything between workers.

Transfers of a known pattern between every ordered pair of real processes, by the configured transport.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from cluster.errors import InvalidRequest, Overloaded, ServiceError
from cluster.network.error_status import from_rpc_error, to_status
from cluster.network.rpc import Server, channel
from cluster.network.tls import MemberIdentity
from cluster.process.tasks import all_of
from engine.config import WorkerConfig
from kvtransfer.ucx.lanes import GROUPS
from tandem.doctor.machine import Finding, Machine
from tandem.doctor.peer import PeerGone, PeerLink, PeerSpec, ProcessLink

SERVICE = "tandem.v1.Doctor"
METHOD = f"/{SERVICE}/Examine"
REACH_S = 15.0
"""Seconds for the first answer of a host."""
CLOCK_ROUNDS = 8
MAX_SKEW_S = 1.0
"""Clock skew in seconds beyond which logs and traces of two hosts contradict each other, and certificates may be
refused."""
MAX_PATTERN_BYTES = 256 << 20

Start = Callable[[int, int, str], PeerSpec]
"""Function (seed, bytes, caller's host:port) that returns the spec of this host's peer."""


class DoctorService:
    """gRPC service of a host that listens.

    One examination at a time.
    """

    def __init__(self, findings: Sequence[Finding], spec: Start, command: Sequence[str]) -> None:
        self._findings = [asdict(finding) for finding in findings]
        self._spec = spec
        self._command = command
        self._examined = False

    def add_to(self, server: grpc.aio.Server) -> None:
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._answers)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Examine": handler})])

    async def _answers(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._examine(requests, context.peer().partition(":")[2])) as answers:
                async for message in answers:
                    yield json.dumps(message).encode()
        except ServiceError as error:
            await context.abort_with_status(to_status(error))

    async def _examine(self, requests: AsyncIterator[bytes], asker: str) -> AsyncGenerator[dict[str, Any]]:
        if self._examined:
            raise Overloaded("another `tandem doctor` examines this host now")
        self._examined, peer = True, None
        try:
            yield {"host": socket.gethostname(), "findings": self._findings}
            async for raw in requests:
                request = _parsed(raw)
                if "clock" in request:
                    yield {"clock": time.time()}
                elif "start" in request and peer is None:
                    spec = self._spec(*_pattern_of(request["start"]), asker)
                    peer = await ProcessLink.start(spec, self._command)
                    yield await _heard(peer)
                elif peer is None:
                    raise InvalidRequest("start", "must come before requests to the peer")
                else:
                    await peer.send(request)
                    yield await _heard(peer)
        finally:
            self._examined = False
            if peer is not None:
                await peer.stop()


async def _heard(peer: PeerLink) -> dict[str, Any]:
    try:
        return await peer.receive()
    except PeerGone as error:
        return {"error": str(error), "gone": True}


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        request = json.loads(raw)
    except ValueError as error:
        raise InvalidRequest("request", f"is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise InvalidRequest("request", "must be a JSON object")
    return request


def _pattern_of(request: Any) -> tuple[int, int]:
    fields = request if isinstance(request, dict) else {}
    seed, num_bytes = fields.get("seed"), fields.get("num_bytes")
    if not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise InvalidRequest("start.seed", "must be a number of 32 bits")
    if not isinstance(num_bytes, int) or not 1 <= num_bytes <= MAX_PATTERN_BYTES:
        raise InvalidRequest("start.num_bytes", f"must be in [1, {MAX_PATTERN_BYTES}]")
    return seed, num_bytes


@dataclass(frozen=True, slots=True)
class HostReport:
    """Report of another host."""

    address: str
    name: str
    findings: tuple[Finding, ...]
    clock_ahead_s: float
    """Seconds by which its clock is ahead."""
    clock_within_s: float
    """Accuracy of that: half of the fastest answer's time."""

    def judge_clock(self) -> Finding:
        offset = f"{self.address}: {1e3 * self.clock_ahead_s:+.1f} ms, to within {1e3 * self.clock_within_s:.1f} ms"
        if abs(self.clock_ahead_s) - self.clock_within_s > MAX_SKEW_S:
            return Finding("clock", "warning", offset, "run chrony or another NTP client on both hosts")
        return Finding("clock", "ok", offset)


class HostLink(PeerLink):
    """Link to the peer of another host."""

    def __init__(self, address: str, member: MemberIdentity | None) -> None:
        self.address = address
        self._channel = channel(address, member)
        self._call: Any = self._channel.stream_stream(METHOD)()

    async def examine(self, seed: int, num_bytes: int) -> HostReport:
        """Return the host's report; its peer starts after that.

        Raises PeerGone.
        """
        try:
            async with asyncio.timeout(REACH_S):
                reply = await self.receive()
                rounds = [await self._ask_clock() for _ in range(CLOCK_ROUNDS)]
        except TimeoutError:
            raise PeerGone(f"{self.address} did not answer within {REACH_S:g} s") from None
        await self.send({"start": {"seed": seed, "num_bytes": num_bytes}})
        within_s, ahead_s = min(rounds)
        findings = tuple(Finding(**finding) for finding in reply["findings"])
        return HostReport(self.address, reply["host"], findings, ahead_s, within_s)

    async def _ask_clock(self) -> tuple[float, float]:
        """Return accuracy and lead of the other clock, in seconds."""
        asked_at = time.time()
        await self.send({"clock": True})
        theirs = (await self.receive())["clock"]
        half_s = (time.time() - asked_at) / 2
        return half_s, theirs - asked_at - half_s

    async def send(self, message: dict[str, Any]) -> None:
        try:
            await self._call.write(json.dumps(message).encode())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise PeerGone(self._why(error)) from None

    async def receive(self) -> dict[str, Any]:
        try:
            raw = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise PeerGone(self._why(error)) from None
        if raw is grpc.aio.EOF:
            raise PeerGone(f"{self.address} ended the examination")
        message: dict[str, Any] = json.loads(raw)
        if message.pop("gone", False):
            raise PeerGone(f"{self.address}: {message['error']}")
        return message

    async def stop(self) -> None:
        self._call.cancel()
        await self._channel.close()

    def _why(self, error: Exception) -> str:
        reason = str(from_rpc_error(error)) if isinstance(error, grpc.aio.AioRpcError) else "the stream is over"
        return f"{self.address}: {reason}"


async def listen(
    service: DoctorService, member: MemberIdentity | None, host: str, port: int, say: Callable[[str], object]
) -> None:
    """Listen until cancelled; `say` prints the address.

    Raises StartError.
    """
    server = Server(member.credentials if member else None)
    service.add_to(server.grpc)
    bound = await server.start(host, port, [SERVICE], "listen")
    try:
        await server.mark_serving(lambda: True)
        say(f"{host}:{bound}")
        await asyncio.Event().wait()
    finally:
        await server.stop(0.0)


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
    await all_of(peer.prepare() for peer in peers)
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
