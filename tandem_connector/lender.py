"""Lender of the blocks that vLLM's requests fill.

It computes nothing: the borrower posts its prompt to this server's own API. A loan lends what is cached, and then each
block that some request fills under a wanted name. A block is held from the moment it is seen, its fingerprint is
taken, and then it is announced:

    open ──▶ seen blocks held ──fingerprints──▶ announced, held by the loan ──release, or the loan's end──▶ free

Blocks of a prompt that is computed for a borrower get their fingerprints as soon as they are filled, loan or not.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, NamedTuple

from cluster.logs import of
from kvcache.chain import BlockRange
from loans.lender import (
    Action,
    Announce,
    Closed,
    Computed,
    LenderLoan,
    Lost,
    Refuse,
    Released,
    SendStarting,
    Start,
    Unhold,
)
from loans.lender_manager import want_fault
from loans.network import Blocks, LoanGiven, Started, Want
from tandem_connector.kv import ConnectorKv
from tandem_connector.metrics import Counters

log = logging.getLogger(__name__)


class Seen(NamedTuple):
    """Blocks that are held until their fingerprints are known."""

    loan: "GivenLoan | None"
    """Loan that announces them then; None for blocks that a loan may want later."""
    blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class GivenLoan:
    """One loan given."""

    channel: LoanGiven
    want: Want
    machine: LenderLoan
    block_range: BlockRange
    num_seen: int
    """Blocks of the range, by position, that were seen."""
    seen: list[int] = field(default_factory=list)
    """Blocks that are held and not announced yet."""

    @property
    def wants_more(self) -> bool:
        return self.num_seen < len(self.block_range.names)


class WatchingLender:
    """All loans given by one engine; one thread calls it at a time."""

    def __init__(
        self, kv: ConnectorKv, vocab_size: int, num_requests_waiting: Callable[[], int], counters: Counters
    ) -> None:
        self._kv = kv
        self._pool = kv.pool
        self._vocab_size = vocab_size
        self._num_requests_waiting = num_requests_waiting
        self._loans: dict[LoanGiven, GivenLoan] = {}
        self._seen: list[Seen] = []
        self._early: list[tuple[int, ...]] = []
        """Blocks that are held for their fingerprints alone."""
        self._counters = counters

    @property
    def num_loans(self) -> int:
        return len(self._loans)

    @property
    def num_waiting(self) -> int:
        return self._num_requests_waiting()

    @property
    def is_watching(self) -> bool:
        """Whether some loan waits for blocks that a request may fill."""
        return any(loan.wants_more for loan in self._loans.values())

    @property
    def has_seen(self) -> bool:
        """Whether blocks wait for their fingerprints."""
        return bool(self._seen)

    def holdings(self) -> list[list[int]]:
        """Return the block lists on which loans hold references."""
        early = [list(blocks) for blocks in self._early]
        return [*early, *([*loan.machine.held_blocks, *loan.seen] for loan in self._loans.values())]

    # ------------------------------------------------------------------ the network's calls

    def open(self, channel: LoanGiven, want: Want) -> None:
        """Take a loan, or refuse it."""
        if refusal := want_fault(want, self._kv.layout.block_tokens, self._vocab_size):
            channel.refuse(refusal)
            return
        end = len(want.keys) if want.may_compute else max(self._kv.num_cached(want.keys), want.first_block)
        block_range = self._kv.range_between(want.keys, want.first_block, end)
        loan = GivenLoan(channel, want, LenderLoan(block_range.start), block_range, block_range.start)
        self._loans[channel] = loan
        self._counters.loans_given += 1
        channel.send(Started(block_range.end, self._kv.num_cached(want.keys[:end]), 0.0))
        loan.machine.handle(Start((), len(block_range.names)))
        self._look(loan)

    def release(self, channel: LoanGiven, first: int, num_blocks: int) -> None:
        if (loan := self._loans.get(channel)) is not None:
            self._perform(loan, loan.machine.handle(Released(first, num_blocks)))

    def close(self, channel: LoanGiven) -> None:
        if (loan := self._loans.get(channel)) is not None:
            self._perform(loan, loan.machine.handle(Closed()))

    def start_queued(self) -> None:
        """Do nothing: no loan waits here."""

    def refuse_queued(self, reason: str) -> None:
        """Do nothing: no loan waits here."""

    def lose(self, reason: str) -> bool:
        """End the oldest loan that holds blocks; return whether there was one."""
        for loan in self._loans.values():
            if loan.seen or loan.machine.held_blocks:
                self._perform(loan, loan.machine.handle(Lost(reason)))
                return True
        return False

    def end_all(self, reason: str) -> None:
        for loan in list(self._loans.values()):
            self._perform(loan, loan.machine.handle(Lost(reason)))

    # ------------------------------------------------------------------ blocks

    def look(self) -> None:
        """Hold the blocks that loans want and that are named by now."""
        for loan in list(self._loans.values()):
            if loan.wants_more:
                self._look(loan)

    def fingerprint_early(self, blocks: Sequence[int]) -> None:
        """Have the fingerprints of named blocks taken now."""
        if held := tuple(self._kv.unhashed(blocks)):
            self._pool.acquire(held)
            self._early.append(held)
            self._seen.append(Seen(None, held))

    def take_seen(self) -> list[Seen]:
        """Return what was seen since the last call; `announce` must follow for each."""
        seen, self._seen = self._seen, []
        return seen

    def announce(self, seen: Sequence[Seen], hashed: Sequence[int], fingerprints: Any) -> None:
        """Announce blocks that were seen, with the `fingerprints` of those that are `hashed`.

        A loan that ended meanwhile has let its blocks go. Other requests may have written into them, before their
        fingerprints were taken or after.
        """
        held = {block for loan, blocks in seen if loan is None or not loan.machine.done for block in blocks}
        kept = [at for at, block in enumerate(hashed) if block in held]
        self._kv.hashed([hashed[at] for at in kept], fingerprints[kept])
        for loan, blocks in seen:
            if loan is None:
                self._early.remove(blocks)
                self._pool.release(blocks)
                continue
            if loan.machine.done:
                continue
            self._perform(loan, loan.machine.handle(Computed(blocks)))
            del loan.seen[: len(blocks)]
            self._pool.release(blocks)  # the loan's own references stay

    def _look(self, loan: GivenLoan) -> None:
        names = islice(loan.block_range.names, loan.num_seen, None)
        blocks = tuple(takewhile(lambda block: block is not None, (self._block_of(name) for name in names)))
        if blocks:
            self._pool.acquire(blocks)  # type: ignore[arg-type]
            loan.num_seen += len(blocks)
            loan.seen += blocks  # type: ignore[arg-type]
            self._seen.append(Seen(loan, blocks))  # type: ignore[arg-type]

    def _block_of(self, name: bytes) -> int | None:
        found = self._pool.match([name])
        return found[0] if found else None

    def _perform(self, loan: GivenLoan, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Announce(first, block_ids, _):
                    self._pool.acquire(block_ids)
                    self._counters.blocks_lent += len(block_ids)
                    loan.channel.send(Blocks(first, block_ids, self._kv.cached.fingerprints_of(block_ids)))
                case Unhold(block_ids):
                    self._pool.release(block_ids)
                case Refuse(reason, bad_request):
                    level = logging.WARNING if bad_request else logging.INFO
                    log.log(level, "a loan ends: %s", reason, extra=of(loan.want.request_id))
                    loan.channel.refuse(reason)
                case SendStarting():
                    pass  # sent by `open`, before any block
        if loan.machine.done:
            self._loans.pop(loan.channel, None)
            held, loan.seen = loan.seen, []
            self._pool.release(held)


def fingerprint(
    kv: ConnectorKv, seen: Sequence[Seen], compute: Callable[[Sequence[int]], Any]
) -> tuple[list[int], Any]:
    """Return the blocks among those seen whose fingerprints are not known, and these fingerprints.

    It may be called beside the thread that owns the loans: all blocks are held, but for those of loans that end
    meanwhile, whose fingerprints `announce` drops.
    """
    blocks = list(dict.fromkeys(kv.unhashed([block for each in seen for block in each.blocks])))
    return blocks, compute(blocks) if blocks else kv.empty_fingerprints()
