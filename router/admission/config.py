"""Settings of queues, admission and tenant limits."""

from typing import ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from cluster.config import Config


class TenantPolicy(Config):
    """Limits of one tenant; an unset limit does not apply.

    Each router counts for itself, so with two routers a tenant may have twice as much. Only quotas are counted together
    by routers with one Redis.
    """

    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Weight beside other tenants of a class."""
    requests_per_s: PositiveFloat | None = None
    """Requests per second."""
    burst: PositiveInt | None = None
    """Requests allowed at once; default: those of one second of `requests_per_s`, at least one."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens per minute, prompt plus max_tokens; unused tokens are given back at the end."""
    max_running: PositiveInt | None = None
    """Sequences running at a time: a request with `n` choices counts n times. More requests wait
    without delaying other tenants."""
    max_priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    """Highest priority that the tenant's requests may have. Operators' keys, and clients of a router without keys, may
    set any."""
    quota_tokens: PositiveInt | None = None
    """Tokens per window, counted like tokens_per_minute."""
    quota_window_s: PositiveInt = 86_400
    """Length of a quota window in seconds; windows begin at wall-clock multiples of it."""


class AdmissionConfig(Config):
    """Settings of queues and admission of a router."""

    max_queued: PositiveInt = 4096
    """Queued requests per model; beyond it one of the lowest class is refused at once. As many more may be read at a
    time, over all models, and as many may wait for a model's first worker."""
    max_queued_per_tenant: PositiveInt = 2048
    """Queued requests per model and tenant. As many of a tenant's requests may be read at a
    time, and as many may wait for a model's first worker."""
    max_bodies_mib: PositiveInt = 256
    """Memory in MiB for bodies of requests that are read at a time; a quarter of it for one tenant."""
    no_worker_grace_s: PositiveFloat = 10.0
    """Seconds for which a request may wait while no decode worker has joined, or none has a large enough pool."""
    batch_block_share: float = Field(default=0.8, gt=0, le=1)
    """Share of a decode worker's blocks that may be in use when a request of a class below 0 starts."""
    tenants: dict[str, TenantPolicy] = Field(default_factory=dict)
    """Limits by tenant name."""
    default_tenant: TenantPolicy = TenantPolicy()
    """Limits of each tenant without an entry in `tenants`."""

    # Constants: nobody could choose them better without a simulation of their own load. Tests do.
    max_refusals: ClassVar[int] = 64
    """Refusals of one request by workers without capacity, after which it fails; each is followed by a pause, 10 ms at
    first, up to 500 ms."""
    lower_class_share: ClassVar[float] = 0.05
    """Share of started tokens that go to priority classes below the highest one that waits, where they can start."""
    max_lender_queue_s: ClassVar[float] = 2.0
    """Seconds of predicted work beyond which a lender gets no further request; requests wait in the router instead."""
    long_prompt_s: ClassVar[float] = 4.0
    """Predicted seconds of computing from which a prompt counts as long."""
    long_prompt_lender_share: ClassVar[float] = 0.75
    """Share of lenders that may compute long prompts at a time; at least one may."""
    short_prompt_lenders: ClassVar[int] = 3
    """Lenders kept free of long prompts, whatever `long_prompt_lender_share` is, but at most half of all lenders."""
    max_passed_s: ClassVar[float] = 5.0
    """Seconds for which later requests may overtake one that finds no capacity; then a worker is reserved for it."""
    max_passed_tokens: ClassVar[int] = 200_000
    """Tokens of later requests that may overtake one that finds no capacity; then a worker is reserved for it."""

    def policy(self, tenant: str) -> TenantPolicy:
        return self.tenants.get(tenant, self.default_tenant)
