"""Reads from the main memory of another process on this host, by Linux's cross-memory attach.

It is what UCX's `cma` lane does, with two differences. Fingerprints are made of the bytes as they pass, which costs
next to nothing where reading them again costs a quarter of the copy. And a process is known by a secret in its memory
and a pidfd, so that one which ended is never mistaken for another that has its number now.
"""

import ctypes
import logging
import os
import secrets
import select
import sys
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
from kvtransfer.native.compiler import NotCompiled, load_library
from kvtransfer.transport import Span

LANE = "cma/memory"
"""As UCX calls it."""
SECRET_BYTES = 16
_NAMES_OF_IT = frozenset({"all", "cma", "shm", "sm"})
"""In UCX_TLS."""
Native = Callable[..., int]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """Where a process is, and how to know that it is still the one that said so."""

    host: str
    """The host, and the namespace in which `pid` is its number."""
    pid: int
    secret_at: int
    secret: bytes

    def fields(self) -> dict[str, Any]:
        """Of an endpoint."""
        return {"host": self.host, "pid": self.pid, "secret_at": self.secret_at, "secret": self.secret.hex()}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "ProcessAddress":
        """What `fields` gave. Raises ValueError, KeyError or TypeError."""
        host, pid, secret_at = fields["host"], fields["pid"], fields["secret_at"]
        secret = bytes.fromhex(fields["secret"])
        if type(host) is not str or type(pid) is not int or not 0 < pid < 1 << 31:
            raise ValueError(f"process {pid!r} on {host!r}")
        if type(secret_at) is not int or not 0 < secret_at < 1 << 63 or len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret of {len(secret)} bytes at {secret_at!r}")
        return cls(host, pid, secret_at, secret)


class Attached:
    """Another process of this host, whose memory this one may read. From any thread."""

    def __init__(self, address: ProcessAddress, pidfd: int, native: Native) -> None:
        self._pid = address.pid
        self._native = native
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)
        self.lanes: tuple[str, ...] = ()
        """What the bytes travelled over; empty before the first read."""

    def read(self, spans: Sequence[Span], folding: Folding | None = None) -> NDArray[np.uint64] | None:
        """Copy `spans`, whose offsets are addresses here and there. With a `folding`, of which they are whole parts:
        the fingerprint of each part, in order.

        Raises PeerGone when the process has ended, TransferError when its memory is not there, ValueError for spans
        that are no whole parts.
        """
        flat = array("q", [value for span in spans for value in (span.local_offset, span.remote_offset, span.length)])
        found = None
        of: tuple[Any, ...] = (0, None, 0, None, 0, None)
        if folding is not None:
            part_bytes = folding.num_words * WORD_BYTES
            if any(span.length % part_bytes for span in spans):
                raise ValueError(f"spans of whole parts of {part_bytes} bytes, not {spans}")
            found = np.empty(sum(span.length for span in spans) // part_bytes, np.uint64)
            of = (*folding.arguments, found.ctypes.data)
        error = self._native(self._pid, flat.buffer_info()[0], len(spans), *of)
        if error == ESRCH or self._has_ended():
            raise PeerGone(f"process {self._pid} has ended")
        if error:
            raise TransferError(f"the memory of process {self._pid} cannot be read: {os.strerror(error)}")
        self.lanes = (LANE,)
        return found

    def _has_ended(self) -> bool:
        """Until it has, nobody else gets its number."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))


@cache
def own_address() -> ProcessAddress | None:
    """Of this process, for others on this host; None where they cannot reach its memory anyway."""
    if (host := _this_host()) is None or not hasattr(os, "pidfd_open"):
        return None
    return ProcessAddress(host, os.getpid(), ctypes.addressof(_secret), _secret.raw)


def prepare() -> None:
    """Compile and load what reads, which takes a while once per machine, so that nobody waits for it later."""
    _compiled()


def attach(address: ProcessAddress) -> Attached | None:
    """None when its memory cannot be read from here: on another host or in another container, not permitted, excluded
    by UCX's environment, no compiler, or a process that has ended."""
    own = own_address()
    if own is None or address.host != own.host or not _wanted_by(os.environ) or (native := _compiled()) is None:
        return None
    try:
        pidfd = os.pidfd_open(address.pid)
    except OSError:
        return None
    attached = Attached(address, pidfd, native)
    secret = ctypes.create_string_buffer(SECRET_BYTES)
    try:
        attached.read([Span(ctypes.addressof(secret), address.secret_at, SECRET_BYTES)])
    except TransferError:
        return None
    if secret.raw != address.secret:
        return None
    attached.lanes = ()
    return attached


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


def _wanted_by(environment: Mapping[str, str]) -> bool:
    """UCX would use its `cma`, too, as far as its user says there."""
    transports, devices = environment.get("UCX_TLS", "all"), environment.get("UCX_SHM_DEVICES", "all")
    names = {name.removeprefix("\\") for name in transports.removeprefix("^").split(",")}
    named = bool(names & _NAMES_OF_IT)
    return named is not transports.startswith("^") and bool({"all", "memory"} & set(devices.split(",")))


@cache
def _compiled() -> Native | None:
    try:
        function = load_library(Path(__file__).with_name("native") / "cross_memory.cpp").tandem_read_memory
    except (NotCompiled, OSError) as error:
        log.warning("memory of other processes is read by NIXL, and checked afterwards: %s", error)
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [ctypes.c_int, pointer, long, long, pointer, long, pointer, ctypes.c_uint64, pointer]
    function.restype = ctypes.c_int
    return function
