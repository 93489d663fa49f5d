"""All loans of one engine: those it gives, those it takes, and the network between engines.

An engine has one of these, over its own KV (`kvcache/kv_view.py`). It knows no router, no front and no request message,
and can be hosted by any process that calls `turn`, `flush` and `report` often.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from kvcache.kv_view import KvView
from kvtransfer.ranks import RankGrid
from loans.borrower_manager import BorrowerManager
from loans.connections import Connections
from loans.messages import PlacementMark, Started, Want
from loans.network import LoanGiven, LoanNetwork
from loans.reads.block_reads import LocalRank, Rank, RemoteRank


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
        self._posted: SimpleQueue[Callable[[], object]] = SimpleQueue()
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
        self._posted.put(call)
        self._host.wake()

    def turn(self) -> bool:
        """Process what other threads and other engines sent; return whether there was anything."""
        has_news = self._network.turn()
        while not self._posted.empty():  # only this method takes from it
            self._posted.get_nowait()()
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
