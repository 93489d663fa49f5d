"""Contract of every transport; `tests/integration/test_transport_contract.py` holds each to it.

A transport moves bytes from a peer's pool into this process's own pool, and never the other way: only a process writes
its own memory. The transport does not know what the bytes mean.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.fingerprint import Folding
from kvtransfer.memory_file import MemoryFile

Found = NDArray[np.uint64] | None
"""Fingerprints of the parts that a read brought, or None where the transport did not compute any."""
Read = Future[Found]

MAX_POSTED_BYTES = 8 << 20
"""Largest amount posted per peer at a time into main memory, and largest read. No transport can abort a posted read, so
this much memory at most stays untouchable when a peer falls silent."""
READ_BYTES = 2 << 20
"""Recommended size of a read into main memory: its bytes are still in the CPU's cache when they are verified, and over
a network several reads are posted at a time."""
READ_BYTES_ON_GPU = 32 << 20
"""Recommended size of a read into a GPU's memory. A read of one block takes 0.2 ms on an H100, in which a link of 40 to
100 GB/s moves 8 to 20 MiB: larger reads hide that. Much larger ones would delay the verification of the first bytes
and the turns of other flows."""
MAX_POSTED_BYTES_ON_GPU = 64 << 20
"""MAX_POSTED_BYTES for a GPU's memory: while one read ends and the next is posted, another keeps the link busy. A GPU's
pool has tens of GiB, of which a silent peer keeps a fraction of a percent."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of `length` bytes from `remote_offset` in the peer's pool to `local_offset` in the own pool."""

    local_offset: int
    remote_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Registered memory of one process: contiguous uint8 [num_blocks, block_bytes]."""

    memory: NDArray[np.uint8]
    file: MemoryFile | None = None
    """Memory file that holds the memory from its beginning on, where other processes of this host may map it."""

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    @property
    def num_blocks(self) -> int:
        return len(self.memory)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Registered memory of one process on a GPU: `num_blocks` contiguous blocks of `block_bytes` from `address`.

    A transport accepts it only where its `register` says so. `owner` keeps the memory alive while the transport may
    touch it.
    """

    address: int
    num_blocks: int
    block_bytes: int
    device: int
    """CUDA device number within this process."""
    owner: Any = None

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


AnyPool = Pool | DevicePool


class Peer(ABC):
    """A connected peer, valid until it is dropped or its transport is closed."""

    name: str

    @property
    @abstractmethod
    def lanes(self) -> tuple[str, ...]:
        """Lanes that bytes really travel over, such as "posix/memory"; empty before the first read."""


class Transport(ABC):
    """A transport: one per process and tensor-parallel rank.

    Thread-safe.

    Life cycle: `register` once, then `connect` and `read`, then `close`. After `close` no read is in flight and no
    memory of the pool is touched any more.
    """

    name: str
    on_gpu = False
    """Whether the own pool is in a GPU's memory; `register` sets it."""

    @property
    def max_posted_bytes(self) -> int:
        """Largest amount posted per peer at a time, and largest read: by the memory that reads write into."""
        return MAX_POSTED_BYTES_ON_GPU if self.on_gpu else MAX_POSTED_BYTES

    def blocks_per_read(self, block_bytes: int, peer: Peer | None = None) -> int:
        """Return the best number of blocks per read of `peer`, once the pool is registered.

        Raises ValueError for blocks larger than a read.
        """
        read_bytes = READ_BYTES_ON_GPU if self.on_gpu else READ_BYTES
        return max(1, min(read_bytes // block_bytes, max_blocks_per_read(block_bytes, self.max_posted_bytes)))

    @abstractmethod
    def register(self, pool: AnyPool) -> bytes:
        """Make the pool readable by others and writable by own reads.

        Returns the endpoint: opaque bytes that a peer passes to its `connect`. The pool must outlive the transport.
        Raises TransportUnavailable for a kind of memory that this transport does not reach.
        """

    @abstractmethod
    def connect(self, endpoint: bytes) -> Peer:
        """Prepare reads from the process that made `endpoint`.

        Connecting again returns the same peer, until it is dropped. Does not wait for the peer: its absence may show at
        the first read only. Raises EndpointMismatch when the endpoint belongs to another transport, PeerGone when the
        process is gone.
        """

    @abstractmethod
    def read(self, peer: Peer, spans: Sequence[Span], flow: Hashable = None, folding: Folding | None = None) -> Read:
        """Queue one read of at most `max_posted_bytes`; no more is posted per peer at a time.

        Reads of one `flow`, such as a request, are posted in order. Flows of one peer take turns, one read each, so no
        flow waits for all of another's; a new flow comes after the present ones.

        The spans are consecutive whole parts of `folding`. A transport that sees the bytes pass may fingerprint them
        while it writes them; its result is then the fingerprints of all parts, in order. Otherwise the result is None.

        The future's `cancel()` returns True only before the read is posted. From then on the destination belongs to the
        transport until the future is done, with a result or with a TransferError. Callbacks of the future run on the
        transport's thread, or on the one that closes it, and must not block. After `close` the future is failed. Raises
        ValueError for spans outside either pool.
        """

    @abstractmethod
    def drop(self, peer: Peer) -> None:
        """Forget a departed peer, with all that is kept for it.

        Dropping it again does nothing.

        Queued reads are cancelled. The destination of a posted read stays the transport's until the read is quiet, and
        what the read needs is kept until then. Later reads of this peer fail with PeerGone; `connect` returns a new
        peer.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop.

        Queued reads are cancelled; reads in flight fail once they are quiet.
        """


def check_spans(spans: Sequence[Span], local_bytes: int, remote_bytes: int, max_bytes: int) -> None:
    """Raise ValueError for spans outside either pool, or for more than `max_bytes` together."""
    for span in spans:
        if span.length <= 0 or span.local_offset < 0 or span.remote_offset < 0:
            raise ValueError(f"invalid span {span}")
        if span.local_offset + span.length > local_bytes:
            raise ValueError(f"{span} ends beyond the local pool of {local_bytes} bytes")
        if span.remote_offset + span.length > remote_bytes:
            raise ValueError(f"{span} ends beyond the peer's pool of {remote_bytes} bytes")
    total = sum(span.length for span in spans)
    if not 0 < total <= max_bytes:
        raise ValueError(f"a read carries 1 to {max_bytes} bytes, not {total}")


def max_blocks_per_read(block_bytes: int, max_bytes: int) -> int:
    """Return how many whole blocks a read of at most `max_bytes` may carry.

    Raises ValueError when one block is larger.
    """
    if block_bytes > max_bytes:
        raise ValueError(f"a block of {block_bytes} bytes is larger than one read, {max_bytes}")
    return max_bytes // block_bytes
