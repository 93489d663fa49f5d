"""The contract of every transport; `tests/integration/test_transport_contract.py` holds each to it.

A transport moves bytes from a peer's pool into this process's own pool, and never the other way: only a process
writes its own memory. What the bytes mean is not its business.
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
"""What a read found on the way: the fingerprint of each part it brought, or None where it did not look."""
Read = Future[Found]

MAX_POSTED_BYTES = 8 << 20
"""What is posted per peer at a time is never more, nor is a single read: so this much memory at most stays
untouchable when a peer falls silent in mid-read, because no transport can abort what it posted."""
READ_BYTES = 2 << 20
"""A read is best so large: what it brought is still in the CPU's cache when it is checked, and over a network a few of
them are posted at a time."""


@dataclass(frozen=True, slots=True)
class Span:
    """`length` bytes from the peer's pool at `remote_offset` to the own pool at `local_offset`."""

    local_offset: int
    remote_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The registered memory of one process: [num_blocks, block_bytes] of uint8, contiguous."""

    memory: NDArray[np.uint8]
    file: MemoryFile | None = None
    """What the memory is, from its beginning on, where other processes of this host may map it."""

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    @property
    def num_blocks(self) -> int:
        return len(self.memory)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The registered memory of one process on a GPU: `num_blocks` blocks of `block_bytes`, contiguous from `address`.

    A transport takes it only where its `register` says so. `owner` keeps the memory alive for as long as the transport
    may touch it.
    """

    address: int
    num_blocks: int
    block_bytes: int
    device: int
    """CUDA's number of the GPU, as this process counts them."""
    owner: Any = None

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


AnyPool = Pool | DevicePool


class Peer(ABC):
    """A connected peer. Valid until it is dropped, or its transport is closed."""

    name: str

    @property
    @abstractmethod
    def lanes(self) -> tuple[str, ...]:
        """What the bytes really travel over, such as "posix/memory"; empty before the first read."""


class Transport(ABC):
    """One per process (and tensor-parallel rank). Thread-safe.

    Life: `register` once, then `connect` and `read` at will, then `close`. After `close` no read is in flight and
    no memory of the pool is touched any more.
    """

    name: str

    def blocks_per_read(self, block_bytes: int, peer: Peer | None = None) -> int:
        """How many blocks a read, of this `peer`, is best of. Raises ValueError for blocks that no read can carry."""
        return max(1, min(READ_BYTES // block_bytes, max_blocks_per_read(block_bytes)))

    @abstractmethod
    def register(self, pool: AnyPool) -> bytes:
        """Make the pool readable by others and writable by own reads. Returns the endpoint: opaque bytes that a
        peer passes to its `connect`. The pool must outlive the transport.

        Raises TransportUnavailable for memory of a kind that this transport does not reach."""

    @abstractmethod
    def connect(self, endpoint: bytes) -> Peer:
        """Prepare reads from the process that made `endpoint`. Connecting again gives the same peer, until it is
        dropped. Does not wait for the peer: that nobody is there may show at the first read only.

        Raises EndpointMismatch when the endpoint is not this transport's, PeerGone when nobody is there.
        """

    @abstractmethod
    def read(self, peer: Peer, spans: Sequence[Span], flow: Hashable = None, folding: Folding | None = None) -> Read:
        """Queue one read of at most MAX_POSTED_BYTES; so much at most is posted per peer at a time.

        Reads of one `flow`, such as a request, are posted in order; flows of one peer take turns, a read each, so
        that none waits for all of another's. The turn of a flow that comes anew is after those that are there.

        The spans are whole parts of `folding`, one after the other: a transport that sees the bytes pass may
        fingerprint them as it writes them, and then its result is those of all parts, in order. Else it is None.

        The future's `cancel()` says True only while nothing was posted; from then on the destination belongs to
        the transport until the future is done, with a result or with a TransferError. Callbacks of the future
        run on the transport's thread, or on the one that closes it, and must not block. After `close` the future
        comes failed. Raises ValueError for spans outside either pool.
        """

    @abstractmethod
    def drop(self, peer: Peer) -> None:
        """Forget a peer that has departed, with all that is kept for it. Dropping it again does nothing.

        Queued reads are cancelled. One that is posted is the transport's until it is quiet, as ever; what it needs
        is kept until then. Later reads of this peer fail with PeerGone; `connect` gives a new one.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop everything. Queued reads are cancelled; reads in flight fail once they are quiet."""


def check_spans(spans: Sequence[Span], local_bytes: int, remote_bytes: int) -> None:
    """Raise ValueError for spans outside either pool, or for more than one read may carry."""
    for span in spans:
        if span.length <= 0 or span.local_offset < 0 or span.remote_offset < 0:
            raise ValueError(f"bad span {span}")
        if span.local_offset + span.length > local_bytes:
            raise ValueError(f"{span} ends beyond the own pool of {local_bytes} bytes")
        if span.remote_offset + span.length > remote_bytes:
            raise ValueError(f"{span} ends beyond the peer's pool of {remote_bytes} bytes")
    total = sum(span.length for span in spans)
    if not 0 < total <= MAX_POSTED_BYTES:
        raise ValueError(f"a read carries 1 to {MAX_POSTED_BYTES} bytes, not {total}")


def max_blocks_per_read(block_bytes: int) -> int:
    """How many whole blocks one read may carry."""
    if block_bytes > MAX_POSTED_BYTES:
        raise ValueError(f"a block of {block_bytes} bytes is larger than one read, {MAX_POSTED_BYTES}")
    return MAX_POSTED_BYTES // block_bytes
