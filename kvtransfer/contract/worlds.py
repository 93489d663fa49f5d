"""Readers, and lenders to read from, for the tests in `suite.py`.

The reader lives in the process of the tests; lenders are processes of their own, running `lender.py`.
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

from kvtransfer.registry import open_transport
from kvtransfer.transport import Peer, Pool, Read, Span, Transport

BLOCK = 4096
LENDER_BLOCKS = 48
READER_BLOCKS = 64
TIMEOUT_S = 20.0
UNTOUCHED = 0xEE
HOLDING_READS = 16
"""Reads that are queued to catch the thread that posts in the callback of one of them."""

Bytes = NDArray[np.uint8]


def contents(seed: int, num_bytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"waited in vain until {what}"
        time.sleep(0.002)


class Lender(ABC):
    """Lender to read from, with the contents of its pool as `data`."""

    endpoint: bytes
    data: Bytes

    @abstractmethod
    def kill(self) -> None:
        """Its process ends, at once."""


class ProcessLender(Lender):
    """A real process; it dies with this one."""

    count: ClassVar[int] = 0

    def __init__(self, seed: int, num_bytes: int = LENDER_BLOCKS * BLOCK, transport: str = "nixl", **env: str) -> None:
        ProcessLender.count += 1
        name = f"lender-{os.getpid()}-{ProcessLender.count}"
        self.data = contents(seed, num_bytes)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtransfer.contract.lender", name, str(seed), str(num_bytes), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | env,
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
    another_format: bytes = json.dumps({"format": "tandem-none-0"}).encode()
    """Endpoint of another version or transport."""

    def __init__(self, num_bytes: int = READER_BLOCKS * BLOCK) -> None:
        self.memory: Bytes = np.full(num_bytes, UNTOUCHED, np.uint8)
        self.pool = Pool(self.memory.reshape(1, -1))

    @abstractmethod
    def lender(self, number: int) -> Lender:
        """Return a lender that lives as long as the tests."""

    @abstractmethod
    def mortal(self) -> Lender:
        """Return a lender of this test's own, to be killed."""

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


class ProcessWorld(World):
    """World of a transport between processes, which `transport` names."""

    transport: ClassVar[str]
    count: ClassVar[int] = 0

    def __init__(self, lenders: list[ProcessLender], num_bytes: int = READER_BLOCKS * BLOCK, **env: str) -> None:
        """Open the reader; `env` is the environment of lenders that are started later."""
        super().__init__(num_bytes)
        self._lenders = lenders
        self._mortals: list[Lender] = []
        self._env = env
        self.reader = self.open()
        self.reader.register(self.pool)

    def open(self) -> Transport:
        """Open a reader of this transport."""
        ProcessWorld.count += 1
        return open_transport(self.transport, f"reader-{os.getpid()}-{ProcessWorld.count}")

    def lender(self, number: int) -> Lender:
        return self._lenders[number]

    def mortal(self) -> Lender:
        self._mortals.append(ProcessLender(99, LENDER_BLOCKS * BLOCK, self.transport, **self._env))
        return self._mortals[-1]

    def done(self, future: Read) -> None:
        future.result(TIMEOUT_S)

    def hold(self, peer: Peer, own_offset: int, hold: Callable[[], None]) -> None:
        """Have the thread that posts call `hold`, after it wrote the first block of `peer` at `own_offset`.

        A callback of a read runs on that thread, unless the read was done before it got its callback.
        """
        here = threading.get_ident()
        called: list[bool] = []

        def once(_: Read) -> None:
            if threading.get_ident() != here and not called:
                called.append(True)
                hold()

        give_up_at = time.monotonic() + TIMEOUT_S
        while not called:
            assert time.monotonic() < give_up_at, "no callback of a read ran on the transport's thread"
            reads = [self.reader.read(peer, [Span(own_offset, 0, BLOCK)]) for _ in range(HOLDING_READS)]
            reads[-1].add_done_callback(once)
            wait_until(lambda last=reads[-1]: bool(called) or last.done(), "the reads are done")  # type: ignore[misc]

    @contextmanager
    def held(self, peer: Peer, own_offset: int) -> Iterator[None]:
        """Keep the thread that posts busy within the block."""
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
