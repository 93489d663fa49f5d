"""The network between engines of one process: sim workers, the simulator, and tests."""

import math
from collections import deque
from collections.abc import Callable, Sequence

from loans.network import (
    CUT_OFF,
    OTHER_VERSION,
    GivesLoans,
    Lent,
    LoanGiven,
    LoanNetwork,
    LoanTaken,
    Peer,
    TakesLoan,
    Want,
)

GONE = "no engine takes loans there"


class InProcessNetwork(LoanNetwork):
    """The network of one engine among those of `engines`, by incarnation."""

    def __init__(
        self,
        engines: "dict[bytes, InProcessNetwork]",
        incarnation: bytes,
        wake: Callable[[], object],
        clock: Callable[[], float],
        silence_s: float = math.inf,
    ) -> None:
        """Create it; `wake` has the engine call `turn` soon."""
        self._engines = engines
        self.incarnation = incarnation
        self._wake = wake
        self._clock = clock
        self._silence_s = silence_s
        self._arrived: deque[Callable[[], object]] = deque()
        self._loans: dict[_Loan, None] = {}
        """Open loans, of either side."""
        self._beaten_at = clock()
        self._cut_off: dict[bytes, float] = {}
        """Until when peers are cut off in a drill, by incarnation."""
        self.is_open = True
        self.worker_id = ""
        self.gives: GivesLoans
        self.model_fingerprint = self.endpoint = b""

    @property
    def num_given(self) -> int:
        """Number of loans that peers have asked for and that are not over."""
        return sum(loan.lender is self for loan in self._loans)

    def start(self, gives: GivesLoans, model_fingerprint: bytes, endpoint: bytes) -> str:
        self.gives, self.model_fingerprint, self.endpoint = gives, model_fingerprint, endpoint
        self._engines[self.incarnation] = self
        return f"in-process:{self.incarnation.hex()}"

    def open(self, peer: Peer, want: Want, takes: TakesLoan) -> LoanTaken:
        lender = self._engines.get(peer.incarnation)
        loan = _Loan(self, lender, want, takes)
        refusal = self._refusal(peer, lender)
        if refusal or lender is None:
            self.deliver(self, lambda: loan.end_taken(refusal or GONE))
        else:
            self._loans[loan] = lender._loans[loan] = None
            self.deliver(lender, loan.arrive)
        return loan.taken

    def connect(self, peers: Sequence[Peer], on_done: Callable[[str, bytes, str], object]) -> None:
        for peer in peers:
            other = self._engines.get(peer.incarnation)
            refusal = self._refusal(peer, other)
            endpoint = b"" if refusal or other is None else other.endpoint
            if endpoint and other is not None:
                self.deliver(other, lambda other=other: other.gives.met(self.endpoint))
            self.deliver(self, on_done, peer.worker_id, endpoint, refusal)

    def deliver(self, to: "InProcessNetwork", call: Callable[..., object], *arguments: object) -> None:
        """Have a call made by the other engine's next turn."""
        if to.is_open:
            to.arrive(lambda: call(*arguments))

    def arrive(self, call: Callable[[], object]) -> None:
        """Take what a peer has sent."""
        self._arrived.append(call)
        self._wake()

    def turn(self) -> bool:
        has_news = bool(self._arrived)
        while self._arrived:
            self._arrived.popleft()()
        return has_news

    def flush(self) -> None:
        """Do nothing: what is said is delivered at once."""

    def beat(self, is_alive: bool) -> None:
        if is_alive:
            self._beaten_at = self._clock()
        for loan in list(self._loans):
            peer = loan.peer_of(self)
            if self._clock() - max(peer._beaten_at, loan.opened_at) >= self._silence_s:
                loan.lost(f"the peer was silent for {self._silence_s:g} s")

    def cut_off(self, worker_id: str, seconds: float) -> None:
        for peer in self._engines.values():
            if peer.worker_id == worker_id:
                self._cut_off[peer.incarnation] = self._clock() + seconds
                for loan in [loan for loan in self._loans if loan.peer_of(self) is peer]:
                    loan.lost(CUT_OFF)

    def delay(self, delay_s: float, seconds: float) -> None:
        """Do nothing: no message between engines of one process travels."""

    def close(self) -> None:
        self.is_open = False
        if self._engines.get(self.incarnation) is self:
            del self._engines[self.incarnation]
        for loan in list(self._loans):
            loan.lost("the engine has ended")

    def quiet_s(self, peer: "InProcessNetwork", since: float) -> float:
        """Return the seconds since a peer's loop last turned, or since a loan was opened."""
        return self._clock() - max(peer._beaten_at, since)

    def _cut_off_until(self, peer: "InProcessNetwork") -> float:
        return self._cut_off.get(peer.incarnation, -math.inf)

    def _refusal(self, peer: Peer, other: "InProcessNetwork | None") -> str:
        if not peer.address:
            return OTHER_VERSION
        if other is None or not other.is_open:
            return GONE
        if self._clock() < max(self._cut_off_until(other), other._cut_off_until(self)):
            return CUT_OFF
        if other.model_fingerprint != self.model_fingerprint:
            return "model_fingerprint: weights, layout or dtype differ from the borrower's"
        return ""


class _Loan:
    """One loan, with both of its ends."""

    def __init__(self, borrower: InProcessNetwork, lender: InProcessNetwork | None, want: Want, takes: TakesLoan):
        self.borrower, self.lender = borrower, lender
        self.want = want
        self.opened_at = borrower._clock()
        self.takes: TakesLoan | None = takes
        """The borrower, until its end is over."""
        self.is_given = False
        """Whether the lender has it."""
        self.taken, self.given = _Taken(self), _Given(self)

    def peer_of(self, network: InProcessNetwork) -> InProcessNetwork:
        assert self.lender is not None
        return self.lender if network is self.borrower else self.borrower

    def arrive(self) -> None:
        """Process the want at the lender."""
        assert self.lender is not None
        if self in self.lender._loans:
            self.is_given = True
            self.lender.gives.opened(self.given, self.want)

    def end_taken(self, reason: str) -> None:
        """Tell the borrower of the end."""
        takes, self.takes = self.takes, None
        self.borrower._loans.pop(self, None)
        if takes is not None:
            takes.ended(reason)

    def end_given(self) -> None:
        """Tell the lender of the end."""
        assert self.lender is not None
        self.lender._loans.pop(self, None)
        if self.is_given:
            self.is_given = False
            self.lender.gives.closed(self.given)

    def lost(self, reason: str) -> None:
        """End it at both ends, each in its own turn."""
        assert self.lender is not None
        self.borrower._loans.pop(self, None)
        self.lender._loans.pop(self, None)
        self.borrower.deliver(self.borrower, self.end_taken, reason)
        self.borrower.deliver(self.lender, self.end_given)


class _Taken(LoanTaken):
    def __init__(self, loan: _Loan) -> None:
        self._loan = loan

    @property
    def endpoint(self) -> bytes:
        assert self._loan.lender is not None
        return self._loan.lender.endpoint

    @property
    def quiet_s(self) -> float:
        loan = self._loan
        return 0.0 if loan.lender is None else loan.borrower.quiet_s(loan.lender, loan.opened_at)

    def release(self, first: int, count: int) -> None:
        loan = self._loan
        if loan.takes is not None and loan.lender is not None:
            loan.borrower.deliver(loan.lender, self._released, first, count)

    def close(self) -> None:
        loan = self._loan
        if loan.takes is not None:
            loan.takes = None
            loan.borrower._loans.pop(loan, None)
            if loan.lender is not None:
                loan.borrower.deliver(loan.lender, loan.end_given)

    def _released(self, first: int, count: int) -> None:
        if self._loan.is_given and self._loan.lender is not None:
            self._loan.lender.gives.released(self._loan.given, first, count)


class _Given(LoanGiven):
    def __init__(self, loan: _Loan) -> None:
        self._loan = loan

    def send(self, message: Lent) -> None:
        loan = self._loan
        if loan.is_given and loan.lender is not None:
            loan.lender.deliver(loan.borrower, self._lent, message)

    def refuse(self, reason: str) -> None:
        loan = self._loan
        if loan.is_given and loan.lender is not None:
            loan.is_given = False
            loan.lender._loans.pop(loan, None)
            loan.lender.deliver(loan.borrower, loan.end_taken, reason)

    def _lent(self, message: Lent) -> None:
        if self._loan.takes is not None:
            self._loan.takes.lent(message)
