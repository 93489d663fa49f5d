"""The Worker service, for operators: audit, cache, drain, role switch and faults.

Role switch of a worker, with weights and cache in place.

Both kinds of worker run both services, and an engine can compute either's work. A role is how routers see the worker,
and how many prompt tokens a step may have. So a switch is a drain (`runtime.py`), and a membership that ends and begins
again. Process, pool, cache and incarnation stay the same: block keys stay valid, and a loan placed before the switch
works after it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cluster.errors import Draining, InvalidRequest, ServiceError, Unavailable
from cluster.network.error_status import to_status
from cluster.process.tasks import Tasks, log_bugs
from cluster.roles import ON_WIRE, Role
from engine.config import WorkerConfig
from engine.core_types import GpuDevice
from engine.messages.from_engine import Ready
from engine.messages.to_engine import CacheDrop, SetBudget
from engine.model.detokenizer import check_token_ids
from engine.process.front.engine_client import EngineClient
from engine.settings import step_budget
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from worker.front.faults import Faults
from worker.front.membership import Memberships

log = logging.getLogger(__name__)


JOIN_S = 5.0
"""Seconds for routers to accept the worker again."""


class RoleSwitch:
    """Role and role switch of one worker."""

    def __init__(
        self,
        role: Role,
        config: WorkerConfig,
        engine: EngineClient,
        gpu: GpuDevice | None,
        on_role: Callable[[Role], object],
    ) -> None:
        """Create it; `gpu` is the engine's, and `on_role` is called with each new role."""
        self.role: Role = role
        self._config = config
        self._engine = engine
        self._gpu = gpu
        self._on_role = on_role
        self.switches = Tasks(log_bugs("the role switch failed"))
        """Switches that complete although their callers disconnect."""
        self._lock = asyncio.Lock()
        self._memberships: Memberships | None = None
        self._empty: Callable[[], Awaitable[int]]
        self._resume: Callable[[], bool]
        self.before_decode: list[Callable[[], object]] = []
        """Things to load before a worker first decodes; called on a thread."""

    def joined(self, memberships: Memberships, empty: Callable[[], Awaitable[int]], resume: Callable[[], bool]) -> None:
        """Enable switching.

        `empty` finishes or hands over work in flight and returns the number of requests handed over.

        `resume` accepts work again; it returns False when a stop was requested meanwhile.
        """
        self._memberships, self._empty, self._resume = memberships, empty, resume

    async def to(self, role: Role) -> int:
        """Switch to `role`; return the number of requests that were handed over.

        One switch at a time.

        Raises Draining when a stop was requested, and Unavailable before the worker has joined.
        """
        async with self._lock:
            if role == self.role:
                return 0
            if (memberships := self._memberships) is None:
                raise Unavailable("this worker has not joined a router yet")
            if role == "decode":
                for load in self.before_decode:
                    await asyncio.to_thread(load)
            handed_over = await self._empty()
            self._engine.send(SetBudget(step_budget(self._config, role, self._gpu)))
            if not self._resume():
                raise Draining("this worker was told to stop")
            log.info("this worker is a %s worker from now on; %d requests handed over", role, handed_over)
            self.role = role
            self._on_role(role)
            await memberships.rejoin(ON_WIRE[role], JOIN_S)
            return handed_over


class WorkerService(pb_grpc.WorkerServicer):
    def __init__(
        self,
        worker_id: str,
        engine: EngineClient,
        drain: Callable[[], tuple[int, int]],
        roles: RoleSwitch,
        faults: Faults,
        ready: Ready,
    ) -> None:
        """Create the service.

        `drain` starts the drain and returns the requests and loans in flight.
        """
        self._worker_id = worker_id
        self._engine = engine
        self._drain = drain
        self._roles = roles
        self._faults = faults
        self._ready = ready

    async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditReport:
        audited = await self._engine.audit()
        return pb.AuditReport(
            worker_id=self._worker_id,
            fault=audited.fault,
            held_blocks=audited.held_blocks,
            reserved_blocks=audited.reserved_blocks,
            quarantined_blocks=audited.quarantined_blocks,
            requests=audited.sequences,
            loans=audited.loans,
        )

    async def Cache(self, request: pb.CacheRequest, context: Any) -> pb.CacheReport:
        try:
            drop = self._drop_of(request.drop) if request.HasField("drop") else None
            return await self._cache(request, drop)
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
            raise

    async def _cache(self, request: pb.CacheRequest, drop: CacheDrop | None) -> pb.CacheReport:
        tenant = request.tenant if request.HasField("tenant") else None
        cache = await self._engine.inspect_cache(request.drop_pins, tenant, drop)
        if cache.refused:
            raise InvalidRequest("drop.store", cache.refused)
        from_pool, from_tiers, pins = cache.dropped_in_pool, cache.dropped_in_tiers, cache.dropped
        while not cache.is_whole:  # the engine drops some at a time, and computes in between
            cache = await self._engine.inspect_cache(False, None, drop)
            from_pool += cache.dropped_in_pool
            from_tiers += cache.dropped_in_tiers
        return pb.CacheReport(
            worker_id=self._worker_id,
            num_blocks=cache.num_blocks,
            held_blocks=cache.held,
            filled_blocks=cache.filled,
            max_pinned_blocks=cache.max_pinned,
            pins=[pb.TenantPins(tenant=tenant, blocks=blocks, ends_in_s=ends) for tenant, blocks, ends in cache.pins],
            dropped_blocks=pins,
            block_tokens=self._ready.block_tokens,
            dropped_from_pool=from_pool,
            dropped_from_tiers=from_tiers,
            in_use=cache.in_use,
            removed_objects=cache.removed_objects,
            store_failure=cache.store_failure,
        )

    def _drop_of(self, drop: pb.CacheDrop) -> CacheDrop:
        """Check which blocks are to be dropped.

        Raises InvalidRequest.
        """
        if drop.all == bool(drop.token_ids):
            raise InvalidRequest("drop.token_ids", "give either a prompt or all")
        if drop.all and drop.store:
            raise InvalidRequest("drop.store", "needs a prompt: the store cannot drop all objects")
        check_token_ids(drop.token_ids, "drop.token_ids", self._ready.vocab_size)
        adapters = dict(self._ready.adapters)
        if drop.adapter and drop.adapter not in adapters:
            raise InvalidRequest("drop.adapter", f"this worker has no adapter {drop.adapter!r}")
        token_ids = None if drop.all else tuple(drop.token_ids)
        return CacheDrop(token_ids, drop.cache_salt, adapters.get(drop.adapter, b""), drop.store)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        requests, loans = self._drain()
        return pb.DrainReply(worker_id=self._worker_id, requests=requests, loans=loans)

    async def SwitchRole(self, request: pb.SwitchRoleRequest, context: Any) -> pb.SwitchRoleReply:
        """Switch the role; the switch completes even if the caller disconnects."""
        try:
            wanted = [role for role, number in ON_WIRE.items() if number == request.role]
            if not wanted:
                raise InvalidRequest("role", f"must be ROLE_PREFILL or ROLE_DECODE, not {request.role}")
            handed_over = await asyncio.shield(self._roles.switches.spawn(self._roles.to(wanted[0])))
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        return pb.SwitchRoleReply(worker_id=self._worker_id, role=request.role, handed_over=handed_over)

    async def Inject(self, request: pb.InjectRequest, context: Any) -> pb.InjectReply:
        try:
            await self._faults.inject(request)
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        return pb.InjectReply(worker_id=self._worker_id)
