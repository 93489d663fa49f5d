"""Peer process of the doctor: `python -m tandem.doctor.peer SPEC`, with the fields of PeerSpec as JSON.

Its pool is a pattern that others read, and as much memory to read theirs into. It prints its endpoint, then answers
each line of JSON on standard input, `{"endpoint": ..., "seed": ...}`, with the result of reading that peer's pattern.
Ends with its standard input, or with its parent.

Links between the doctor and its peers: JSON messages, one answer each.
"""

import asyncio
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.process.tree import die_with_parent
from engine.host.memory import pool_memory
from kvtransfer.errors import TransferError
from kvtransfer.hardware.topology import use_nearest_nics
from kvtransfer.registry import open_transport
from kvtransfer.transport import MAX_POSTED_BYTES, DevicePool, Pool, Span, Transport

READ_TIMEOUT_S = 20.0

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PeerSpec:
    name: str
    seed: int
    """Seed of the pattern."""
    num_bytes: int
    """Bytes of the pattern; the pool is twice as large."""
    transport: str
    host: str
    strict_lanes: tuple[str, ...]
    gpu: bool


def make_pattern(seed: int, num_bytes: int) -> Bytes:
    """Return the pattern of a peer with that seed, [num_bytes]."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


class PatternPool:
    """The pattern [0, num_bytes) and the destination behind it, in main memory or on a GPU."""

    def __init__(self, pattern: Bytes, gpu: bool) -> None:
        self._start = len(pattern)
        if gpu:
            from engine.backends.torch.memory import put_on_gpu

            self.pool: Pool | DevicePool = put_on_gpu(np.concatenate([pattern, np.zeros_like(pattern)]))
        else:
            self.pool = pool_memory(1, 2 * len(pattern), in_file=True)  # like the pool of prefill workers
            self.pool.memory[0, : len(pattern)] = pattern

    def clear(self) -> None:
        """Clear the destination, so that its contents have arrived since."""
        if isinstance(self.pool, Pool):
            self.pool.memory[0, self._start :] = 0
            return
        from engine.backends.torch.memory import clear_on_gpu

        clear_on_gpu(self.pool, self._start)

    def received(self) -> Bytes:
        """Return the destination's contents, [num_bytes]."""
        if isinstance(self.pool, Pool):
            return self.pool.memory[0, self._start :]
        from engine.backends.torch.memory import fetch_from_gpu

        return fetch_from_gpu(self.pool)[self._start :]


def read_pattern(transport: Transport, pool: PatternPool, endpoint: bytes, seed: int, num_bytes: int) -> dict[str, Any]:
    """Read a peer's whole pattern twice, the first time to connect; check it and time the second."""
    peer = transport.connect(endpoint)
    for _ in range(2):
        pool.clear()
        began = time.perf_counter()
        reads = [
            transport.read(peer, [Span(num_bytes + start, start, min(MAX_POSTED_BYTES, num_bytes - start))])
            for start in range(0, num_bytes, MAX_POSTED_BYTES)
        ]
        for read in reads:
            read.result(READ_TIMEOUT_S)
        took_s = time.perf_counter() - began
    wrong = np.flatnonzero(pool.received() != make_pattern(seed, num_bytes))
    return {
        "gigabytes_per_s": num_bytes / took_s / 1e9,
        "lanes": peer.lanes,
        "first_wrong_byte": int(wrong[0]) if len(wrong) else None,
        "wrong_bytes": len(wrong),
    }


def serve(spec: PeerSpec, pattern: Bytes) -> None:
    """Lend `pattern`, and read on command."""
    if spec.gpu:
        use_nearest_nics(os.environ)
    try:
        transport = open_transport(spec.transport, spec.name, spec.host, spec.strict_lanes, spec.gpu)
        pool = PatternPool(pattern, spec.gpu)
        endpoint = transport.register(pool.pool).decode()
    except TransferError as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        return
    _say({"endpoint": endpoint})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _say(read_pattern(transport, pool, request["endpoint"].encode(), request["seed"], spec.num_bytes))
        except TransferError as error:
            _say({"error": f"{type(error).__name__}: {error}"})
        except TimeoutError:
            _say({"error": f"a read was not done within {READ_TIMEOUT_S:g} s"})
    transport.close()


def spec_of(argument: str) -> PeerSpec:
    fields = json.loads(argument)
    return PeerSpec(**fields | {"strict_lanes": tuple(fields["strict_lanes"])})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the doctor decides
    spec = spec_of(sys.argv[1])
    serve(spec, make_pattern(spec.seed, spec.num_bytes))


if __name__ == "__main__":
    main()


LINE_BYTES = 1 << 24


class PeerGone(Exception):
    """The peer sends nothing any more; the message says why."""


class PeerLink(ABC):
    """Link to one peer."""

    @abstractmethod
    async def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises PeerGone.
        """

    @abstractmethod
    async def receive(self) -> dict[str, Any]:
        """Return the peer's next message.

        Raises PeerGone.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the peer."""


class ProcessLink(PeerLink):
    """Link to a process of this host, by its standard input and output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, spec: PeerSpec, command: Sequence[str]) -> "ProcessLink":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command,
            json.dumps(asdict(spec)),
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES,
        )
        return cls(spec.name, process)

    async def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with suppress(ValueError):  # a library's output
                message: dict[str, Any] = json.loads(line)
                return message
        raise PeerGone(f"{self._name} ended with code {await self._process.wait()}")

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
