"""Main memory that other processes of this host can map and then read like their own.

The memory is an unnamed file. It costs what ordinary memory costs, and exists while a process has it open or mapped.
It cannot shrink, so a mapping never loses pages. A secret behind the contents identifies it, so a file that later gets
the same descriptor number is not taken for it.
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
from kvtransfer.hardware.main_memory import check_fits

SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class FileAddress:
    """Address of a memory file within a process."""

    descriptor: int
    """File descriptor number in the owning process."""
    secret: bytes

    def fields(self) -> dict[str, Any]:
        """Return the fields of an endpoint."""
        return {"descriptor": self.descriptor, "secret": self.secret.hex()}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "FileAddress":
        """Parse the result of `fields`.

        Raises ValueError, KeyError or TypeError.
        """
        descriptor, secret = fields["descriptor"], bytes.fromhex(fields["secret"])
        if type(descriptor) is not int or not 0 <= descriptor < 1 << 31 or len(secret) != SECRET_BYTES:
            raise ValueError(f"no valid secret: {len(secret)} bytes in file {descriptor!r}")
        return cls(descriptor, secret)


class MemoryFile:
    """Memory file of this process.

    Its descriptor closes with the last reference.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate the file.

        Raises OSError where the system has no such files, or not enough memory.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory files")
        check_fits(num_bytes)
        # A file may be larger than what a system that does not overcommit gives: so allocate as much the ordinary way.
        mmap.mmap(-1, num_bytes + SECRET_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        descriptor = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, num_bytes + SECRET_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = mmap.mmap(descriptor, num_bytes + SECRET_BYTES)
        with contextlib.suppress(AttributeError, OSError):  # systems and kernels without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)  # no effect where `shmem_enabled` is `never`
        self.address = FileAddress(descriptor, secrets.token_bytes(SECRET_BYTES))
        mapped[num_bytes:] = self.address.secret
        self.memory: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)[:num_bytes]
        """Zeroed memory. Pages are allocated at the first write or, unlike ordinary memory, the first read."""


class MappedFile:
    """Memory file of another process of this host, mapped for reading."""

    def __init__(self, pid: int, file: FileAddress, num_bytes: int) -> None:
        """Map the file.

        Raises OSError when it may not be opened, TransferError when it is another file.
        """
        # The number may belong to another file by now: a named pipe would block, a terminal become ours.
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
            raise TransferError(f"file {file.descriptor} of process {pid} was replaced by another file")
        self.base = int(np.frombuffer(self._mapped, np.uint8).ctypes.data)
        """Address of the first byte in this process, valid as long as this object exists."""
