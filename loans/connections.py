"""Connections to other engines, made before the first loan needs them.

The first read from an engine is slow: the transports make their connections with it. So one block of each engine is
read into a block without an owner. The bytes are thrown away. The block is quarantined meanwhile, like every block that
a read may still write.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.pool import KvPool
from loans.loan import Post
from loans.messages import Peer
from loans.network import LoanNetwork
from loans.reads.block_reads import Rank

THEIR_BLOCK = 0
"""Block that is read; every pool has it, whatever it holds."""
FLOW = "connect"
"""Flow of these reads: they take turns with those of loans."""

OnDone = Callable[[str], object]
"""Function that gets why there is no connection; empty where there is one."""


@dataclass(slots=True)
class _Opening:
    endpoint: bytes
    block: int
    """Own block that the reads write."""
    num_reading: int
    """Ranks whose read is not quiet."""
    on_done: OnDone
    whole: bool = True
    peer_gone: bool = False


class Connections:
    """Connections that are being opened."""

    def __init__(self, pool: KvPool, network: LoanNetwork, post: Post, ranks: Sequence[Rank]) -> None:
        """Create it; `ranks` are those of this engine."""
        self._pool = pool
        self._network = network
        self._post = post
        self._ranks = ranks

    def open(self, peers: Sequence[Peer], on_done: Callable[[list[str]], object]) -> None:
        """Connect to engines and to their KV memory; `on_done` gets why some cannot be reached, when all are."""
        failures: list[str] = []
        num_open = len(peers)

        def ended(worker_id: str, failure: str) -> None:
            nonlocal num_open
            num_open -= 1
            if failure:
                failures.append(f"{worker_id}: {failure}")
            if not num_open:
                on_done(failures)

        def connected(worker_id: str, endpoint: bytes, failure: str) -> None:
            if failure:
                ended(worker_id, failure)
            else:
                self.read_once(endpoint, functools.partial(ended, worker_id))

        if peers:
            self._network.connect(peers, connected)
        else:
            on_done(failures)

    def read_once(self, endpoint: bytes, on_done: OnDone) -> None:
        """Read a block of an engine on every rank; with no block available the first loan will connect them."""
        if not self._pool.reserve_with((), 1):
            on_done("no block is available to read into")
            return
        (block,) = self._pool.allocate(1)
        self._pool.quarantine([block])
        opening = _Opening(endpoint, block, len(self._ranks), on_done)
        for rank in self._ranks:
            rank.start_read(endpoint, [THEIR_BLOCK], [block], FLOW, functools.partial(self._quiet, opening))

    def _quiet(self, opening: _Opening, fingerprints: tuple[bytes, ...] | None, peer_gone: bool) -> None:
        """Post the end of a read. From any thread."""
        self._post(functools.partial(self._read_ended, opening, fingerprints is not None, peer_gone))

    def _read_ended(self, opening: _Opening, arrived: bool, peer_gone: bool) -> None:
        """Process that a read is quiet on one rank; after the last one the block is free again."""
        opening.num_reading -= 1
        opening.whole &= arrived
        opening.peer_gone |= peer_gone
        if opening.num_reading:
            return
        self._pool.unquarantine([opening.block])
        if opening.peer_gone:
            for rank in self._ranks:
                rank.drop(opening.endpoint)
        opening.on_done("" if opening.whole else "it has ended" if opening.peer_gone else "its memory cannot be read")
