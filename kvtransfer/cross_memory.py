"""Reads from main memory of another process on this host: mapped, or by Linux's cross-memory attach.

UCX's lanes `posix` and `cma` do the same, with two differences. Fingerprints are computed while the bytes pass, which
costs less than a second read. And a process is identified by a secret and a pidfd, so a later process with the same pid
is never taken for it.

Memory is mapped where its owner keeps it in a memory file. A CPU can then prefetch across pages, which it cannot where
the kernel copies page by page.
"""

import contextlib
import ctypes
import logging
import os
import secrets
import select
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from errno import ESRCH
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.errors import PeerGone, TransferError
from kvtransfer.fingerprint import WORD_BYTES, Folding
from kvtransfer.memory_file import SECRET_BYTES, FileAddress, MappedFile
from kvtransfer.native.compiler import NotCompiled, load_library
from kvtransfer.transport import Span

MAPPED, ATTACHED = "posix/memory", "cma/memory"
"""Lane names as UCX writes them."""
_NAMES = {MAPPED: frozenset({"all", "posix", "mm", "shm", "sm"}), ATTACHED: frozenset({"all", "cma", "shm", "sm"})}
"""Names in UCX_TLS that permit each lane."""
Native = Callable[..., int]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """Address of a process, with a proof that it is still the same process."""

    host: str
    """Host, and the pid namespace in which `pid` is valid."""
    pid: int
    secret_at: int
    secret: bytes

    def fields(self) -> dict[str, Any]:
        """Return the fields of an endpoint."""
        return {"host": self.host, "pid": self.pid, "secret_at": self.secret_at, "secret": self.secret.hex()}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "ProcessAddress":
        """Parse the result of `fields`.

        Raises ValueError, KeyError or TypeError.
        """
        host, pid, secret_at = fields["host"], fields["pid"], fields["secret_at"]
        secret = bytes.fromhex(fields["secret"])
        if type(host) is not str or type(pid) is not int or not 0 < pid < 1 << 31:
            raise ValueError(f"no valid process: pid {pid!r} on host {host!r}")
        if type(secret_at) is not int or not 0 < secret_at < 1 << 63 or len(secret) != SECRET_BYTES:
            raise ValueError(f"no valid secret: {len(secret)} bytes at address {secret_at!r}")
        return cls(host, pid, secret_at, secret)


@dataclass(frozen=True, slots=True)
class FilePool:
    """Pool memory in a file of its owner, at addresses [base, base + num_bytes) of that process."""

    file: FileAddress
    base: int
    num_bytes: int


class Attached:
    """Another process of this host whose memory this process may read.

    From any thread.
    """

    def __init__(self, process: ProcessAddress, native: Native, pool: FilePool | None = None) -> None:
        """Attach to `pool` only, or without one to all memory of the process.

        Raises OSError when the process has ended, TransferError when the pool is not there. Without a pool the caller
        must check by `reads` that this is the intended process.
        """
        self._pid = process.pid
        self.name = f"process {process.pid} ({process.secret.hex()})"
        """Name that no other process of this host has or will have."""
        self._pidfd = os.pidfd_open(process.pid)  # taken first: later checks are then about this very process
        weakref.finalize(self, os.close, self._pidfd)
        self.native = native
        self._pool = pool
        self._mapped: MappedFile | None = None
        if pool is not None:
            self._mapped = MappedFile(process.pid, pool.file, pool.num_bytes)
            _endings().watch(self._pidfd, self)
        self.lanes: tuple[str, ...] = ()
        """Lane that bytes travelled over; empty before the first read."""

    def read(self, spans: Sequence[Span], folding: Folding | None = None) -> NDArray[np.uint64] | None:
        """Copy `spans`, whose offsets are addresses in both processes.

        With a `folding`, of which the spans must be whole multiples, return the fingerprint of each part in order.
        Raises PeerGone when the process has ended, TransferError when its memory is not there, ValueError for spans
        that are no whole parts.
        """
        flat = array("q", [value for span in spans for value in (span.local_offset, span.remote_offset, span.length)])
        fingerprints = None
        of: tuple[Any, ...] = (0, None, 0, None, 0, None)
        if folding is not None:
            part_bytes = folding.num_words * WORD_BYTES
            if any(span.length % part_bytes for span in spans):
                raise ValueError(f"spans must be whole parts of {part_bytes} bytes, not {spans}")
            fingerprints = np.empty(sum(span.length for span in spans) // part_bytes, np.uint64)
            of = (*folding.arguments, fingerprints.ctypes.data)
        error = self._copy(flat.buffer_info()[0], len(spans), *of)
        if error == ESRCH or self._has_ended():
            raise PeerGone(f"process {self._pid} has ended")
        if error:
            raise TransferError(f"the memory of process {self._pid} cannot be read: {os.strerror(error)}")
        self.lanes = (ATTACHED if self._pool is None else MAPPED,)
        return fingerprints

    def _copy(self, *what: Any) -> int:
        """Copy by native code; return 0 or an errno.

        Raises nothing: a traceback would keep the mapping alive.
        """
        if self._pool is None:
            return self.native(self._pid, 0, *what)
        mapped = self._mapped  # `let_go` may clear it meanwhile
        if mapped is None or self._has_ended():
            return ESRCH
        return self.native(0, mapped.base - self._pool.base, *what)

    def reads(self, address: int, expected: bytes) -> bool:
        """Return whether memory at `address` equals `expected`.

        Raises TransferError.
        """
        buffer = ctypes.create_string_buffer(len(expected))
        self.read([Span(ctypes.addressof(buffer), address, len(expected))])
        self.lanes = ()
        return buffer.raw == expected

    def let_go(self) -> None:
        """Unmap the memory of an ended process, which the mapping would keep allocated."""
        if self._has_ended():
            self._mapped = None

    def _has_ended(self) -> bool:
        """Return whether the process has ended; its pid is not reused before that."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))


class _Endings:
    """Thread that unmaps memory of processes when they end."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watching: dict[int, weakref.ref[Attached]] = {}
        threading.Thread(target=self._run, name="endings", daemon=True).start()

    def watch(self, pidfd: int, attached: Attached) -> None:
        """Watch for the end of a process until `pidfd` is closed."""
        self._watching[pidfd] = weakref.ref(attached)
        self._poll.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)

    def _run(self) -> None:
        while True:
            for pidfd, _ in self._poll.poll():
                # the descriptor may have been reused: `let_go` checks
                if (attached := self._watching[pidfd]()) is not None:
                    attached.let_go()
                del attached  # otherwise this thread would keep it until the next process ends


@cache
def _endings() -> _Endings:
    return _Endings()


@cache
def own_address() -> ProcessAddress | None:
    """Return this process's address for others on this host, or None where they cannot reach its memory."""
    if (host := _this_host()) is None or not hasattr(os, "pidfd_open"):
        return None
    return ProcessAddress(host, os.getpid(), ctypes.addressof(_secret), _secret.raw)


def prepare() -> None:
    """Compile and load the reader and start the watching thread, so that no read waits for either."""
    compiled()
    _endings()


def attach(
    process: ProcessAddress, pool: FilePool | None = None, allows: Callable[[str], bool] = lambda lane: True
) -> Attached | None:
    """Attach to a process: to its `pool` if that can be mapped, otherwise to all its memory.

    Returns None when its memory cannot be read from here: another host or container, no permission, a lane excluded by
    UCX's environment or by `allows`, no compiler, or a process that has ended.
    """
    own = own_address()
    if own is None or process.host != own.host:
        return None
    lanes = [lane for lane in (MAPPED, ATTACHED) if allows(lane) and _wanted_by(os.environ, lane)]
    if not lanes or (native := compiled()) is None:
        return None
    with contextlib.suppress(OSError, TransferError):
        if MAPPED in lanes and pool is not None:
            return Attached(process, native, pool)
    with contextlib.suppress(OSError, TransferError):
        if ATTACHED in lanes and (attached := Attached(process, native)).reads(process.secret_at, process.secret):
            return attached
    return None


_secret = ctypes.create_string_buffer(secrets.token_bytes(SECRET_BYTES), SECRET_BYTES)


@cache
def _this_host() -> str | None:
    if sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _wanted_by(environment: Mapping[str, str], lane: str) -> bool:
    """Return whether UCX's environment permits this lane."""
    transports, devices = environment.get("UCX_TLS", "all"), environment.get("UCX_SHM_DEVICES", "all")
    names = {name.removeprefix("\\") for name in transports.removeprefix("^").split(",")}
    named = bool(names & _NAMES[lane])
    return named is not transports.startswith("^") and bool({"all", "memory"} & set(devices.split(",")))


@cache
def compiled() -> Native | None:
    """Return the compiled reader; None without a compiler."""
    try:
        function = load_library(Path(__file__).with_name("native") / "cross_memory.cpp").tandem_read_memory
    except (NotCompiled, OSError) as error:
        log.warning("memory of other processes is read by NIXL, and checked afterwards: %s", error)
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [ctypes.c_int, long, pointer, long, long, pointer, long, pointer, ctypes.c_uint64, pointer]
    function.restype = ctypes.c_int
    return function
