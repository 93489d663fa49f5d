"""Shell of admission: requests wait here as futures; a timer and the fleet's events drive the core."""

import asyncio
import time
from collections.abc import Callable, Sequence

from kvcache.block_keys import BlockKey
from router.admission.admission import Admission, Outcome, Started
from router.admission.config import AdmissionConfig
from router.admission.limits.tenant_limits import RateLimiter
from router.admission.request import QueuedRequest, RequestInfo
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.place import Decision

Place = tuple[ActivePlacement, Decision]


class Dispatcher:
    """Dispatcher of one model: a request gets its pair at the moment it can start (late binding)."""

    def __init__(
        self,
        fleet: Fleet,
        config: AdmissionConfig,
        tenants: RateLimiter | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Create it.

        `tenants` may be shared with other dispatchers; `clock` is that of RequestInfo.

        `on_end` is called when a request has ended: its tenant may start another one, perhaps of another model.
        """
        self.admission = Admission(fleet, config, RateLimiter(config) if tenants is None else tenants)
        self.clock = clock
        self._on_end = on_end
        self._futures: dict[QueuedRequest, asyncio.Future[Place]] = {}
        self._timer: tuple[float, asyncio.TimerHandle] | None = None

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting

    # ------------------------------------------------------------------ places

    async def place(self, info: RequestInfo, demand: Demand, keys: Sequence[BlockKey]) -> Place:
        """Wait for a placement; `ended` must follow.

        Raises ServiceError when the request is refused.
        """
        waiting, outcomes = self.admission.arrived(info, demand, keys, self.clock())
        future = self._futures[waiting] = asyncio.get_running_loop().create_future()
        self._perform(outcomes)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._withdraw(waiting, future)
            raise
        finally:
            del self._futures[waiting]

    def ended(self, placed: ActivePlacement) -> None:
        """Process the end of a placement; once for each."""
        self._perform(self.admission.ended(placed, self.clock()))
        self._on_end()

    def refused(self, placed: ActivePlacement) -> None:
        """Process a worker's refusal for lack of capacity.

        `ended` must follow. Raises Overloaded after too many.
        """
        self.admission.refused_by_worker(placed, self.clock())

    def expected_wait_s(self, priority: int, demand: Demand) -> float:
        """Return the predicted wait of a request that arrived now; 0 where nothing waits, or nothing is known."""
        return self.admission.expected_wait_s(priority, demand, self.clock())

    def kick(self) -> None:
        """Start requests after a change."""
        self._perform(self.admission.changed(self.clock()))

    def _withdraw(self, waiting: QueuedRequest, future: "asyncio.Future[Place]") -> None:
        """Withdraw a request whose client is gone; undo a placement of this very moment."""
        if not future.done():
            self._perform(self.admission.withdrawn(waiting, self.clock()))
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
        """Set the timer to the core's next time."""
        at = self.admission.next_time()
        if self._timer is not None:
            if self._timer[0] == at:
                return
            self._timer[1].cancel()
            self._timer = None
        if at is not None:
            delay_s = max(0.0, at - self.clock())
            self._timer = at, asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.kick()
