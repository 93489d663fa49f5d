"""An engine core that is driven by hand, whatever it computes with: its books are checked after every move."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypeVar

from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits, LoanHost
from engine.messages.from_engine import FromEngine
from engine.messages.to_engine import ToEngine
from engine.model_runner import ModelRunner
from kvcache.store.kv_store import KvStore
from kvtransfer.transport import Transport
from loans.messages import Want
from loans.network import LoanGiven
from loans.reads.block_reads import RemoteRank
from support.hand_network import HandNetwork

NOTHING_LEFT = (0, 0, 0, 0, 0)
M = TypeVar("M")


def held(core: LoanHost) -> tuple[int, int, int, int, int]:
    """Blocks held, reserved and quarantined; sequences; loans given."""
    audited = core.audit()
    return (
        audited.held_blocks,
        audited.reserved_blocks,
        audited.quarantined_blocks,
        audited.sequences,
        audited.loans,
    )


def of_kinds(messages: Iterable[FromEngine], *kinds: type[M]) -> list[M]:
    """Those of these kinds, in order."""
    return [message for message in messages if isinstance(message, kinds)]


class CheckedCore:
    """A core that was started, what it said, and its books checked after every move."""

    def __init__(
        self,
        runner: ModelRunner,
        transport: Transport,
        limits: EngineLimits,
        network: HandNetwork,
        others: Sequence[RemoteRank] = (),
        stores: Sequence[KvStore] = (),
    ) -> None:
        self.said: list[FromEngine] = []
        self.network = network
        self.core = EngineCore(
            runner,
            transport,
            limits,
            self.said.append,
            stores=stores,
            others=others,
            network=network,
        )
        self.ready = self.core.start()

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.core.handle(message)
        self.turn()

    def turn(self) -> None:
        """What other threads and engines sent is handled."""
        self.core.handle_posted()
        self.check()

    def lend(self, loan: LoanGiven, want: Want) -> None:
        """A loan of this test itself."""
        self.core.lend(loan, want)
        self.turn()

    def step(self) -> bool:
        self.send()
        worked = self.core.step()
        self.check()
        return worked

    def run(self) -> None:
        while self.step():
            pass

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
