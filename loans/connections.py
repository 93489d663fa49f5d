"""Connections to other workers, opened before the first loan needs them.

The first read from a worker is slow: the transports make their connections with it. So the front names workers in
advance, and one block of each is read into a block without an owner. The bytes are thrown away. The block is
quarantined meanwhile, like every block that a read may still write.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.messages.from_engine import Connected, FromEngine
from engine.messages.to_engine import Connect
from kvcache.pool import KvPool
from loans.loan import ConnectionRead, Posted
from loans.reads.block_reads import Rank

THEIR_BLOCK = 0
"""Block that is read; every pool has it, whatever it holds."""
FLOW = "connect"
"""Flow of these reads: they take turns with those of loans."""


@dataclass(slots=True)
class _Opening:
    endpoint: bytes
    block: int
    """Own block that the reads write."""
    num_reading: int
    """Ranks whose read is not quiet."""
    whole: bool = True
    peer_gone: bool = False


class Connections:
    """Connections that are being opened."""

    def __init__(
        self,
        pool: KvPool,
        emit: Callable[[FromEngine], None],
        post: Callable[[Posted], None],
        ranks: Sequence[Rank],
    ) -> None:
        """Create it; `ranks` are those of this engine."""
        self._pool = pool
        self._emit = emit
        self._post = post
        self._ranks = ranks
        self._openings: dict[int, _Opening] = {}

    def open(self, message: Connect) -> None:
        """Start to connect every rank; with no block available the first loan will do it."""
        number, endpoint = message
        if not self._pool.reserve_with((), 1):
            self._emit(Connected(number, "no block is available to read into"))
            return
        (block,) = self._pool.allocate(1)
        self._pool.quarantine([block])
        self._openings[number] = _Opening(endpoint, block, len(self._ranks))
        for rank in self._ranks:
            rank.start_read(endpoint, [THEIR_BLOCK], [block], FLOW, functools.partial(self._quiet, number))

    def read_ended(self, message: ConnectionRead) -> None:
        """Process that a read is quiet on one rank; after the last one the block is free again."""
        opening = self._openings[message.query_id]
        opening.num_reading -= 1
        opening.whole &= message.arrived
        opening.peer_gone |= message.peer_gone
        if opening.num_reading:
            return
        del self._openings[message.query_id]
        self._pool.unquarantine([opening.block])
        if opening.peer_gone:
            for rank in self._ranks:
                rank.drop(opening.endpoint)
        failure = "" if opening.whole else "the peer has ended" if opening.peer_gone else "its memory cannot be read"
        self._emit(Connected(message.query_id, failure))

    def _quiet(self, number: int, fingerprints: tuple[bytes, ...] | None, peer_gone: bool) -> None:
        self._post(ConnectionRead(number, fingerprints is not None, peer_gone))
