"""All loans of one engine: those it gives, those it takes, and the network between engines.

An engine has one of these, over its own KV (`kvcache/kv_view.py`). It knows no router, no front and no request message,
and can be hosted by any process that calls `turn`, `flush` and `report` often.

Connections to other engines, made before the first loan needs them.

The first read from an engine is slow: the transports make their connections with it. So one block of each engine is
read into a block without an owner. The bytes are thrown away. The block is quarantined meanwhile, like every block that
a read may still write.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from kvcache.kv_view import KvView
from kvcache.pool import KvPool
from kvtransfer.ranks import RankGrid
from loans.borrower_manager import BorrowerManager
from loans.loan import Post
from loans.network import LoanGiven, LoanNetwork, Peer, PlacementMark, Started, Want
from loans.reads.block_reads import LocalRank, Rank, RemoteRank

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


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of an engine, which read blocks of other engines."""

    own: LocalRank | None
    """Rank of this process; None where other processes have all KV memory."""
    others: Sequence[RemoteRank] = ()
    grid: RankGrid | None = None
    """Parts of every block that all ranks hold; None: each has some heads."""

    @property
    def all(self) -> list[Rank]:
        return [*([self.own] if self.own is not None else []), *self.others]


@dataclass(frozen=True, slots=True)
class HostCalls:
    """Calls of an engine that its loans make."""

    next_arrival: Callable[[], int]
    """Function that numbers loans and requests alike, since the scheduler orders them together."""
    is_short: Callable[[], bool]
    """Whether requests were preempted for lack of blocks."""
    on_wanted: Callable[[PlacementMark], object]
    """Function called with the placement of each loan that is wanted."""
    wake: Callable[[], object] = lambda: None
    """Function that has `turn` called soon. From any thread."""


class Lends(Protocol):
    """The lender's side of all loans."""

    @property
    def num_waiting(self) -> int:
        """Number of loans, or of requests, that wait for capacity here."""

    def open(self, channel: LoanGiven, want: Want) -> None:
        """Take a loan, or refuse it."""

    def release(self, channel: LoanGiven, first: int, num_blocks: int) -> None:
        """Process that a borrower has read blocks."""

    def close(self, channel: LoanGiven) -> None:
        """Process that a borrower, or the connection, ended its loan."""

    def start_queued(self) -> None:
        """Start queued loans in order while they fit."""

    def refuse_queued(self, reason: str) -> None:
        """Refuse all queued loans."""


L = TypeVar("L", bound=Lends)


class Loans(Generic[L]):
    """Loans of one engine; one thread calls it at a time, but for `post`."""

    def __init__(
        self,
        kv_cache: KvView,
        ranks: Ranks,
        transport_name: str,
        network: LoanNetwork,
        host: HostCalls,
        make_lender: Callable[[BorrowerManager], L],
        read_silence_s: float = math.inf,
    ) -> None:
        """Create them; `make_lender` makes the lender's side beside the borrower's."""
        self.posted: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """Calls that `turn` will make."""
        self._host = host
        self._kv_cache = kv_cache
        self._network = network
        self.borrower = BorrowerManager(
            kv_cache, transport_name, network, self.post, ranks.own, ranks.others, read_silence_s, ranks.grid
        )
        self.lender = make_lender(self.borrower)
        self.connections = Connections(kv_cache.cached.pool, network, self.post, ranks.all)

    def start(self, model_fingerprint: bytes, endpoint: bytes) -> str:
        """Take loans of peers from now on; return the address for them.

        `endpoint` is that of the engine's whole KV memory. Raises StartError.
        """
        return self._network.start(self, model_fingerprint, endpoint)

    def post(self, call: Callable[[], object]) -> None:
        """Have a call made by `turn`.

        From any thread.
        """
        self.posted.put(call)
        self._host.wake()

    def turn(self) -> bool:
        """Process what other threads and other engines sent; return whether there was anything."""
        has_news = self._network.turn()
        while not self.posted.empty():  # only this method takes from it
            self.posted.get_nowait()()
            has_news = True
        return has_news

    def flush(self) -> None:
        """Send what was said to other engines."""
        self._network.flush()

    def report(self, is_alive: bool) -> None:
        """Give up peers, stores and reads that are stuck; while the engine `is_alive`, prove that to its peers."""
        self.borrower.give_up_stuck()
        self._network.beat(is_alive)

    def start_queued(self) -> None:
        """Start queued loans, or refuse those that would wait while this engine itself waits.

        Otherwise two engines whose requests wait for each other's loans would wait for ever. With this rule an engine
        that is waited for waits only for its own steps. Blocks that a loan takes are not taken back, so an engine whose
        own requests were preempted for lack of blocks gives none away.
        """
        if not self.lender.num_waiting:
            return
        is_short = self._host.is_short()
        if not is_short:
            self.lender.start_queued()
        if self.lender.num_waiting and (is_short or self.borrower.waits_for_room):
            self.lender.refuse_queued("no room now, and requests of this worker wait for room themselves")

    def cut_off(self, worker_id: str, seconds: float) -> None:
        self._network.cut_off(worker_id, seconds)

    def delay(self, delay_s: float, seconds: float) -> None:
        self._network.delay(delay_s, seconds)

    def close(self) -> None:
        """End all loans and connections."""
        self._network.close()

    # ------------------------------------------------------------------ the network's calls

    def opened(self, loan: LoanGiven, want: Want) -> None:
        if want.only_counts:
            end = self._kv_cache.num_cached(want.keys)
            loan.send(Started(end, end, 0.0, self.lender.num_waiting))
            return
        self._host.on_wanted(want.mark)
        self.lender.open(loan, want)
        self.start_queued()

    def released(self, loan: LoanGiven, first: int, count: int) -> None:
        self.lender.release(loan, first, count)

    def closed(self, loan: LoanGiven) -> None:
        self.lender.close(loan)

    def met(self, endpoint: bytes) -> None:
        self.connections.read_once(endpoint, lambda failure: None)
