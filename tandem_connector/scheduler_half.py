"""The connector's half in vLLM's engine process: it borrows for requests that wait, and lends what requests fill.

    vLLM's thread                                     thread of loans (`service.py`)
    get_num_new_matched_tokens ─ begins, opens ──▶    bytes arrive, are verified, and become prefix-cache blocks
      answers None until the loan is over     ◀──     the loan is over
    update_connector_output, request_finished ──▶     fingerprints are taken, blocks are announced
      name what steps have filled

Both hold one lock (`pool_lock.py`). Only vLLM's thread allocates blocks. A borrowed block is held until vLLM has taken
it, or until requests starve for lack of blocks.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from vllm.v1.request import RequestStatus

from cluster.logs import of
from kvcache.block_keys import BlockKey
from kvcache.chain import Chain
from loans.account import KvAccount
from loans.component import HostCalls, Loans, Ranks
from loans.loan import BorrowRequest
from loans.messages import Lender, Peer
from loans.network import LoanNetwork
from tandem_connector.kv import BorrowedChain, ConnectorKv
from tandem_connector.lender import WatchingLender
from tandem_connector.lenders import Lenders, Search, Server
from tandem_connector.metrics import Counters
from tandem_connector.names import Naming, RequestNames
from tandem_connector.references import read_reference, write_reference
from tandem_connector.servers import Prompt, Servers
from tandem_connector.settings import is_loopback

log = logging.getLogger(__name__)

STARVING = "vLLM's requests need the blocks"
AFTER_ANSWER_S = 1.0
"""Seconds for the last blocks after a lender's server has answered."""


class Phase(Enum):
    """What a request that borrows waits for."""

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
    num_named: int = 0
    """Leading keys whose blocks were named since vLLM gave it blocks."""


