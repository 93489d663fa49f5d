"""Main memory that other processes of this host may map, and then read as they read their own.

It is a file without a name, in no folder: it costs what ordinary memory does, and is there as long as somebody has it
open or mapped. Nobody can make it smaller, so whoever has mapped it never meets memory that went away. It is known by a
secret behind what it holds, so that nothing else is mistaken for it that has its number later.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.errors import TransferError

SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class FileAddress:
    """Which file of a process it is."""

    descriptor: int
    """That process's."""
    secret: bytes

    def fields(self) -> dict[str, Any]:
        """Of an endpoint."""
        return {"descriptor": self.descriptor, "secret": self.secret.hex()}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "FileAddress":
        """What `fields` gave. Raises ValueError, KeyError or TypeError."""
        descriptor, secret = fields["descriptor"], bytes.fromhex(fields["secret"])
        if type(descriptor) is not int or not 0 <= descriptor < 1 << 31 or len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret of {len(secret)} bytes in file {descriptor!r}")
        return cls(descriptor, secret)


class MemoryFile:
    """Of this process. Its descriptor is closed with the last who knows of it."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError where there is no such thing, or not so much memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory files")
        # A file may be larger than memory, and who writes it then is killed: so ask for as much in the ordinary way.
        mmap.mmap(-1, num_bytes + SECRET_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        descriptor = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, num_bytes + SECRET_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = mmap.mmap(descriptor, num_bytes + SECRET_BYTES)
        with contextlib.suppress(AttributeError, OSError):  # a system or a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)  # of no effect where `shmem_enabled` is `never`
        self.address = FileAddress(descriptor, secrets.token_bytes(SECRET_BYTES))
        mapped[num_bytes:] = self.address.secret
        self.memory: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)[:num_bytes]
        """Zeroed; physical memory is taken when it is first written or, unlike ordinary memory, read."""


class MappedFile:
    """A file of another process of this host, to be read."""

    def __init__(self, pid: int, file: FileAddress, num_bytes: int) -> None:
        """Raises OSError when it may not be opened, TransferError when it is not the one."""
        # Whatever has that number by now: a named pipe would have us wait, a terminal become ours.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(f"/proc/{pid}/fd/{file.descriptor}", flags)
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise TransferError(f"file {file.descriptor} of process {pid} might become smaller")
            if os.fstat(descriptor).st_size != num_bytes + SECRET_BYTES:
                raise TransferError(f"file {file.descriptor} of process {pid} is not one of {num_bytes} bytes")
            self._mapped = mmap.mmap(descriptor, num_bytes + SECRET_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        if self._mapped[num_bytes:] != file.secret:
            raise TransferError(f"file {file.descriptor} of process {pid} is another one by now")
        self.base = int(np.frombuffer(self._mapped, np.uint8).ctypes.data)
        """Address of its first byte, in this process, as long as this object is there."""
