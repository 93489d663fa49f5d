"""Engines whose messages about loans are carried by hand: a queue for each loan and direction."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from loans.borrower_manager import _Taker
from loans.loan import TakenLoan
from loans.network import GivesLoans, Lent, LoanGiven, LoanNetwork, LoanTaken, Peer, Release, TakesLoan, Want

ADDRESS = "by hand"


@dataclass(frozen=True)
class Ended:
    """The loan is over, for the borrower."""

    reason: str


@dataclass(frozen=True)
class Closed:
    """The loan is over, for the lender."""


ToLender = Want | Release | Closed
ToBorrower = Lent | Ended


@dataclass(eq=False)
class Stream(LoanTaken, LoanGiven):
    """One loan. It keeps order within a direction; when it breaks, what was under way may be lost."""

    borrower: "HandNetwork"
    lender: "HandNetwork | None"
    """None: nobody, or a test itself."""
    want: Want
    takes: TakesLoan
    to_lender: deque[ToLender] = field(default_factory=deque)
    to_borrower: deque[ToBorrower] = field(default_factory=deque)
    asked: bool = False
    """The lender has heard of it."""
    closed: bool = False
    """By the borrower."""
    refused: bool = False
    """By the lender."""
    broken: bool = False
    quiet_for_s: float = 0.0
    own_endpoint: bytes | None = None
    """An endpoint that is not the lender's own."""

    @property
    def over(self) -> bool:
        return self.closed or self.broken

    @property
    def loan(self) -> TakenLoan:
        """What the borrower has of it."""
        return cast(_Taker, self.takes).loan

    @property
    def borrower_id(self) -> str:
        """Of the request, or of the loan given, that it is for."""
        request_id: str = self.loan.wanted.sequence.request_id
        return request_id

    # ------------------------------------------------------------------ the borrower's end

    @property
    def endpoint(self) -> bytes:
        if self.own_endpoint is not None or self.lender is None:
            return self.own_endpoint or b""
        return self.lender.endpoint

    @property
    def quiet_s(self) -> float:
        return self.quiet_for_s

    def release(self, first: int, count: int) -> None:
        assert not self.closed, "a release after the end"
        self._say_to_lender(Release(first, count))

    def close(self) -> None:
        assert not self.closed, "a loan was closed twice"
        self.closed = True
        self._say_to_lender(Closed())

    # ------------------------------------------------------------------ the lender's end

    def send(self, message: Lent) -> None:
        assert not self.refused, "a message after the end"
        self._say_to_borrower(message)

    def refuse(self, reason: str) -> None:
        assert not self.refused, "a loan was refused twice"
        self.refused = True
        self._say_to_borrower(Ended(reason))

    # ------------------------------------------------------------------ the way between

    def _say_to_lender(self, message: ToLender) -> None:
        if not self.broken:
            self.to_lender.append(message)
        self.borrower.on_said(self, message)

    def _say_to_borrower(self, message: ToBorrower) -> None:
        if not self.broken:
            self.to_borrower.append(message)
        if self.lender is not None:
            self.lender.on_said(self, message)

    def carry_to_lender(self) -> None:
        """The oldest message arrives."""
        message = self.to_lender.popleft()
        self.asked |= isinstance(message, Want)
        if self.lender is not None:
            self.lender.arrived.append((self, message))

    def carry_to_borrower(self) -> None:
        """The oldest message arrives, and is a sign of life."""
        self.quiet_for_s = 0.0
        self.borrower.arrived.append((self, self.to_borrower.popleft()))

    def carry(self) -> bool:
        """Everything under way arrives; False when that is nothing."""
        is_any = bool(self.to_lender or self.to_borrower)
        while self.to_lender:
            self.carry_to_lender()
        while self.to_borrower:
            self.carry_to_borrower()
        return is_any

    def take_in(self, network: "HandNetwork", message: ToLender | ToBorrower) -> None:
        """An engine handles a message that has arrived."""
        match message:
            case Want():
                network.gives.opened(self, message)
            case Release(first, count):
                network.gives.released(self, first, count)
            case Closed():
                network.gives.closed(self)
            case Ended(reason):
                self.takes.ended(reason)
            case _:
                self.takes.lent(message)


class HandNetwork(LoanNetwork):
    """The network of one engine among others."""

    def __init__(self, engines: "dict[bytes, HandNetwork]", name: str) -> None:
        self.engines = engines
        self.peer = Peer(name, ADDRESS, name.encode())
        self.gives: GivesLoans
        self.endpoint = b""
        self.arrived: deque[tuple[Stream, ToLender | ToBorrower]] = deque()
        """What has arrived and was not handled yet."""
        self.calls: deque[Callable[[], object]] = deque()
        self.is_held = False
        """Whether what has arrived is left for a later turn."""
        self.taken: list[Stream] = []
        """All loans that the engine asked for."""
        self.on_said: Callable[[Stream, ToLender | ToBorrower], object] = lambda stream, message: None
        """Function that is told what this engine says."""

    def start(self, gives: GivesLoans, model_fingerprint: bytes, endpoint: bytes) -> str:
        self.gives, self.endpoint = gives, endpoint
        self.engines[self.peer.incarnation] = self
        return ADDRESS

    def open(self, peer: Peer, want: Want, takes: TakesLoan) -> LoanTaken:
        stream = Stream(self, self.engines.get(peer.incarnation), want, takes, deque([want]))
        self.taken.append(stream)
        self.on_said(stream, want)
        return stream

    def connect(self, peers: Sequence[Peer], on_done: Callable[[str, bytes, str], object]) -> None:
        """What is to be called is called by the next turn of either engine."""
        for peer in peers:
            other = self.engines.get(peer.incarnation)
            if other is None:
                self.calls.append(partial(on_done, peer.worker_id, b"", "no engine is there"))
            else:
                other.calls.append(partial(other.gives.met, self.endpoint))
                self.calls.append(partial(on_done, peer.worker_id, other.endpoint, ""))

    def turn(self) -> bool:
        if self.is_held or not (self.arrived or self.calls):
            return False
        while self.calls:
            self.calls.popleft()()
        while self.arrived:
            stream, message = self.arrived.popleft()
            stream.take_in(self, message)
        return True

    def flush(self) -> None:
        """Do nothing: messages wait for whoever carries them."""

    def beat(self, is_alive: bool) -> None:
        """Do nothing: a stream is `quiet_for_s` as a test says."""

    def cut_off(self, worker_id: str, seconds: float) -> None:
        raise AssertionError("no drill here")

    def delay(self, delay_s: float, seconds: float) -> None:
        raise AssertionError("no drill here")

    def close(self) -> None:
        """Do nothing: a test breaks the streams."""


NOBODY = Peer("nobody", ADDRESS, b"nobody")
"""A lender that only a test speaks for."""
