"""Readers, and lenders to read from, of every transport: what `tests/integration/test_transport_contract.py` is about.

`local` runs within this process, stepped by hand. `nixl` and `ucxx` read from other processes, over shared memory or,
where a read must be caught in flight, over TCP.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.nixl import NixlTransport
from kvtransfer.nixl_lane import Job
from kvtransfer.transport import Peer, Pool, Read, Span, Transport
from kvtransfer.ucxx import UcxxTransport

BLOCK = 4096
LENDER_BLOCKS = 48
READER_BLOCKS = 64
TIMEOUT_S = 20.0
UNTOUCHED = 0xEE
SCRIPT = Path(__file__).parents[1] / "integration" / "lender_peer.py"

Bytes = NDArray[np.uint8]


def contents(seed: int, num_bytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"waited in vain until {what}"
        time.sleep(0.002)


class Lender(ABC):
    """Somebody to read from: `data` is what its pool holds."""

    endpoint: bytes
    data: Bytes

    @abstractmethod
    def kill(self) -> None:
        """Its process ends, at once."""


class LocalLender(Lender):
    def __init__(self, network: LocalNetwork, name: str, seed: int) -> None:
        self.data = contents(seed, LENDER_BLOCKS * BLOCK)
        self._transport = LocalTransport(network, name)
        self.endpoint = self._transport.register(Pool(self.data.copy().reshape(LENDER_BLOCKS, BLOCK)))

    def kill(self) -> None:
        self._transport.close()


class ProcessLender(Lender):
    """A real process; it dies with this one."""

    count: ClassVar[int] = 0

    def __init__(self, seed: int, num_bytes: int = LENDER_BLOCKS * BLOCK, transport: str = "nixl", **env: str) -> None:
        ProcessLender.count += 1
        name = f"lender-{os.getpid()}-{ProcessLender.count}"
        self.data = contents(seed, num_bytes)
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(seed), str(num_bytes), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])} | env,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the lender did not start"
        self.endpoint = json.loads(line)["endpoint"].encode()

    def stop(self) -> None:
        """SIGSTOP, and wait until it is in force for every thread."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        wait_until(
            lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()),
            "the lender is stopped",
        )

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def start_lenders(transport: str, **env: str) -> Iterator[list[ProcessLender]]:
    """Two processes for all tests that do them no harm."""
    started = [ProcessLender(number, LENDER_BLOCKS * BLOCK, transport, **env) for number in range(2)]
    yield started
    for lender in started:
        lender.kill()


class World(ABC):
    """A reader, its memory, and lenders to read from."""

    reader: Transport
    another_format: bytes
    """An endpoint of another version or transport."""

    def __init__(self, num_bytes: int = READER_BLOCKS * BLOCK) -> None:
        self.memory: Bytes = np.full(num_bytes, UNTOUCHED, np.uint8)
        self.pool = Pool(self.memory.reshape(1, -1))

    @abstractmethod
    def lender(self, number: int) -> Lender:
        """A lender that lives as long as the tests."""

    @abstractmethod
    def mortal(self) -> Lender:
        """A lender of this test's own, to be killed."""

    @abstractmethod
    def done(self, future: Read) -> None:
        """Wait for it; raises what it failed with."""

    @abstractmethod
    def held(self, peer: Peer, own_offset: int) -> AbstractContextManager[None]:
        """Nothing is posted meanwhile. Writes the first block of `peer` at `own_offset`."""

    def untouched(self, first: int = 0, end: int | None = None) -> bool:
        return bool((self.memory[first:end] == UNTOUCHED).all())

    def close(self) -> None:
        self.reader.close()


class LocalWorld(World):
    another_format = b"nixl:whatever"

    def __init__(self) -> None:
        super().__init__()
        self._network = LocalNetwork()
        self._lenders: dict[int, Lender] = {}
        self.reader: LocalTransport = LocalTransport(self._network, "reader", eager=False)
        self.reader.register(self.pool)

    def lender(self, number: int) -> Lender:
        if number not in self._lenders:
            self._lenders[number] = LocalLender(self._network, f"lender-{number}", seed=number)
        return self._lenders[number]

    def mortal(self) -> Lender:
        return self.lender(99)

    def done(self, future: Read) -> None:
        while not future.done():
            assert self.reader.step()
        future.result(0)

    @contextmanager
    def held(self, peer: Peer, own_offset: int) -> Iterator[None]:
        self.done(self.reader.read(peer, [Span(own_offset, 0, BLOCK)]))
        yield


class ProcessWorld(World):
    """Lenders are other processes."""

    transport: ClassVar[str]

    def __init__(self, lenders: list[ProcessLender], num_bytes: int = READER_BLOCKS * BLOCK, **env: str) -> None:
        """`env`: of lenders that are started later; the reader lives in this process's."""
        super().__init__(num_bytes)
        self._lenders = lenders
        self._mortals: list[Lender] = []
        self._env = env
        self.reader = self.open()
        self.reader.register(self.pool)

    @abstractmethod
    def open(self) -> Transport:
        """A reader of this transport."""

    def lender(self, number: int) -> Lender:
        return self._lenders[number]

    def mortal(self) -> Lender:
        self._mortals.append(ProcessLender(99, LENDER_BLOCKS * BLOCK, self.transport, **self._env))
        return self._mortals[-1]

    def done(self, future: Read) -> None:
        future.result(TIMEOUT_S)

    @abstractmethod
    def hold(self, peer: Peer, own_offset: int, hold: Callable[[], None]) -> None:
        """Have the thread that posts call `hold`, after it wrote the first block of `peer` at `own_offset`."""

    @contextmanager
    def held(self, peer: Peer, own_offset: int) -> Iterator[None]:
        """The thread that posts is kept busy."""
        reached, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            reached.set()
            go_on.wait(TIMEOUT_S)

        self.hold(peer, own_offset, hold)
        assert reached.wait(TIMEOUT_S)
        try:
            yield
        finally:
            go_on.set()

    def close(self) -> None:
        super().close()
        for lender in self._mortals:
            lender.kill()


class NixlWorld(ProcessWorld):
    transport = "nixl"
    another_format = json.dumps({"format": "tandem-nixl-0", "base": 1, "bytes": 1, "metadata": ""}).encode()
    count: ClassVar[int] = 0
    reader: NixlTransport

    def open(self) -> Transport:
        NixlWorld.count += 1
        return NixlTransport(f"reader-{os.getpid()}-{NixlWorld.count}")

    def hold(self, peer: Peer, own_offset: int, hold: Callable[[], None]) -> None:
        def post_now(job: Job) -> bool:
            """Never on this thread, where a callback of a read that is done would run, too."""
            job.future.add_done_callback(lambda _: hold())
            return False

        self.reader._post_now = post_now  # type: ignore[method-assign]
        self.reader.read(peer, [Span(own_offset, 0, BLOCK)])
        del self.reader._post_now


class UcxxWorld(ProcessWorld):
    transport = "ucxx"
    another_format = json.dumps({"format": "tandem-ucxx-0"}).encode()
    reader: UcxxTransport

    def open(self) -> Transport:
        return UcxxTransport()

    def hold(self, peer: Peer, own_offset: int, hold: Callable[[], None]) -> None:
        self.done(self.reader.read(peer, [Span(own_offset, 0, BLOCK)]))
        self.reader._do(hold)


WORLDS: dict[str, type[ProcessWorld]] = {"nixl": NixlWorld, "ucxx": UcxxWorld}
