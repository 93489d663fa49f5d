"""An engine alone, its books checked after every move. Eight blocks of four tokens."""

from collections.abc import Sequence
from typing import TypeVar

from engine.core import CoreLimits, EngineCore
from engine.messages import (
    FromEngine,
    Generate,
    KvAccount,
    Lend,
    LendStarting,
    ToEngine,
    Token,
)
from engine.scheduler import StepBudget
from engine.sim.runner import SimRunner
from engine.vocabulary import SamplingParams
from kvtransfer.fingerprint import fingerprint_blocks
from kvtransfer.local import LocalNetwork, LocalTransport
from support.sim_model import LAYOUT, VOCAB

WIDE = StepBudget(64, 64)
NOTHING_LEFT = (0, 0, 0, 0, 0)
M = TypeVar("M")
TEN = tuple(range(10, 20))
TWELVE = tuple(range(10, 22))


class Engine:
    """An engine core, what it said, and its books checked after every move."""

    def __init__(
        self,
        name: str = "engine",
        num_blocks: int = 8,
        budget: StepBudget = WIDE,
        network: LocalNetwork | None = None,
        eager: bool = True,
        max_queued_loans: int = 2,
    ) -> None:
        self.said: list[FromEngine] = []
        self.transport = LocalTransport(network or LocalNetwork(), name, eager)
        self.runner = SimRunner(LAYOUT, num_blocks, VOCAB)
        limits = CoreLimits(budget, max_queued_loans, report_interval_s=0.0, min_report_interval_s=0.0)
        self.core = EngineCore(self.runner, self.transport, limits, self.said.append)
        self.ready = self.core.start()

    def tell(self, *messages: ToEngine) -> None:
        for message in messages:
            self.core.handle(message)
        self.core.handle_posted()
        self.check()

    def step(self) -> bool:
        self.tell()
        worked = self.core.step()
        self.check()
        return worked

    def run(self) -> None:
        while self.step():
            pass

    def land(self) -> bool:
        """One of the reads that wait; False when there is none."""
        return self.transport.step()

    def hear(self, *kinds: type[M]) -> list[M]:
        """Messages of these kinds, in order; the others are dropped."""
        heard: list[M] = [message for message in self.said if isinstance(message, kinds)]
        self.said.clear()
        return heard

    def check(self) -> None:
        assert self.core.audit().fault == ""

    def held(self) -> tuple[int, int, int, int, int]:
        """Blocks held, reserved and quarantined; sequences; loans given."""
        audited = self.core.audit()
        return (
            audited.held_blocks,
            audited.reserved_blocks,
            audited.quarantined_blocks,
            audited.sequences,
            audited.loans,
        )


def generate(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 2,
    emitted: Sequence[int] = (),
    borrow: bool = False,
    salt: str = "",
    priority: int = 0,
    sampling: SamplingParams | None = None,
) -> Generate:
    sampling = sampling or SamplingParams(max_tokens)
    return Generate(request_id, tuple(prompt), tuple(emitted), sampling, salt, priority, borrow)


def lend(loan_id: str, tokens: Sequence[int], first: int = 0, compute: bool = True, priority: int = 0) -> Lend:
    return Lend(loan_id, tuple(tokens), first, "", compute, priority)


def tokens_of(messages: Sequence[Token], request_id: str) -> list[int]:
    return [message.token_id for message in messages if message.request_id == request_id]


def account_of(messages: Sequence[Token]) -> KvAccount:
    accounts = [message.account for message in messages if message.account is not None]
    assert len(accounts) == 1
    assert messages[0].account is accounts[0], "it comes with the first token"
    return accounts[0]


def starting(message: LendStarting) -> tuple[str, int, int]:
    return message.loan_id, message.end_block, message.cached_end_block


def prints(engine: Engine, blocks: Sequence[int]) -> bytes:
    return fingerprint_blocks(engine.runner.pool.memory, list(blocks), LAYOUT.kv_heads).tobytes()
