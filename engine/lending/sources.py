"""Where a loan's blocks come from: another worker's pool, or this engine's own tiers below its pool.

The borrower machine is the same for both. What differs is who reads, who is told of releases, and what is done about
a block that arrived wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from engine.keys import BlockKey
from engine.messages import CloseLoan, FromEngine, OpenLoan, ReleaseLoan
from engine.tiers.tiers import Tiers
from engine.tiers.work import Held
from kvtransfer.errors import TransferError
from kvtransfer.transport import Peer, Transport, block_spans

RELEASE_BYTES = 32 << 20
"""So much, and a range out of order, may be read before the lender is told."""
WriteBlock = Callable[[int, NDArray[np.uint8]], None]
"""write_block(block, its bytes): into the pool. Called on any thread."""


class Source(ABC):
    """Of one loan. Block ids mean what the source's announcements mean by them."""

    @abstractmethod
    def read(self, block_ids: Sequence[int], blocks: Sequence[int]) -> "Future[None]":
        """Read the source's `block_ids` into the pool's `blocks`; the future as `Transport.read` promises it."""

    def release(self, first: int, count: int) -> None:  # noqa: B027 - not every source is told
        """Chain blocks [first, first + count) have been read."""

    def spoiled(self, key: BlockKey) -> None:  # noqa: B027 - a lender's blocks are its own affair
        """This block could not be read, or is not what was announced."""

    def gone(self) -> None:  # noqa: B027 - as above
        """Whoever held the blocks is no longer there."""

    @abstractmethod
    def close(self) -> None:
        """The loan is over; nothing more is read."""


class Lender(Source):
    """Another worker, reached by the front's Lend stream and read by the transport."""

    def __init__(
        self,
        loan_id: str,
        may_compute: bool,
        transport: Transport,
        block_bytes: int,
        emit: Callable[[FromEngine], None],
    ) -> None:
        self._loan_id = loan_id
        self._transport = transport
        self._block_bytes = block_bytes
        self._emit = emit
        self._peer: Peer | None = None
        self._unreleased: tuple[int, int] | None = None
        """First block and count of what has been read since the last ReleaseLoan."""
        self.may_compute = may_compute
        self.cached_end = 0
        """Chain blocks below it were cached at the lender."""
        self.fetched_end = 0
        """Announced chain blocks below it, and not below `cached_end`, the lender itself had from elsewhere."""

    def open(self, first: int, end: int) -> None:
        self._emit(OpenLoan(self._loan_id, first, end, self.may_compute))

    def connect(self, endpoint: bytes) -> None:
        """The lender has started. Raises TransferError."""
        self._peer = self._transport.connect(endpoint)

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._peer.lanes if self._peer is not None else ()

    def read(self, block_ids: Sequence[int], blocks: Sequence[int]) -> "Future[None]":
        assert self._peer is not None
        spans = block_spans(zip(blocks, block_ids, strict=True), self._block_bytes)
        try:
            return self._transport.read(self._peer, spans, flow=self._loan_id)
        except ValueError:  # the lender announced a block that its pool does not have
            return _failed("announced blocks lie outside the lender's pool")

    def release(self, first: int, count: int) -> None:
        """Said in large ranges: each is a message, and the end of the loan releases the rest."""
        if self._unreleased and first == self._unreleased[0] + self._unreleased[1]:
            first, count = self._unreleased[0], self._unreleased[1] + count
        elif self._unreleased:
            self._emit(ReleaseLoan(self._loan_id, *self._unreleased))
        self._unreleased = first, count
        if count * self._block_bytes >= RELEASE_BYTES:
            self._emit(ReleaseLoan(self._loan_id, first, count))
            self._unreleased = None

    def gone(self) -> None:
        if self._peer is not None:
            self._transport.drop(self._peer)

    def close(self) -> None:
        self._emit(CloseLoan(self._loan_id))


class LowerTiers(Source):
    """Blocks that this engine's pool evicted. Block ids are places in the run that the loan is of."""

    def __init__(self, tiers: Tiers, keys: Sequence[BlockKey], write_block: WriteBlock) -> None:
        """`keys` are held by the tiers, and stay there until `close`."""
        self._tiers = tiers
        self._held: list[Held] = tiers.pin(keys)
        self._write_block = write_block

    def fingerprints(self) -> tuple[bytes, ...]:
        return self._tiers.fingerprints(self._held)

    def read(self, block_ids: Sequence[int], blocks: Sequence[int]) -> "Future[None]":
        def write(index: int, content: NDArray[np.uint8]) -> None:
            self._write_block(blocks[index], content)

        return self._tiers.read([self._held[place] for place in block_ids], write)

    def spoiled(self, key: BlockKey) -> None:
        self._tiers.forget([key])

    def close(self) -> None:
        self._tiers.unpin(self._held)
        self._held = []


def _failed(reason: str) -> "Future[None]":
    future: Future[None] = Future()
    future.set_exception(TransferError(reason))
    return future
