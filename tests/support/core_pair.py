"""Two engines, with every message carried by hand."""

from collections.abc import Sequence

from engine.core_types import StepBudget
from engine.messages.from_engine import Filled, Rejected, Token
from kvcache.items import Item
from kvtransfer.local import LocalNetwork
from loans.account import KvAccount
from loans.network import Lender
from support.checked_core import NOTHING_LEFT, LandingCore
from support.core_engine import WIDE, Engine, account_of, generate, tokens_of
from support.hand_network import HandNetwork
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
        network, peers = LocalNetwork(), dict[bytes, HandNetwork]()
        self.borrower, self.lender = engines or (
            Engine("borrower", network=network, eager=eager, engines=peers),
            Engine("lender", network=network, budget=lender_budget, engines=peers),
        )
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.items: dict[str, Sequence[Item]] = {}
        self.may_compute = may_compute
        self.tokens: list[Token] = []
        self.rejected: list[Rejected] = []
        self.filled: list[Filled] = []

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int = 2, items: Sequence[Item] = ()) -> None:
        self.prompts[request_id], self.items[request_id] = prompt, items
        lender = Lender(self.lender.network.peer, self.may_compute)
        self.borrower.send(generate(request_id, prompt, max_tokens, lender=lender, items=items))

    def carry(self) -> bool:
        """What each said so far, to the other; False when that was nothing."""
        self.hear()
        carried = [stream.carry() for stream in self.borrower.network.taken]
        self.lender.turn()
        self.borrower.turn()
        return any(carried)

    def hear(self) -> None:
        """Keep what the borrower said to its front."""
        for message in self.borrower.receive(Token, Rejected, Filled):
            match message:
                case Token():
                    self.tokens.append(message)
                case Rejected():
                    self.rejected.append(message)
                case Filled():
                    self.filled.append(message)

    def run(self) -> None:
        while self.carry() | self.lender.step() | self.borrower.step() | self.land():
            pass
        self.carry()

    def land(self) -> bool:
        """One read of the borrower's, if there is one."""
        return self.borrower.land()

    def served(self, request_id: str, max_tokens: int = 2) -> KvAccount:
        """Run, check the request as `check_served` does, and return its account."""
        self.run()
        self.check_served(request_id, max_tokens)
        return account_of(self.tokens)

    def check_served(self, request_id: str, max_tokens: int = 2, borrows: bool = True) -> None:
        """`borrows`: surely, not only perhaps."""
        wanted = undisturbed(self.prompts[request_id], max_tokens, items=self.items[request_id])
        assert tokens_of(self.tokens, request_id) == wanted
        ends = [stream.closed for stream in self.borrower.network.taken if stream.borrower_id == request_id]
        assert ends == [True] or (not ends and not borrows)
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