class SchedulerHalf:
    """All loans of one engine; its methods are called with the lock held."""

    def __init__(
        self,
        kv: ConnectorKv,
        ranks: Ranks,
        transport_name: str,
        network: LoanNetwork,
        naming: Naming,
        servers: Servers,
        configured: tuple[str, ...],
        trusted: tuple[str, ...],
        vocab_size: int,
        borrows: bool,
        lends: bool,
        is_guarded: bool,
        min_tokens: int,
        patience_s: float,
        read_silence_s: float,
        incarnation: bytes,
        rank: int,
        tensor_parallel: int,
        wake: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        """Create it; `wake` has the thread of loans take a turn, from any thread."""
        self.kv = kv
        self._unit = kv.layout.block_tokens
        self._naming = naming
        self._servers = servers
        self._borrows, self._lends, self._is_guarded = borrows, lends, is_guarded
        self._min_tokens, self._patience_s = min_tokens, patience_s
        self._wake, self._clock = wake, clock
        self._requests: dict[str, Tracked] = {}
        self._borrowing: dict[str, Tracked] = {}
        """Requests with a search, a loan or blocks that are held."""
        self._waiting: dict[str, None] = {}
        """Requests to which vLLM has given no blocks yet."""
        self._prefilling: dict[str, Tracked] = {}
        """Running requests whose prompt is not computed."""
        self._refused: dict[str, None] = {}
        """Requests that may run and had no room in the step that is being scheduled."""
        self._arrivals = 0
        self.counters = Counters()
        host = HostCalls(self._next_arrival, lambda: False, lambda mark: None, lambda: wake())
        self.loans = Loans[WatchingLender](
            kv,
            ranks,
            transport_name,
            network,
            host,
            lambda borrower: WatchingLender(kv, vocab_size, self._num_waiting, self.counters),
            read_silence_s,
        )
        self.lenders = Lenders(configured, trusted, servers, network, incarnation)
        self.identity = Peer("", "", incarnation)
        """This engine, as borrowers reach it once `start` was called."""
        self.rank, self.tensor_parallel = rank, tensor_parallel

    def start(self, model_fingerprint: bytes, endpoint: bytes) -> str:
        """Take loans from now on; return the address for borrowers. Raises StartError."""
        address = self.loans.start(model_fingerprint, endpoint)
        self.identity = Peer(address, address, self.identity.incarnation)
        return address

    # ------------------------------------------------------------------ vLLM's calls

    def on_new_request(self, request: Any) -> None:
        names = self._naming.of(request) if request.pooling_params is None else None
        self._requests[request.request_id] = Tracked(request, names)
        self._waiting[request.request_id] = None

    def may_schedule(self, request: Any, num_cached: int) -> bool:
        """Return whether vLLM may schedule a request, of which it has `num_cached` tokens in its cache."""
        request_id = request.request_id
        tracked = self._requests.get(request_id)
        if tracked is None or (not tracked.was_decided and not self._decide(tracked, num_cached)):
            self._refused[request_id] = None
            return True
        borrowing = tracked.borrowing
        if borrowing is not None:
            if borrowing.phase is Phase.SEARCHING:
                self._go_on(tracked, borrowing)
            if borrowing.phase in (Phase.SEARCHING, Phase.BORROWING):
                return False
            if num_cached < borrowing.bound_tokens and not borrowing.was_looked_up:
                borrowing.was_looked_up = True
                return False
        self._refused[request_id] = None
        return True

    def allocated(self, request: Any) -> None:
        """Process that vLLM has given a request its blocks, among them those that were held for it."""
        request_id = request.request_id
        self._refused.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if (tracked := self._requests.get(request_id)) is None:
            return
        if tracked.names is not None and self._lends:
            tracked.num_named = 0
            self._prefilling[request_id] = tracked
        if (borrowing := tracked.borrowing) is not None and borrowing.phase is Phase.HELD:
            self._let_go(tracked, borrowing)

    def scheduled(self, num_tokens: int) -> None:
        """Process that a step was scheduled; give blocks back where none could be, for lack of blocks."""
        if self._refused and not num_tokens and not self._is_running():
            self._give_way()
        self._refused.clear()

    def step_ended(self) -> None:
        """Name the blocks that the prompts of running requests have filled."""
        for request_id, tracked in list(self._prefilling.items()):
            request = tracked.request
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._name(tracked, computed)
            if computed >= request.num_prompt_tokens:
                del self._prefilling[request_id]
        self._look()

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Process that a request is over, and still has its blocks; return the `kv_transfer_params` of its answer."""
        request_id = request.request_id
        self._refused.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._prefilling.pop(request_id, None)
        if (tracked := self._requests.pop(request_id, None)) is None:
            return None
        answer: dict[str, Any] = {}
        if tracked.names is not None and self._lends:
            self._name(tracked, request.num_computed_tokens - request.num_in_flight_tokens)
            self._look()
            if (request.kv_transfer_params or {}).get("do_remote_decode"):
                answer = write_reference(self.identity, self.rank, request_id, self.tensor_parallel)
        if (borrowing := tracked.borrowing) is not None:
            self._cancel(tracked, borrowing)
            answer["tandem"] = self._receipt(tracked, borrowing)
        return answer or None

    def stop(self) -> None:
        """End all loans: the thread of loans ends, and nothing is borrowed or lent from now on."""
        self.reset()
        self._borrows = self._lends = False
        self.loans.close()

    def reset(self) -> None:
        """End all loans: vLLM's cache is about to be emptied."""
        for tracked in list(self._borrowing.values()):
            assert tracked.borrowing is not None
            self._cancel(tracked, tracked.borrowing)
        self.loans.lender.end_all("the cache is being emptied")
        self._wake()

    # ------------------------------------------------------------------ the thread of loans

    def turn(self) -> None:
        """Go on with loans and searches."""
        now = self._clock()
        self.loans.turn()
        self.lenders.turn(now)
        for tracked in list(self._borrowing.values()):
            borrowing = tracked.borrowing
            assert borrowing is not None
            if borrowing.phase is Phase.BORROWING and now - borrowing.progress_at >= borrowing.patience_s:
                self._end_loan(tracked, borrowing, f"no block came for {borrowing.patience_s:g} s")

    # ------------------------------------------------------------------ a request's loan

    def _decide(self, tracked: Tracked, num_cached: int) -> bool:
        """Decide what a request borrows; return whether that is settled, as it is not where blocks are lacking."""
        request, names = tracked.request, tracked.names
        params = request.kv_transfer_params or {}
        usable = (request.num_prompt_tokens - 1) // self._unit
        missing = usable * self._unit - num_cached
        tracked.was_decided = True
        if not self._borrows or names is None or params.get("do_remote_decode") or request.skip_reading_prefix_cache:
            return True
        if missing < max(self._unit, self._min_tokens) or request.num_preemptions:
            return True
        named = params.get("lender")
        if not (params.get("do_remote_prefill") or named or self.lenders.are_configured):
            return True
        now = self._clock()
        borrowing = Borrowing(now, progress_at=now, patience_s=self._patience_s)
        if params.get("do_remote_prefill"):
            try:
                borrowing.peer = read_reference(params).peer
            except ValueError as error:
                self._not_borrowed(tracked, borrowing, str(error))
                return True
            if not self._is_guarded and not is_loopback(borrowing.peer.address):
                reason = "is not loopback, and this server has neither tls_ca nor secret_file"
                self._not_borrowed(tracked, borrowing, f"kv_transfer_params.remote_host: {reason}")
                return True
            if borrowing.peer.incarnation == self.identity.incarnation:
                return True  # its own cache has what there is
        elif named is not None and not isinstance(named, str):
            self._not_borrowed(tracked, borrowing, "kv_transfer_params.lender: must be the URL of a server")
            return True
        else:
            borrowing.search = self.lenders.search(names.upto(usable), named or "", now)
            self._wake()
        tracked.borrowing = borrowing
        self._borrowing[request.request_id] = tracked
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
        self.kv.hashes.learn(keys, request.block_hashes)
        chain = BorrowedChain(
            request_id=request.request_id,
            token_ids=tokens,
            num_prompt=len(tokens),
            root=names.root,
            priority=0,
            arrival=self._next_arrival(),
            adapter=names.adapter,
            items=names.items,
            given_keys=tuple(keys),
        )
        if not self.kv.start_borrowing(chain, keys):
            self._forget(tracked)
            tracked.borrowing, tracked.was_decided = None, False
            return False
        may_compute = borrowing.server is not None and not names.items
        wanted = BorrowRequest(
            chain,
            keys,
            self.kv.range_of(chain, keys),
            Lender(peer, may_compute),
            borrowing.account,
            self,
            log_id=request.request_id,
        )
        borrowing.chain, borrowing.phase, borrowing.progress_at = chain, Phase.BORROWING, self._clock()
        if not self.loans.borrower.take(wanted):
            self.loan_over(chain, lost_blocks=False)
            return True
        self.counters.loans_taken += 1
        if may_compute and borrowing.phase is Phase.BORROWING:
            self._post(tracked, borrowing, keys)
        self.loans.flush()
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
        borrowing.posted = self._servers.post(server.url, prompt, partial(self._answered, tracked, borrowing))

    def _answered(self, tracked: Tracked, borrowing: Borrowing, failure: str) -> None:
        """Process that the lender's server has answered: the last blocks come now, or none do."""
        borrowing.posted = None
        if borrowing.phase is not Phase.BORROWING:
            return
        if failure:
            self._end_loan(tracked, borrowing, failure)
        else:
            borrowing.progress_at, borrowing.patience_s = self._clock(), AFTER_ANSWER_S

    def _end_loan(self, tracked: Tracked, borrowing: Borrowing, failure: str) -> None:
        chain = borrowing.chain
        assert chain is not None
        borrowing.failure = failure
        self.loans.borrower.cancel(chain.request_id)
        self.loan_over(chain, lost_blocks=False)

    def _not_borrowed(self, tracked: Tracked, borrowing: Borrowing, failure: str) -> None:
        log.info("borrows nothing: %s", failure, extra=of(tracked.request.request_id))
        borrowing.failure, borrowing.phase = failure, Phase.OVER
        self.counters.loans_failed += 1
        tracked.borrowing = borrowing
        self._forget(tracked)

    def _forget(self, tracked: Tracked) -> None:
        self._borrowing.pop(tracked.request.request_id, None)

    # ------------------------------------------------------------------ the borrower's calls

    def loan_bound(self, sequence: Chain, first: int) -> None:
        borrowing = self._borrowing[sequence.request_id].borrowing
        assert borrowing is not None
        borrowing.progress_at = self._clock()

    def loan_hedged(self, sequence: Chain) -> bool:
        """Return False: the loan ends, and vLLM computes what is missing."""
        return False

    def loan_over(self, sequence: Chain, lost_blocks: bool) -> None:
        """Hold what was bound for vLLM."""
        tracked = self._borrowing[sequence.request_id]
        borrowing = tracked.borrowing
        assert borrowing is not None
        account, now = borrowing.account, self._clock()
        assert borrowing.chain is not None
        self.kv.keep_bound(borrowing.chain)
        borrowing.phase = Phase.HELD
        borrowing.bound_tokens = borrowing.chain.num_computed
        borrowing.seconds = now - borrowing.began_at
        borrowing.failure = borrowing.failure or account.loan_failure
        self._stop_posting(borrowing)
        counters = self.counters
        counters.blocks_borrowed += account.moved_blocks
        counters.bytes_borrowed += account.moved_bytes
        counters.blocks_mismatched += account.mismatched_blocks
        counters.seconds.append(borrowing.seconds)
        if borrowing.failure:
            counters.loans_failed += 1
            if borrowing.server is not None and borrowing.peer is not None and account.loan_failure:
                self.lenders.failed(borrowing.server, borrowing.peer, now)

    # ------------------------------------------------------------------ ends

    def _let_go(self, tracked: Tracked, borrowing: Borrowing) -> None:
        """Drop the references on blocks that were held for a request."""
        assert borrowing.chain is not None
        self.kv.finish(borrowing.chain)
        borrowing.phase = Phase.OVER
        self._forget(tracked)

    def _cancel(self, tracked: Tracked, borrowing: Borrowing) -> None:
        if borrowing.search is not None:
            self.lenders.give_up(borrowing.search)
        self._stop_posting(borrowing)
        if borrowing.phase is Phase.BORROWING:
            assert borrowing.chain is not None
            self.loans.borrower.cancel(borrowing.chain.request_id)
            borrowing.phase = Phase.HELD
        if borrowing.phase is Phase.HELD:
            self._let_go(tracked, borrowing)
            self.loans.flush()
        borrowing.phase = Phase.OVER
        self._forget(tracked)

    def _stop_posting(self, borrowing: Borrowing) -> None:
        if borrowing.posted is not None:
            borrowing.posted.cancel()
            borrowing.posted = None

    def _is_running(self) -> bool:
        return any(tracked.request.status == RequestStatus.RUNNING for tracked in self._requests.values())

    def _give_way(self) -> None:
        """Give blocks to requests that starve: the last request's held or borrowed ones, or else those of a loan given.

        One at a time, since vLLM tries again at once.
        """
        for tracked in reversed(list(self._borrowing.values())):
            borrowing = tracked.borrowing
            assert borrowing is not None
            if borrowing.phase is Phase.BORROWING:
                self._end_loan(tracked, borrowing, STARVING)
                return
            if borrowing.phase is Phase.HELD and borrowing.chain is not None and borrowing.chain.blocks:
                self._let_go(tracked, borrowing)
                return
        if self.loans.lender.lose(STARVING):
            self.loans.flush()

    # ------------------------------------------------------------------ lending

    def _name(self, tracked: Tracked, num_tokens: int) -> None:
        assert tracked.names is not None
        tracked.num_named, new = self.kv.name_filled(tracked.names, num_tokens, tracked.num_named)
        if (tracked.request.kv_transfer_params or {}).get("do_remote_decode"):
            self.loans.lender.fingerprint_early(new)

    def _look(self) -> None:
        """Hold what loans want of the blocks that were named; the thread of loans announces it."""
        lender = self.loans.lender
        if lender.is_watching:
            lender.look()
        if lender.has_seen:
            self._wake()

    def _num_waiting(self) -> int:
        return len(self._waiting) + len(self._prefilling)

    def _receipt(self, tracked: Tracked, borrowing: Borrowing) -> dict[str, Any]:
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

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals
