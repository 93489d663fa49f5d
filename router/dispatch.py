"""The shell around admission: requests wait here as futures; a timer and the fleet's events move them on."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.keys import BlockKey
from router.admission.config import AdmissionConfig
from router.admission.core import Admission, Outcome, Started
from router.admission.limits import Tenants
from router.admission.quota import LocalLedger, QuotaLedger
from router.admission.refusals import Reason, Refusal, over_limit
from router.admission.request import Claim, Waiting
from router.demand import Demand
from router.fleet import Fleet, Placed
from router.placement import Decision

log = logging.getLogger(__name__)

Place = tuple[Placed, Decision]


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request was counted with against its tenant's limits."""

    tenant: str
    num_tokens: int
    quota_window: int | None
    """In which it was charged to a quota."""


class Dispatcher:
    """Late binding: a request gets its pair at the moment it can start."""

    def __init__(
        self,
        fleet: Fleet,
        config: AdmissionConfig,
        ledger: QuotaLedger | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is that of the claims; `wall_clock` that of the quotas' windows."""
        self._config = config
        self._tenants = Tenants(config)
        self.admission = Admission(fleet, config, self._tenants)
        self._ledger: QuotaLedger = ledger or LocalLedger(wall_clock)
        self._clock = clock
        self._wall_clock = wall_clock
        self._futures: dict[Waiting, asyncio.Future[Place]] = {}
        self._timer: tuple[float, asyncio.TimerHandle] | None = None
        self._refunds: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting

    # ------------------------------------------------------------------ limits of tenants

    async def enter(self, tenant: str, num_tokens: int) -> Charge:
        """Count a request of at most so many tokens; `leave` must follow. Raises Overloaded naming the limit."""
        try:
            return await self._enter(tenant, num_tokens)
        except Refusal as refusal:
            self.admission.refuse(refusal)
            raise refusal.error from None

    async def _enter(self, tenant: str, num_tokens: int) -> Charge:
        policy = self._config.policy(tenant)
        limit, window_s = policy.quota_tokens, policy.quota_window_s
        self._tenants.check(tenant, num_tokens, self._clock())
        window = None
        if limit is not None:
            window = int(self._wall_clock() // window_s)
            ends_s = await self._ledger.charge(tenant, num_tokens, limit, window_s)
            if ends_s is not None:
                never = num_tokens > limit
                asked, said = f"{num_tokens} tokens", f"{limit} per {window_s} s"
                raise over_limit(Reason.QUOTA, tenant, said, asked, float("inf") if never else ends_s)
        charge = Charge(tenant, num_tokens, window)
        try:
            self._tenants.check(tenant, num_tokens, self._clock())  # others may have entered meanwhile
        except Refusal:
            self._refund(charge, num_tokens)
            raise
        self._tenants.enter(tenant, num_tokens, self._clock())
        return charge

    def leave(self, charge: Charge, used_tokens: Callable[[], int]) -> None:
        """The request is over; what it did not use is given back. `used_tokens` is asked only where tokens count."""
        unused = max(0, charge.num_tokens - used_tokens()) if self._counts_tokens(charge.tenant) else 0
        self._tenants.leave(charge.tenant, unused, self._clock())
        self._refund(charge, unused)

    def _counts_tokens(self, tenant: str) -> bool:
        policy = self._config.policy(tenant)
        return policy.quota_tokens is not None or policy.tokens_per_minute is not None

    def _refund(self, charge: Charge, unused: int) -> None:
        """Behind the request's back: its client need not wait for it. Nothing for a window that is over."""
        window_s = self._config.policy(charge.tenant).quota_window_s
        if unused and charge.quota_window == int(self._wall_clock() // window_s):
            task = asyncio.ensure_future(self._ledger.refund(charge.tenant, unused, window_s))
            self._refunds.add(task)
            task.add_done_callback(self._refunded)

    def _refunded(self, task: "asyncio.Task[None]") -> None:
        self._refunds.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a quota's refund failed", exc_info=error)

    # ------------------------------------------------------------------ places

    async def place(self, claim: Claim, demand: Demand, keys: Sequence[BlockKey]) -> Place:
        """Wait for a pair; `ended` must follow. Raises ServiceError when it is refused."""
        waiting, outcomes = self.admission.arrived(claim, demand, keys, self._clock())
        future = self._futures[waiting] = asyncio.get_running_loop().create_future()
        self._perform(outcomes)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._withdraw(waiting, future)
            raise
        finally:
            del self._futures[waiting]

    def ended(self, placed: Placed) -> None:
        """Once for each place given."""
        self._perform(self.admission.ended(placed, self._clock()))

    def refused(self, placed: Placed) -> None:
        """Its decode worker had no room after all. `ended` must follow. Raises Overloaded when it was too often."""
        self.admission.refused_by_worker(placed, self._clock())

    def kick(self) -> None:
        """Something changed: start whoever can start."""
        self._perform(self.admission.changed(self._clock()))

    def _withdraw(self, waiting: Waiting, future: "asyncio.Future[Place]") -> None:
        """Its client is gone; if it was placed in this very moment, take that back."""
        if not future.done():
            self._perform(self.admission.withdrawn(waiting, self._clock()))
        elif future.exception() is None:
            self.ended(future.result()[0])

    def _perform(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            future = self._futures[outcome.waiting]
            if isinstance(outcome, Started):
                future.set_result((outcome.placed, outcome.decision))
            else:
                future.set_exception(outcome.refusal.error)
        self._arm()

    def _arm(self) -> None:
        """Have the core looked at when it said."""
        at = self.admission.next_time()
        if self._timer is not None:
            if self._timer[0] == at:
                return
            self._timer[1].cancel()
            self._timer = None
        if at is not None:
            delay_s = max(0.0, at - self._clock())
            self._timer = at, asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.kick()
