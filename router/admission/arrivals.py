"""Requests between their arrival and their model's queue: charged and bounded before they are read."""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.memory_trim import MemoryTrim
from router.admission.config import AdmissionConfig
from router.admission.refusals import Refusal
from router.admission.shares import Shares
from router.admission.tenant_limits import TenantLimits


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


class Arrivals:
    """All requests of a router that are being read.

    A request is charged against its tenant's rate, and counted here, before anything of it is read. A refused request
    stays charged.
    """

    def __init__(self, config: AdmissionConfig, limits: TenantLimits) -> None:
        self._limits = limits
        self.requests = Shares(config.max_queued, config.max_queued_per_tenant)
        total = config.max_bodies_mib << 20
        self._trim = MemoryTrim()
        self.body_bytes = Shares(total, max(1, total // 4), "bytes of requests")

    def charge(self, tenant: str) -> None:
        """Charge a call that is no generation, or one more prompt of an arrival.

        Raises Overloaded.
        """
        self._limits.arrive(tenant)

    @contextmanager
    def arriving(self, tenant: str) -> Iterator[Arrival]:
        """Charge a request and count it until it is queued, at the latest until the block ends.

        Raises Overloaded, also for refusals of `hold` within the block.
        """
        self.charge(tenant)
        arrival: Arrival | None = None
        try:
            self.requests.take(tenant)
            arrival = Arrival(tenant, self.requests, self.body_bytes, self._trim)
            yield arrival
        except Refusal as refusal:
            self._limits.num_refused[refusal.reason] += 1
            raise refusal.error from None
        finally:
            if arrival is not None:
                arrival.queued()
