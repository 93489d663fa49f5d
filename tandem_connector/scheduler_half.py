"""The connector's half in vLLM's engine process: it borrows for requests that wait, and lends what requests fill.

    vLLM's thread                                     thread of loans (`service.py`)
    get_num_new_matched_tokens ─ begins, opens ──▶    bytes arrive, are verified, and become prefix-cache blocks
      answers None until the loan is over     ◀──     the loan is over
    update_connector_output, request_finished ──▶     fingerprints are taken, blocks are announced
      name what steps have filled

Both hold one lock (`connector.py`). Only vLLM's thread allocates blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from loans.component import HostCalls, Loans, Ranks
from loans.network import LoanNetwork, Peer
from tandem_connector.borrowings import STARVING, BorrowingRules, Borrowings, Tracked
from tandem_connector.kv import ConnectorKv, Naming
from tandem_connector.lender import WatchingLender
from tandem_connector.lenders import Lenders
from tandem_connector.metrics import Counters
from tandem_connector.servers import Servers, write_reference


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about this engine, and the settings of its loans."""

    incarnation: bytes
    vocab_size: int
    rank: int
    """Its data-parallel rank."""
    tensor_parallel: int
    lends: bool
    lenders: tuple[str, ...]
    trusted_lenders: tuple[str, ...]
    read_silence_s: float
    rules: BorrowingRules


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
        facts: EngineFacts,
        wake: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        """Create it; `wake` has the thread of loans take a turn, from any thread."""
        self.kv = kv
        self._naming = naming
        self._facts = facts
        self._lends = facts.lends
        self._wake, self._clock = wake, clock
        self.requests: dict[str, Tracked] = {}
        self.waiting: dict[str, None] = {}
        """Requests to which vLLM has given no blocks yet."""
        self.prefilling: dict[str, Tracked] = {}
        """Running requests whose prompt is not computed."""
        self._refused: dict[str, None] = {}
        """Requests that may run and had no room in the step that is being scheduled."""
        self._admitted: list[Tracked] = []
        """Requests to which the step that is being scheduled has given blocks."""
        self._arrivals = 0
        self._has_stopped = False
        self.counters = Counters()
        host = HostCalls(self._next_arrival, lambda: False, lambda mark: None, wake)
        self.loans = Loans[WatchingLender](
            kv,
            ranks,
            transport_name,
            network,
            host,
            lambda borrower: WatchingLender(kv, facts.vocab_size, self._num_waiting, self.counters),
            facts.read_silence_s,
        )
        self.loans.borrower.hedge_unmeasured_s = facts.read_silence_s  # this half measures no speed
        self.lenders = Lenders(facts.lenders, facts.trusted_lenders, servers, network, facts.incarnation)
        self.borrowings = Borrowings(
            kv,
            self.loans.borrower,
            self.lenders,
            servers,
            facts.rules,
            facts.incarnation,
            self.counters,
            self.loans.flush,
            wake,
            clock,
        )
        self.identity = Peer("", "", facts.incarnation)
        """This engine, as borrowers reach it once `start` was called."""

    def start(self, model_fingerprint: bytes, endpoint: bytes) -> str:
        """Take loans from now on; return the address for borrowers. Raises StartError."""
        address = self.loans.start(model_fingerprint, endpoint)
        self.identity = Peer(address, address, self.identity.incarnation)
        return address

    # ------------------------------------------------------------------ vLLM's calls

    def on_new_request(self, request: Any) -> None:
        names = self._naming.of(request) if request.pooling_params is None else None
        self.requests[request.request_id] = Tracked(request, names)
        self.waiting[request.request_id] = None

    def may_schedule(self, request: Any, num_cached: int) -> bool:
        """Return whether vLLM may schedule a request, of which it has `num_cached` tokens in its cache."""
        tracked = self.requests.get(request.request_id)
        if tracked is not None and not self._has_stopped and not self.borrowings.may_schedule(tracked, num_cached):
            return False
        self._refused[request.request_id] = None
        return True

    def allocated(self, request: Any) -> None:
        """Process that vLLM has given a request its blocks."""
        request_id = request.request_id
        self._refused.pop(request_id, None)
        self.waiting.pop(request_id, None)
        if (tracked := self.requests.get(request_id)) is None:
            return
        if tracked.names is not None and self._lends:
            tracked.num_named = 0
            self.prefilling[request_id] = tracked
            self._admitted.append(tracked)
        self.borrowings.allocated(tracked)

    def scheduled(self, num_tokens: int) -> None:
        """Process that a step was scheduled.

        Where nothing could be, for lack of blocks, some are given back: those of loans taken first, then of one given.
        One loan at a time, since vLLM tries again at once.
        """
        for tracked in self._admitted:
            tracked.num_found = tracked.request.num_computed_tokens
        self._admitted.clear()
        starves = self._refused and not num_tokens and not self._is_running()
        if starves and not self.borrowings.give_way() and self.loans.lender.lose(STARVING):
            self.loans.flush()
        self._refused.clear()

    def step_ended(self) -> None:
        """Name the blocks that the prompts of running requests have filled."""
        for request_id, tracked in list(self.prefilling.items()):
            request = tracked.request
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._name(tracked, computed)
            if computed >= request.num_prompt_tokens:
                del self.prefilling[request_id]
        self._look()

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Process that a request is over, and still has its blocks; return the `kv_transfer_params` of its answer."""
        request_id = request.request_id
        self._refused.pop(request_id, None)
        self.waiting.pop(request_id, None)
        self.prefilling.pop(request_id, None)
        if (tracked := self.requests.pop(request_id, None)) is None:
            return None
        answer: dict[str, Any] = {}
        if tracked.names is not None and self._lends:
            self._name(tracked, request.num_computed_tokens - request.num_in_flight_tokens)
            self._look()
            if tracked.is_for_borrower:
                answer = write_reference(self.identity, self._facts.rank, request_id, self._facts.tensor_parallel)
        if tracked.borrowing is not None:
            self.borrowings.cancel(tracked)
            answer["tandem"] = self.borrowings.receipt_of(tracked)
        return answer or None

    def stop(self) -> None:
        """End all loans: the thread of loans ends, and nothing is borrowed or lent from now on."""
        self._has_stopped, self._lends = True, False
        self.reset()
        self.loans.close()

    def reset(self) -> None:
        """End all loans: vLLM's cache is about to be emptied."""
        self.borrowings.cancel_all()
        self.loans.lender.end_all("the cache is being emptied")
        self._wake()

    # ------------------------------------------------------------------ the thread of loans

    def turn(self) -> None:
        """Go on with loans and searches."""
        now = self._clock()
        self.loans.turn()
        self.lenders.turn(now)
        self.borrowings.turn(now)

    # ------------------------------------------------------------------ lending

    def _name(self, tracked: Tracked, num_tokens: int) -> None:
        """Name the blocks that a request has filled or found, with its first `num_tokens` tokens.

        vLLM finds a block from the step on that will fill it, so what a request found is filled once its own first
        step has ended.
        """
        assert tracked.names is not None
        if num_tokens <= tracked.num_found:
            return
        tracked.num_named, new = self.kv.name_filled(tracked.names, num_tokens, tracked.num_named)
        if tracked.is_for_borrower:
            self.loans.lender.fingerprint_early(new)

    def _look(self) -> None:
        """Hold what loans want of the blocks that were named; the thread of loans announces it."""
        lender = self.loans.lender
        if lender.is_watching:
            lender.look()
        if lender.has_seen:
            self._wake()

    def _num_waiting(self) -> int:
        return len(self.waiting) + len(self.prefilling)

    def _is_running(self) -> bool:
        return any(tracked.request.status == RequestStatus.RUNNING for tracked in self.requests.values())

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals
