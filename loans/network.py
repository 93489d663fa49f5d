"""The way between engines: a channel for each loan, over one connection for each pair of engines.

An engine has one network. `loans/peers/` is the one of engine processes, over sockets; engines of one process, the
simulator and the trials have others. The connection is the lease: when it ends, all its channels end, at both ends.

Calls of `TakesLoan` and `GivesLoans` come from `turn` and `beat`, on the engine's thread. None comes from within a call
about one loan, so whoever opens, releases, sends or closes need not expect one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from loans.messages import Lent, Peer, Want

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
