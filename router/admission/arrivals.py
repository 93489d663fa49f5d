"""Requests between their arrival and their model's queue: charged and bounded before they are read."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import Overloaded, ServiceError
from cluster.fair_turns import LoopTurns
from cluster.process.memory import MemoryTrim
from router.admission.config import AdmissionConfig
from router.admission.limits.tenant_limits import Shares, TenantLimits, TokenBucket
from router.admission.refusals import Refusal

AT_ONCE = 4
"""Requests that are read and placed in one turn of the event loop."""
PROMPT_REFUSALS_PER_S = 20
"""Refusals of a tenant per second that are sent at once."""
LATE_S = 0.25
"""Delay of the others, in seconds."""
MAX_LATE_REFUSALS = 256
"""Refusals of a tenant that are delayed at a time."""
MAX_TENANTS = 1000
"""Tenants whose refusals are paced; those refused longest ago are forgotten first."""


class Arrival:
    """One request that is being read; it counts until `queued`."""

    def __init__(self, tenant: str, requests: Shares, body_bytes: Shares, trim: MemoryTrim) -> None:
        self._trim = trim
        self.tenant = tenant
        self.tokens_read = 0
        """Prompt tokens that were read, charged if the request is refused afterwards."""
        self._requests: Shares | None = requests
        self._body_bytes = body_bytes
        self._held = 0

    def hold(self, num_bytes: int) -> None:
        """Count bytes of the request's body as held.

        Raises Refusal.
        """
        if self._requests is not None:
            self._body_bytes.take(self.tenant, num_bytes)
            self._held += num_bytes

    def queued(self) -> None:
        """Stop counting the request: it waits in its model's queue, or it is over. Further calls do nothing."""
        if self._requests is not None:
            self._requests.give_back(self.tenant)
            self._requests = None
            self._body_bytes.give_back(self.tenant, self._held)
            self._trim.freed(self._held)


class RefusalPace:
    """Delay of the refusals of a tenant that keeps asking.

    A refusal costs a router as much as it costs a client to ask again. So those beyond a rate come late, and a client
    that waits for them asks less often.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, TokenBucket] = OrderedDict()
        """Refusals that may come at once, by the tenant's limit; used last comes last."""
        self._num_waiting: Counter[str] = Counter()

    async def wait(self, error: ServiceError) -> None:
        """Wait before an error that names a tenant's limit is sent; other errors are not delayed."""
        if not isinstance(error, Overloaded) or error.limit is None:
            return
        tenant, now = error.limit[0], self._clock()
        if (bucket := self._tenants.get(tenant)) is None:
            bucket = self._tenants[tenant] = TokenBucket(PROMPT_REFUSALS_PER_S, PROMPT_REFUSALS_PER_S)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        if not bucket.wait_s(1, now):
            bucket.take(1, now)
        elif self._num_waiting[tenant] < MAX_LATE_REFUSALS:
            self._num_waiting[tenant] += 1
            try:
                await asyncio.sleep(LATE_S)
            finally:
                self._num_waiting[tenant] -= 1
                if not self._num_waiting[tenant]:
                    del self._num_waiting[tenant]


class Arrivals:
    """All requests of a router that are being read.

    A request is charged against its tenant's rate, and counted here, before anything of it is read where a key names
    its tenant. A refused request stays charged.
    """

    def __init__(self, config: AdmissionConfig, limits: TenantLimits, is_paced: bool = True) -> None:
        """Create it; with `is_paced` a burst of requests leaves the event loop turns for streams."""
        self._limits = limits
        self._turns = LoopTurns(AT_ONCE) if is_paced else None
        self.requests = Shares(config.max_queued, config.max_queued_per_tenant)
        total = config.max_bodies_mib << 20
        self._trim = MemoryTrim()
        self.body_bytes = Shares(total, max(1, total // 4), "bytes of requests")
        self.pace = RefusalPace()

    async def turn(self) -> None:
        """Return when a request may be read and placed, which takes a millisecond or two of the event loop."""
        if self._turns is not None:
            await self._turns.take()

    def charge(self, tenant: str) -> None:
        """Charge a call that is no generation, or one more prompt of an arrival.

        Raises Overloaded.
        """
        self._limits.arrive(tenant)

    @contextmanager
    def reading(self, arrival: Arrival) -> Iterator[None]:
        """Charge the tokens that were read of a request that is refused within the block."""
        try:
            yield
        except ServiceError:
            self._limits.charge_refused(arrival.tenant, arrival.tokens_read)
            raise

    @contextmanager
    def arriving(self, tenant: str, is_charged: bool = False) -> Iterator[Arrival]:
        """Charge a request, unless it `is_charged` already, and count it until it is queued, or the block ends.

        Raises Overloaded, also for refusals of `hold` within the block.
        """
        if not is_charged:
            self.charge(tenant)
        arrival: Arrival | None = None
        try:
            self.requests.take(tenant)
            arrival = Arrival(tenant, self.requests, self.body_bytes, self._trim)
            yield arrival
        except Refusal as refusal:
            self._limits.num_refused[refusal.reason] += 1
            raise refusal.take() from None
        finally:
            if arrival is not None:
                arrival.queued()
