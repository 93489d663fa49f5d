"""An engine alone, its books checked after every move. Eight blocks of four tokens."""

from collections.abc import Sequence
from dataclasses import replace

from engine.backends.sim.runner import SimRunner
from engine.core.loan_host import EngineLimits
from engine.core_types import SamplingParams, StepBudget
from engine.messages.from_engine import Token
from engine.messages.to_engine import Generate
from kvcache.block_keys import block_keys, root_key
from kvcache.items import Item
from kvtransfer.fingerprint import fingerprint_blocks
from kvtransfer.local import LocalNetwork, LocalTransport
from loans.account import KvAccount
from loans.network import NO_MARK, Lender, Peer, PlacementMark, Want
from support.checked_core import LandingCore, PeerWants
from support.hand_network import HandNetwork
from support.sim_model import LAYOUT, VOCAB, WIDTH

WIDE = StepBudget(64, 64)
TEN = tuple(range(10, 20))
TWELVE = tuple(range(10, 22))


class Engine(LandingCore):
    """One that computes with the simulated model, and reads over a transport of this process."""

    def __init__(
        self,
        name: str = "engine",
        num_blocks: int = 8,
        budget: StepBudget = WIDE,
        network: LocalNetwork | None = None,
        eager: bool = True,
        max_queued_loans: int = 2,
        engines: dict[bytes, HandNetwork] | None = None,
        reads_media: bool = True,
    ) -> None:
        """`engines`: those whose loans it can take."""
        self.transport = LocalTransport(network or LocalNetwork(), name, eager)
        self.runner = SimRunner(LAYOUT, num_blocks, VOCAB)
        self.runner.info = replace(self.runner.info, reads_media=reads_media)
        limits = EngineLimits(budget, max_queued_loans, report_interval_s=0.0, min_report_interval_s=0.0)
        super().__init__(self.runner, self.transport, limits, HandNetwork({} if engines is None else engines, name))

    def land(self) -> bool:
        return self.transport.step()


def generate(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 2,
    emitted: Sequence[int] = (),
    lender: Peer | Lender | None = None,
    salt: str = "",
    priority: int = 0,
    sampling: SamplingParams | None = None,
    items: Sequence[Item] = (),
) -> Generate:
    """`lender`: a peer may compute for it."""
    sampling = sampling or SamplingParams(max_tokens)
    lender = Lender(lender) if isinstance(lender, Peer) else lender
    return Generate(request_id, tuple(prompt), tuple(emitted), sampling, salt, priority, lender, items=tuple(items))


def lend(
    loan_id: str,
    tokens: Sequence[int],
    first: int = 0,
    compute: bool = True,
    priority: int = 0,
    items: Sequence[Item] = (),
    mark: PlacementMark = NO_MARK,
) -> PeerWants:
    """What a peer sends that wants all full blocks of these tokens from the `first` one on."""
    root = root_key(LAYOUT.fingerprint(b"sim"), "")
    keys = block_keys(root, tokens, WIDTH, items)
    return PeerWants(
        loan_id, Want("", keys, first, compute, tuple(tokens), root, priority, mark=mark, items=tuple(items))
    )


def tokens_of(messages: Sequence[Token], request_id: str) -> list[int]:
    return [message.token_id for message in messages if message.request_id == request_id]


def account_of(messages: Sequence[Token]) -> KvAccount:
    accounts = [message.account for message in messages if message.account is not None]
    assert len(accounts) == 1
    assert messages[0].account is accounts[0], "it comes with the first token"
    return accounts[0]


def prints(engine: Engine, blocks: Sequence[int]) -> bytes:
    return fingerprint_blocks(engine.runner.pool.memory, list(blocks), LAYOUT.kv_heads).tobytes()
