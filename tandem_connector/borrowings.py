"""Loans that an engine's requests take: from the search for a lender until vLLM has the blocks.

    SEARCHING ──lender known──▶ BORROWING ──loan over──▶ HELD ──vLLM has allocated──▶ OVER
        └────────────────none, or no reference────────────────────────────────────────┘

Blocks are allocated when a loan is opened, on vLLM's thread. What a loan brought is held until vLLM has taken it, or
until requests starve for lack of blocks.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from cluster.logs import of
from kvcache.block_keys import BlockKey
from kvcache.chain import Chain
from loans.account import KvAccount
from loans.borrower_manager import BorrowerManager
from loans.loan import BorrowRequest
from loans.network import Lender, Peer
from tandem_connector.kv import BorrowedChain, ConnectorKv, RequestNames
from tandem_connector.lenders import Lenders, Search, Server
from tandem_connector.metrics import Counters
from tandem_connector.servers import Prompt, Servers, read_reference
from tandem_connector.settings import is_loopback

log = logging.getLogger(__name__)

STARVING = "vLLM's requests need the blocks"
AFTER_ANSWER_S = 1.0
"""Seconds for the last blocks after a lender's server has answered."""


class Phase(Enum):
    """State of a request that borrows, by what it waits for."""

    SEARCHING = auto()
    """Its lender."""
    BORROWING = auto()
    """The end of its loan."""
    HELD = auto()
    """vLLM, to take the blocks that are held for it."""
    OVER = auto()
    """Nothing."""


@dataclass(slots=True, eq=False)
class Borrowing:
    """One request's loan, from the search for a lender to the end."""

    began_at: float
    search: Search | None = None
    """Search for a lender; None where the request names its engine."""
    peer: Peer | None = None
    server: Server | None = None
    phase: Phase = Phase.SEARCHING
    chain: BorrowedChain | None = None
    account: KvAccount = field(default_factory=KvAccount)
    posted: "Future[None] | None" = None
    """Call of the lender's server, which computes the prompt."""
    progress_at: float = 0.0
    """Time of the last block, or of the lender's answer."""
    patience_s: float = 0.0
    bound_tokens: int = 0
    was_looked_up: bool = False
    """Whether vLLM has looked its cache up since the loan's end."""
    failure: str = ""
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Tracked:
    """One of vLLM's requests."""

    request: Any
    names: RequestNames | None
    """None where its blocks have no names."""
    borrowing: Borrowing | None = None
    was_decided: bool = False
    """Whether it is settled what the request borrows."""
    num_found: int = 0
    """Tokens that vLLM found in its cache when it gave it blocks."""
    num_named: int = 0
    """Leading keys whose blocks were named since vLLM gave it blocks."""

    @property
    def is_for_borrower(self) -> bool:
        """Whether its prompt is computed so that another server can borrow it."""
        return bool((self.request.kv_transfer_params or {}).get("do_remote_decode"))


@dataclass(frozen=True, slots=True)
class BorrowingRules:
    """Rules that decide which requests borrow, and for how long."""

    borrows: bool
    is_guarded: bool
    """Whether peers prove that they may borrow; else only lenders of this host are asked."""
    min_tokens: int
    patience_s: float


class Borrowings:
    """All loans taken; implements `LoanOwner`. Its methods are called with the lock held."""

    def __init__(
        self,
        kv: ConnectorKv,
        borrower: BorrowerManager,
        lenders: Lenders,
        servers: Servers,
        rules: BorrowingRules,
        own_incarnation: bytes,
        counters: Counters,
        flush: Callable[[], object],
        wake: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        """Create it; `flush` sends what was said to lenders, `wake` has the thread of loans take a turn."""
        self._kv = kv
        self._unit = kv.layout.block_tokens
        self._borrower = borrower
        self._lenders = lenders
        self._servers = servers
        self._rules = rules
        self._own_incarnation = own_incarnation
        self._counters = counters
        self._flush, self._wake, self._clock = flush, wake, clock
        self.open: dict[str, Tracked] = {}
        """Requests with a search, a loan or blocks that are held."""
        self._num_loans = 0

    # ------------------------------------------------------------------ what vLLM asks

    def may_schedule(self, tracked: Tracked, num_cached: int) -> bool:
        """Return whether vLLM may schedule a request, of which it has `num_cached` tokens in its cache."""
        if not tracked.was_decided and not self._decide(tracked, num_cached):
            return True
        if (borrowing := tracked.borrowing) is None:
            return True
        if borrowing.phase is Phase.SEARCHING:
            self._go_on(tracked, borrowing)
        if borrowing.phase in (Phase.SEARCHING, Phase.BORROWING):
            return False
        if num_cached < borrowing.bound_tokens and not borrowing.was_looked_up:
            borrowing.was_looked_up = True
            return False
        return True

    def allocated(self, tracked: Tracked) -> None:
        """Process that vLLM has given a request its blocks, among them those that were held for it."""
        if (borrowing := tracked.borrowing) is not None and borrowing.phase is Phase.HELD:
            self._let_go(tracked, borrowing)

    def turn(self, now: float) -> None:
        """End loans of which no block comes."""
        for tracked in list(self.open.values()):
            borrowing = tracked.borrowing
            assert borrowing is not None
            if borrowing.phase is Phase.BORROWING and now - borrowing.progress_at >= borrowing.patience_s:
                self._end_loan(borrowing, f"no block came for {borrowing.patience_s:g} s")

    def cancel(self, tracked: Tracked) -> None:
        """End what a request borrows: the request is over, or the cache is being emptied."""
        if tracked.borrowing is not None:
            self._cancel(tracked, tracked.borrowing)

    def cancel_all(self) -> None:
        for tracked in list(self.open.values()):
            self.cancel(tracked)

    def give_way(self) -> bool:
        """Give the last request's held or borrowed blocks back; return whether there were any."""
        for tracked in reversed(list(self.open.values())):
            borrowing = tracked.borrowing
            assert borrowing is not None
            if borrowing.phase is Phase.BORROWING:
                self._end_loan(borrowing, STARVING)
                return True
            if borrowing.phase is Phase.HELD and borrowing.chain is not None and borrowing.chain.blocks:
                self._let_go(tracked, borrowing)
                return True
        return False

    def receipt_of(self, tracked: Tracked) -> dict[str, Any]:
        borrowing = tracked.borrowing
        assert borrowing is not None
        request, account = tracked.request, borrowing.account
        total = (request.num_prompt_tokens - 1) // self._unit
        return {
            "blocks": total,
            "borrowed": account.moved_blocks,
            "computed": total - borrowing.bound_tokens // self._unit,
            "mismatched": account.mismatched_blocks,
            "lender": borrowing.server.url if borrowing.server else borrowing.peer.address if borrowing.peer else "",
            "seconds": round(borrowing.seconds, 4),
            "failure": borrowing.failure,
        }

    # ------------------------------------------------------------------ one request's loan

    def _decide(self, tracked: Tracked, num_cached: int) -> bool:
        """Decide what a request borrows; return whether that is settled, as it is not where blocks are lacking."""
        request, names = tracked.request, tracked.names
        params = request.kv_transfer_params or {}
        usable = (request.num_prompt_tokens - 1) // self._unit
        missing = usable * self._unit - num_cached
        tracked.was_decided = True
        if not self._rules.borrows or names is None or tracked.is_for_borrower or request.skip_reading_prefix_cache:
            return True
        if missing < max(self._unit, self._rules.min_tokens) or request.num_preemptions:
            return True
        named = params.get("lender")
        if not (params.get("do_remote_prefill") or named or self._lenders.are_configured):
            return True
        now = self._clock()
        borrowing = Borrowing(now, progress_at=now, patience_s=self._rules.patience_s)
        if params.get("do_remote_prefill"):
            try:
                borrowing.peer = read_reference(params).peer
            except ValueError as error:
                self._not_borrowed(tracked, borrowing, str(error))
                return True
            if not self._rules.is_guarded and not is_loopback(borrowing.peer.address):
                reason = "is not loopback, and this server has neither tls_ca nor secret_file"
                self._not_borrowed(tracked, borrowing, f"kv_transfer_params.remote_host: {reason}")
                return True
            if borrowing.peer.incarnation == self._own_incarnation:
                return True  # its own cache has what there is
        elif named is not None and not isinstance(named, str):
            self._not_borrowed(tracked, borrowing, "kv_transfer_params.lender: must be the URL of a server")
            return True
        else:
            borrowing.search = self._lenders.search(names.upto(usable), named or "", now)
            self._wake()
        tracked.borrowing = borrowing
        self.open[request.request_id] = tracked
        return self._go_on(tracked, borrowing)

    def _go_on(self, tracked: Tracked, borrowing: Borrowing) -> bool:
        """Open the loan once its lender is known; return False where there is no room for its blocks now."""
        search = borrowing.search
        if search is not None:
            if not search.is_over:
                return True
            if search.lender is None or search.lender.reference is None:
                self._not_borrowed(tracked, borrowing, search.failure or "the lender is not known any more")
                return True
            borrowing.server, borrowing.peer = search.lender, search.lender.reference.peer
        return self._open(tracked, borrowing)

    def _open(self, tracked: Tracked, borrowing: Borrowing) -> bool:
        request, names, peer = tracked.request, tracked.names, borrowing.peer
        assert names is not None
        assert peer is not None
        tokens = list(request.prompt_token_ids)
        keys = names.upto((len(tokens) - 1) // self._unit)
        self._kv.hashes.learn(keys, request.block_hashes)
        self._num_loans += 1
        chain = BorrowedChain(
            request_id=request.request_id,
            token_ids=tokens,
            num_prompt=len(tokens),
            root=names.root,
            priority=0,
            arrival=self._num_loans,
            adapter=names.adapter,
            items=names.items,
            given_keys=tuple(keys),
        )
        if not self._kv.start_borrowing(chain, keys):
            self._forget(tracked)
            tracked.borrowing, tracked.was_decided = None, False
            return False
        may_compute = borrowing.server is not None and not names.items
        wanted = BorrowRequest(
            chain,
            keys,
            self._kv.range_of(chain, keys),
            Lender(peer, may_compute),
            borrowing.account,
            self,
            log_id=request.request_id,
        )
        borrowing.chain, borrowing.phase, borrowing.progress_at = chain, Phase.BORROWING, self._clock()
        if not self._borrower.take(wanted):
            self.loan_over(chain, lost_blocks=False)
            return True
        self._counters.loans_taken += 1
        if may_compute and borrowing.phase is Phase.BORROWING:
            self._post(tracked, borrowing, keys)
        self._flush()
        return True

    def _post(self, tracked: Tracked, borrowing: Borrowing, keys: list[BlockKey]) -> None:
        """Have the lender's server compute the prompt, with one token beyond the blocks that are borrowed."""
        request, server = tracked.request, borrowing.server
        assert server is not None
        assert server.reference is not None
        prompt = Prompt(
            list(request.prompt_token_ids[: len(keys) * self._unit + 1]),
            "" if request.lora_request is None else request.lora_request.lora_name,
            request.cache_salt or "",
            request.priority,
            server.reference.rank,
        )
        borrowing.posted = self._servers.post(server.url, prompt, partial(self._answered, borrowing))

    def _answered(self, borrowing: Borrowing, failure: str) -> None:
        """Process that the lender's server has answered: the last blocks come now, or none do."""
        borrowing.posted = None
        if borrowing.phase is not Phase.BORROWING:
            return
        if failure:
            self._end_loan(borrowing, failure)
        else:
            borrowing.progress_at, borrowing.patience_s = self._clock(), AFTER_ANSWER_S

    def _end_loan(self, borrowing: Borrowing, failure: str) -> None:
        chain = borrowing.chain
        assert chain is not None
        borrowing.failure = failure
        self._borrower.cancel(chain.request_id)
        self.loan_over(chain, lost_blocks=False)

    def _not_borrowed(self, tracked: Tracked, borrowing: Borrowing, failure: str) -> None:
        log.info("borrows nothing: %s", failure, extra=of(tracked.request.request_id))
        borrowing.failure, borrowing.phase = failure, Phase.OVER
        self._counters.loans_failed += 1
        tracked.borrowing = borrowing
        self._forget(tracked)

    def _forget(self, tracked: Tracked) -> None:
        self.open.pop(tracked.request.request_id, None)

    # ------------------------------------------------------------------ the borrower's calls

    def loan_bound(self, sequence: Chain, first: int) -> None:
        borrowing = self.open[sequence.request_id].borrowing
        assert borrowing is not None
        borrowing.progress_at = self._clock()

    def loan_hedged(self, sequence: Chain) -> bool:
        """Return False: the loan ends, and vLLM computes what is missing."""
        return False

    def loan_over(self, sequence: Chain, lost_blocks: bool) -> None:
        """Hold what was bound for vLLM."""
        tracked = self.open[sequence.request_id]
        borrowing = tracked.borrowing
        assert borrowing is not None
        account, now = borrowing.account, self._clock()
        assert borrowing.chain is not None
        self._kv.keep_bound(borrowing.chain)
        borrowing.phase = Phase.HELD
        borrowing.bound_tokens = borrowing.chain.num_computed
        borrowing.seconds = now - borrowing.began_at
        borrowing.failure = borrowing.failure or account.loan_failure
        self._stop_posting(borrowing)
        counters = self._counters
        counters.blocks_borrowed += account.moved_blocks
        counters.bytes_borrowed += account.moved_bytes
        counters.blocks_mismatched += account.mismatched_blocks
        counters.seconds.append(borrowing.seconds)
        if borrowing.failure:
            counters.loans_failed += 1
            if borrowing.server is not None and borrowing.peer is not None and account.loan_failure:
                self._lenders.failed(borrowing.server, borrowing.peer, now)

    # ------------------------------------------------------------------ ends

    def _let_go(self, tracked: Tracked, borrowing: Borrowing) -> None:
        """Drop the references on blocks that were held for a request."""
        assert borrowing.chain is not None
        self._kv.finish(borrowing.chain)
        borrowing.phase = Phase.OVER
        self._forget(tracked)

    def _cancel(self, tracked: Tracked, borrowing: Borrowing) -> None:
        if borrowing.search is not None:
            self._lenders.give_up(borrowing.search)
        self._stop_posting(borrowing)
        if borrowing.phase is Phase.BORROWING:
            assert borrowing.chain is not None
            self._borrower.cancel(borrowing.chain.request_id)
            borrowing.phase = Phase.HELD
        if borrowing.phase is Phase.HELD:
            self._let_go(tracked, borrowing)
            self._flush()
        borrowing.phase = Phase.OVER
        self._forget(tracked)

    def _stop_posting(self, borrowing: Borrowing) -> None:
        if borrowing.posted is not None:
            borrowing.posted.cancel()
            borrowing.posted = None
