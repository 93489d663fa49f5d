"""An engine under trial, and those who talk to it: clients, and streams to other engines."""

from collections import deque
from dataclasses import dataclass, field

from engine.core import CoreLimits, EngineCore
from engine.messages import FromEngine, Generate, ToEngine, Token
from engine.scheduler import StepBudget
from engine.sim.runner import SimRunner
from engine.vocabulary import BeamParams, Chunk, Sampled, SamplingParams
from kvtransfer.fingerprint import fingerprint_blocks
from kvtransfer.transport import Pool
from support.sim_model import LAYOUT, VOCAB
from support.slow_transport import SlowTransport


class Node:
    """One engine process."""

    def __init__(
        self, network: dict[bytes, Pool], name: str, num_blocks: int, budget: StepBudget, reserve: int = 256
    ) -> None:
        self.name = name
        self.alive = True
        self.said: list[FromEngine] = []
        self.transport = SlowTransport(network, name)
        self.runner = SimRunner(LAYOUT, num_blocks, VOCAB)
        limits = CoreLimits(budget, 4, reserve, report_interval_s=0.0)
        self.core = EngineCore(self.runner, self.transport, limits, self.said.append)
        self.endpoint = self.core.start().endpoint
        self.batch: list[Chunk] = []
        """Being computed: `end_step` is still to come."""
        self.sampled: list[Sampled] | None = None

    def tell(self, message: ToEngine) -> None:
        self.core.post(message)
        self.core.handle_posted()

    def check(self) -> None:
        """The books balance, and nothing is anybody's that a read may still write into."""
        audited = self.core.audit()
        assert audited.fault == "", f"{self.name}: {audited.fault}"
        pool = self.core._books.pool
        for read in self.transport.posted.values():
            for block in read.blocks():
                owners = [
                    request.borrowing
                    for request in self.core._requests._requests.values()
                    if any(block in chain.blocks for chain in request.chains.values())
                ]
                owners += [
                    loan.fetching
                    for loan in self.core._lending._loans.values()
                    if loan.job is not None and block in loan.job.blocks
                ]
                if block in pool._quarantined:
                    assert not owners, f"{self.name}: block {block} is quarantined and owned"
                else:
                    assert len(owners) == 1, f"{self.name}: block {block} is read into and has {len(owners)} owners"
                    assert owners[0], f"{self.name}: block {block} is in use while a read is in flight"
                    assert block not in pool._name_of, f"{self.name}: block {block} is named while a read is in flight"

    def check_contents(self) -> None:
        """A named block never changes after its fingerprint was taken."""
        books = self.core._books
        blocks = sorted(books.pool._name_of)
        now = fingerprint_blocks(self.runner.pool.memory, blocks, LAYOUT.kv_heads)
        assert now.tobytes() == books.fingerprints_of(blocks), f"{self.name}: a named block has changed"


@dataclass(eq=False)
class Client:
    """A request as its client sees it, over all attempts."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    num_choices: int = 1
    num_beams: int = 0
    scored: bool = False
    """It wants log probabilities of its prompt."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By choice."""
    finished: set[int] = field(default_factory=set)
    scores: list[float] = field(default_factory=list)
    state: str = "new"
    attempt: str = ""
    """The request id of the latest attempt."""

    @property
    def sampling(self) -> SamplingParams:
        beam = BeamParams(self.num_beams) if self.num_beams else None
        scores = 0 if self.scored else None
        return SamplingParams(self.max_tokens, n=self.num_choices, beam=beam, prompt_logprobs=scores)

    def chain(self) -> tuple[int, ...]:
        """The tokens of the choice that borrows for all."""
        if self.num_beams:
            return self.prompt
        lead = next(choice for choice in range(self.num_choices) if choice not in self.finished)
        return (*self.prompt, *self.tokens.get(lead, ()))


@dataclass(eq=False)
class Stream:
    """The RPC of one loan. It keeps order within a direction; when it breaks, what was under way may be lost."""

    loan_id: str
    request_id: str
    """Of the request, or the id of the loan given, that it is for."""
    borrower: Node
    lender: Node
    tokens: tuple[int, ...]
    to_lender: deque[ToEngine] = field(default_factory=deque)
    to_borrower: deque[ToEngine] = field(default_factory=deque)
    closed: bool = False
    broken: bool = False


def searched(client: Client) -> dict[int, list[int]]:
    """The beams that an engine finds which has room for all, and nobody beside it."""
    node = Node({}, "alone", 200, StepBudget(64, 64))
    node.tell(Generate("r", client.prompt, (), client.sampling, "", 0, borrow=False))
    while node.core.step():
        pass
    found: dict[int, list[int]] = {}
    for message in node.said:
        if isinstance(message, Token):
            found.setdefault(message.choice, []).append(message.token_id)
    return found
