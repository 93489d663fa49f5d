"""An engine core that is driven by hand, whatever it computes with: its books are checked after every move."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits, LoanHost
from engine.messages.from_engine import FromEngine, StepTokens, Token
from engine.messages.to_engine import ToEngine
from engine.model_runner import ModelRunner
from kvcache.store.kv_store import KvStore
from kvtransfer.transport import Transport
from loans.network import Lent, LoanGiven, Started, Want
from loans.reads.block_reads import RemoteRank
from support.hand_network import HandNetwork, Stream

NOTHING_LEFT = (0, 0, 0, 0, 0)
M = TypeVar("M")


class PeerWants(NamedTuple):
    """What a test sends in a peer's name: it wants a loan."""

    loan_id: str
    want: Want


class PeerReleases(NamedTuple):
    loan_id: str
    first: int
    num_blocks: int


class PeerCloses(NamedTuple):
    loan_id: str


class Starting(NamedTuple):
    """What an engine said to such a peer: the loan has started."""

    loan_id: str
    end_block: int
    cached_end_block: int


class Announcement(NamedTuple):
    loan_id: str
    first: int
    block_ids: tuple[int, ...]
    fingerprints: bytes
    fetched: bool = False


class Refusal(NamedTuple):
    loan_id: str
    reason: str


FromPeer = PeerWants | PeerReleases | PeerCloses
ToPeer = Starting | Announcement | Refusal


class PeerLoan(LoanGiven):
    """A loan that a test wants of an engine."""

    def __init__(self, loan_id: str, said: "list[ToPeer] | list[FromEngine | Token | ToPeer]") -> None:
        self._loan_id = loan_id
        self._said = said
        self._is_over = False

    def send(self, message: Lent) -> None:
        assert not self._is_over, "a message after the end"
        if isinstance(message, Started):
            self._said.append(Starting(self._loan_id, message.end_block, message.cached_end_block))
        else:
            self._said.append(Announcement(self._loan_id, *message))

    def refuse(self, reason: str) -> None:
        assert not self._is_over, "a loan was refused twice"
        self._is_over = True
        self._said.append(Refusal(self._loan_id, reason))


def held(core: LoanHost) -> tuple[int, int, int, int, int]:
    """Blocks held, reserved and quarantined; sequences; loans given."""
    audited = core.audit()
    return (audited.held_blocks, audited.reserved_blocks, audited.quarantined_blocks, audited.sequences, audited.loans)


def spread(message: FromEngine) -> Iterable[FromEngine | Token]:
    """The message; a step's tokens one by one."""
    return message.each() if isinstance(message, StepTokens) else (message,)


def of_kinds(messages: Iterable[FromEngine | Token | ToPeer], *kinds: type[M]) -> list[M]:
    """Those of these kinds, in order."""
    return [message for message in messages if isinstance(message, kinds)]


class PeerLoans:
    """Loans that a test wants of an engine, by id."""

    def __init__(self, said: "list[ToPeer] | list[FromEngine | Token | ToPeer]") -> None:
        """`said` gets what the engine says to these peers, among what it says to its front."""
        self._said = said
        self._loans: dict[str, PeerLoan] = {}

    def send(self, core: LoanHost, message: FromPeer) -> None:
        match message:
            case PeerWants(loan_id, want):
                loan = self._loans[loan_id] = PeerLoan(loan_id, self._said)
                core.lend(loan, want)
            case PeerReleases(loan_id, first, count):
                core.loans.released(self._loans[loan_id], first, count)
            case PeerCloses(loan_id):
                core.end_loan(self._loans[loan_id])


class CheckedCore:
    """A core that was started, what it said, and its books checked after every move."""

    def __init__(
        self,
        runner: ModelRunner,
        transport: Transport,
        limits: EngineLimits,
        network: HandNetwork | None = None,
        others: Sequence[RemoteRank] = (),
        stores: Sequence[KvStore] = (),
    ) -> None:
        self.said: list[FromEngine | Token | ToPeer] = []
        self.network = network or HandNetwork({}, "engine")
        self.peers = PeerLoans(self.said)
        self.core = EngineCore(
            runner,
            transport,
            limits,
            lambda message: self.said.extend(spread(message)),
            stores=stores,
            others=others,
            network=self.network,
        )
        self.ready = self.core.start()

    def send(self, *messages: ToEngine | FromPeer) -> None:
        for message in messages:
            if isinstance(message, FromPeer):
                self.peers.send(self.core, message)
            else:
                self.core.handle(message)
        self.turn()

    def turn(self) -> None:
        """What other threads and engines sent is handled."""
        self.core.handle_posted()
        self.check()

    def taken(self, request_id: str) -> Stream:
        """The loan that was last asked for, for a request."""
        return next(stream for stream in reversed(self.network.taken) if stream.borrower_id == request_id)

    def lent(self, request_id: str, *messages: Lent) -> None:
        """A lender says something, past the network."""
        for message in messages:
            self.taken(request_id).takes.lent(message)
        self.turn()

    def loan_ends(self, request_id: str, reason: str) -> None:
        self.taken(request_id).takes.ended(reason)
        self.turn()

    def step(self) -> bool:
        self.send()
        worked = self.core.step()
        self.check()
        return worked

    def run(self) -> None:
        while self.step():
            pass

    def serve(self, *messages: ToEngine | FromPeer) -> list[Token]:
        """Send messages, run until all is done, and return the tokens; other messages are dropped."""
        self.send(*messages)
        self.run()
        return self.receive(Token)

    def receive(self, *kinds: type[M]) -> list[M]:
        """Messages of these kinds, in order; the others are dropped."""
        heard = of_kinds(self.said, *kinds)
        self.said.clear()
        return heard

    def check(self) -> None:
        assert self.core.audit().fault == ""

    def held(self) -> tuple[int, int, int, int, int]:
        """Blocks held, reserved and quarantined; sequences; loans given."""
        return held(self.core)


class LandingCore(CheckedCore, ABC):
    """One that reads from others, when it is told to."""

    @abstractmethod
    def land(self) -> bool:
        """One of the reads that wait; False when there is none."""
