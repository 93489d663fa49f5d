"""The way between engines: a channel for each loan, over one connection for each pair of engines.

An engine has one network. `loans/peers/` is the one of engine processes, over sockets; engines of one process, the
simulator and the trials have others. The connection is the lease: when it ends, all its channels end, at both ends.

Calls of `TakesLoan` and `GivesLoans` come from `turn` and `beat`, on the engine's thread. None comes from within a call
about one loan, so whoever opens, releases, sends or closes need not expect one.

Messages of a loan, between the engine that borrows and the one that lends.

    borrower ── Want ─────▶ lender      opens the loan's channel
             ◀─ Started ───             everything is reserved
             ◀─ Blocks ────             as chunks are computed
             ── Release ──▶             these blocks are read
             ── close ────▶             the channel ends; so it does when the lender refuses, or the connection ends

`protos/loans.proto` is their form on the wire.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvcache.block_keys import BlockKey
from kvcache.items import Item


class PlacementMark(NamedTuple):
    """The placement that caused a piece of work, by router and number; echoed in load reports."""

    router_id: str = ""
    sequence: int = 0


NO_MARK = PlacementMark()


class Peer(NamedTuple):
    """An engine, as others reach it."""

    worker_id: str
    address: str
    """Address at which it takes loans; empty for an engine of another version, which lends this one nothing."""
    incarnation: bytes


class Lender(NamedTuple):
    """The engine that a request borrows from, and what it may do for it."""

    peer: Peer
    may_compute: bool = True
    """Whether it may compute blocks that it lacks; otherwise it lends only what it holds."""
    source: Peer | None = None
    """Engine that holds more of the chain, from which the lender borrows before it computes."""
    reads_store: bool = False
    """Whether the placement counts on blocks that the lender reads from the store that workers share."""


class Want(NamedTuple):
    """Request for blocks [first_block, len(keys)) of a chain."""

    request_id: str
    """The client's request id, for logs."""
    keys: Sequence[BlockKey]
    """Keys of the chain's blocks up to the last wanted one."""
    first_block: int
    may_compute: bool
    token_ids: Sequence[int]
    """Tokens of these blocks, and those after them that draft layers or a last item need."""
    root: BlockKey
    priority: int = 0
    adapter: bytes = b""
    """Fingerprint of the LoRA adapter; empty for none."""
    mark: PlacementMark = NO_MARK
    source: Peer | None = None
    """Engine from which the lender borrows before it computes."""
    reads_store: bool = False
    items: tuple[Item, ...] = ()
    """Items that begin among the blocks' tokens, in order of their places; `token_ids` has all tokens of each."""
    only_counts: bool = False
    """Whether the borrower only asks how many of the blocks are there; `Started` is the whole answer."""


class Started(NamedTuple):
    """The lender has reserved everything; blocks [first_block, end_block) will be announced."""

    end_block: int
    cached_end_block: int
    queued_ms: float
    num_waiting: int = 0
    """Number of loans, or of requests, that wait for capacity there."""


class Blocks(NamedTuple):
    """The next blocks may be read."""

    first: int
    block_ids: tuple[int, ...]
    fingerprints: bytes
    fetched: bool = False
    """Whether they came to the lender from elsewhere, instead of being computed there."""


class Release(NamedTuple):
    """Blocks [first, first + num_blocks) of the range were read, or will not be."""

    first: int
    num_blocks: int


Lent = Started | Blocks
"""Message of a lender."""


CUT_OFF = "the lender is cut off from this worker, in a drill"
OTHER_VERSION = "the lender's engine speaks another version of loans"


class TakesLoan(Protocol):
    """The borrower of one loan, as the network calls it."""

    def lent(self, message: Lent) -> None:
        """Process a message of the lender."""

    def ended(self, reason: str) -> None:
        """Process that the lender or the network ended the loan; the last call."""


class LoanTaken(ABC):
    """The borrower's end of a loan."""

    @property
    @abstractmethod
    def endpoint(self) -> bytes:
        """Endpoint of the lender's KV memory; known once it has started the loan."""

    @property
    @abstractmethod
    def quiet_s(self) -> float:
        """Seconds without a sign of life of the lender, or of the attempt to reach it."""

    @abstractmethod
    def release(self, first: int, count: int) -> None:
        """Tell the lender that these blocks were read; it may be told later, with other ranges."""

    @abstractmethod
    def close(self) -> None:
        """End the loan; nothing more comes. May be called after `ended`."""


class LoanGiven(ABC):
    """The lender's end of a loan."""

    @abstractmethod
    def send(self, message: Lent) -> None: ...

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """End the loan with a reason; nothing more comes of it."""


class GivesLoans(Protocol):
    """The lender of all loans, as the network calls it. A loan is known by its own end of the channel."""

    def opened(self, loan: LoanGiven, want: Want) -> None:
        """Process that a peer wants blocks."""

    def released(self, loan: LoanGiven, first: int, count: int) -> None:
        """Process that the borrower has read blocks."""

    def closed(self, loan: LoanGiven) -> None:
        """Process that the borrower or the connection ended the loan; the last call."""

    def met(self, endpoint: bytes) -> None:
        """Process that an engine with this KV memory connected before its first loan."""


class LoanNetwork(ABC):
    """All connections of one engine."""

    @abstractmethod
    def start(self, gives: GivesLoans, model_fingerprint: bytes, endpoint: bytes) -> str:
        """Take loans from now on; return the address for peers.

        `endpoint` is that of this engine's KV memory. Raises StartError.
        """

    @abstractmethod
    def open(self, peer: Peer, want: Want, takes: TakesLoan) -> LoanTaken:
        """Ask a lender for blocks. A lender that cannot be reached ends the loan."""

    @abstractmethod
    def connect(self, peers: Sequence[Peer], on_done: Callable[[str, bytes, str], object]) -> None:
        """Connect to engines before their first loan.

        `on_done` is called once for each, with its worker id and its endpoint, or with why there is none.
        """

    @abstractmethod
    def turn(self) -> bool:
        """Process what has arrived, and call who waits for it; return whether there was anything."""

    @abstractmethod
    def flush(self) -> None:
        """Send what was said since the last call."""

    @abstractmethod
    def beat(self, is_alive: bool) -> None:
        """Give up silent peers; where this engine `is_alive`, send them a sign of life, if one is due."""

    @abstractmethod
    def cut_off(self, worker_id: str, seconds: float) -> None:
        """Break the connections with a worker, and refuse new ones for so long, in a drill."""

    @abstractmethod
    def delay(self, delay_s: float, seconds: float) -> None:
        """Delay what is sent, for so long, in a drill."""

    @abstractmethod
    def close(self) -> None:
        """End all connections."""


class NoNetwork(LoanNetwork):
    """The network of an engine that has no peers: during its warm-up, or in a test."""

    def start(self, gives: GivesLoans, model_fingerprint: bytes, endpoint: bytes) -> str:
        return ""

    def open(self, peer: Peer, want: Want, takes: TakesLoan) -> LoanTaken:
        raise AssertionError("an engine without a network has no lender")

    def connect(self, peers: Sequence[Peer], on_done: Callable[[str, bytes, str], object]) -> None:
        raise AssertionError("an engine without a network has no peer to connect to")

    def turn(self) -> bool:
        return False

    def flush(self) -> None: ...

    def beat(self, is_alive: bool) -> None: ...

    def cut_off(self, worker_id: str, seconds: float) -> None: ...

    def delay(self, delay_s: float, seconds: float) -> None: ...

    def close(self) -> None: ...
