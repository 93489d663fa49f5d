"""Two engines, with every message carried by hand."""

from collections.abc import Sequence

from engine.core_types import StepBudget
from engine.messages.from_engine import (CloseLoan, Filled, LendReady, LendRefused, LendStarting, OpenLoan, Rejected, ReleaseLoan, Token)
from loans.account import KvAccount
from engine.messages.to_engine import Lend, LendClosed, LendReleased, LoanBlocks, LoanFailed, LoanStarted, ToEngine
from kvcache.items import Item, begun_items
from kvtransfer.local import LocalNetwork
from support.checked_core import NOTHING_LEFT, LandingCore
from support.core_engine import WIDE, Engine, generate, tokens_of
from support.sim_model import undisturbed


class Pair:
    """A borrower and a lender; `carry` takes messages across until neither says anything more."""

    def __init__(
        self,
        eager: bool = True,
        lender_budget: StepBudget = WIDE,
        may_compute: bool = True,
        engines: tuple[LandingCore, LandingCore] | None = None,
    ) -> None:
        """`engines`: a borrower and a lender, where they are not to be such as are made here."""
        network = LocalNetwork()
        self.borrower, self.lender = engines or (
            Engine("borrower", network=network, eager=eager),
            Engine("lender", network=network, budget=lender_budget),
        )
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.items: dict[str, Sequence[Item]] = {}
        self.may_compute = may_compute
        self.closed: list[str] = []
        self.tokens: list[Token] = []
        self.rejected: list[Rejected] = []
        self.filled: list[Filled] = []

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int = 2, items: Sequence[Item] = ()) -> None:
        self.prompts[request_id], self.items[request_id] = prompt, items
        self.borrower.send(generate(request_id, prompt, max_tokens, borrow=True, items=items))

    def carry(self) -> bool:
        """What each said so far, to the other; False when that was nothing."""
        to_lender, to_borrower = self.from_borrower(), self.from_lender()
        self.lender.send(*to_lender)
        self.borrower.send(*to_borrower)
        return bool(to_lender or to_borrower)

    def from_borrower(self) -> list[ToEngine]:
        out: list[ToEngine] = []
        for message in self.borrower.receive(OpenLoan, ReleaseLoan, CloseLoan, Token, Rejected, Filled):
            match message:
                case OpenLoan(request_id, first, end, _, fast_path):
                    items = begun_items(self.items[request_id], end * 4)
                    tokens = self.prompts[request_id][: max(end * 4, items[-1].end if items else 0)]
                    lend = Lend(request_id, tokens, first, "", self.may_compute, 0, fast_path=fast_path)
                    out.append(lend._replace(items=items, end_block=end))
                case ReleaseLoan(request_id, first, count):
                    out.append(LendReleased(request_id, first, count))
                case CloseLoan(request_id):
                    self.closed.append(request_id)
                    out.append(LendClosed(request_id))
                case Token():
                    self.tokens.append(message)
                case Rejected():
                    self.rejected.append(message)
                case Filled():
                    self.filled.append(message)
        return out

    def from_lender(self) -> list[ToEngine]:
        out: list[ToEngine] = []
        for message in self.lender.receive(LendStarting, LendReady, LendRefused):
            match message:
                case LendStarting(loan_id, end, cached_end, queued_ms):
                    out.append(LoanStarted(loan_id, self.lender.ready.endpoint, end, cached_end, queued_ms))
                case LendReady(loan_id, first, block_ids, fingerprints):
                    out.append(LoanBlocks(loan_id, first, block_ids, fingerprints))
                case LendRefused(loan_id, reason):
                    out.append(LoanFailed(loan_id, reason))
        return out

    def run(self) -> None:
        while self.carry() | self.lender.step() | self.borrower.step() | self.land():
            pass
        self.carry()

    def land(self) -> bool:
        """One read of the borrower's, if there is one."""
        return self.borrower.land()

    def check_served(self, request_id: str, max_tokens: int = 2) -> None:
        wanted = undisturbed(self.prompts[request_id], max_tokens, items=self.items[request_id])
        assert tokens_of(self.tokens, request_id) == wanted
        assert self.closed == [request_id]
        assert self.borrower.held() == NOTHING_LEFT
        assert self.lender.held() == NOTHING_LEFT


def moved(account: KvAccount) -> tuple[int, int, int, int, int]:
    """Blocks reused, moved and computed; tokens computed; blocks that arrived wrong."""
    return (
        account.reused_blocks,
        account.moved_blocks,
        account.computed_blocks,
        account.computed_tokens,
        account.mismatched_blocks,
    )
