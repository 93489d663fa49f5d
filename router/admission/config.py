"""Settings of queueing and admission."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cluster.config import Config


class TenantPolicy(Config):
    """Limits of one tenant; those left out do not limit. Each router counts for itself, so that with two of them a
    tenant may have twice as much: but for quotas, which routers with one Redis count together."""

    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Its part beside other tenants of a class."""
    requests_per_s: PositiveFloat | None = None
    burst: PositiveInt | None = None
    """Requests at once; default: what `requests_per_s` allows in one second, at least one."""
    tokens_per_minute: PositiveInt | None = None
    """Prompt and max_tokens; what was not generated is given back at the end."""
    max_running: PositiveInt | None = None
    """Started at a time. More wait, in nobody's way."""
    quota_tokens: PositiveInt | None = None
    """Per window, counted as for tokens_per_minute."""
    quota_window_s: PositiveInt = 86_400
    """Windows begin at wall-clock multiples of it."""


class AdmissionConfig(Config):
    """Part of the router's."""

    max_queued: PositiveInt = 4096
    """Requests that may wait for a pair; of more, one of the lowest class is refused at once. As many beside them may
    be on their way into the line: their prompts are read, or no worker has joined yet."""
    max_queued_per_tenant: PositiveInt = 2048
    """And of one tenant."""
    max_tenants: PositiveInt = 10_000
    """Those not in `tenants` with something to remember of them: running, waiting, or a rate not yet recovered."""
    no_worker_grace_s: PositiveFloat = 10.0
    """How long a request may wait while no decode worker is there, or none that could ever hold it."""
    lower_class_share: float = Field(default=0.05, ge=0, le=0.5)
    """Of the tokens started: what classes below the highest that waits get at least, where they can start."""
    batch_block_share: float = Field(default=0.8, gt=0, le=1)
    """Of a decode worker's blocks: what may be taken when a request of a class below 0 starts."""
    max_lender_queue_s: PositiveFloat = 2.0
    """A request is not bound to a lender that is predicted to be busy for longer: it waits here."""
    max_batch_lender_queue_s: PositiveFloat = 0.5
    """Likewise, for classes below 0."""
    long_prompt_s: PositiveFloat = 4.0
    """A prompt that a lender is predicted to compute for longer is a long one."""
    long_prompt_lender_share: float = Field(default=0.75, ge=0, le=1)
    """Of the lenders: those that may compute long prompts at a time; at least one may."""
    short_prompt_lenders: NonNegativeInt = 3
    """Lenders, or half of them where that is less, that may not, whatever the share."""
    max_passed_s: PositiveFloat = 5.0
    """A request without room that others passed for so long gets a worker kept for it."""
    max_passed_tokens: PositiveInt = 200_000
    """Or that so many tokens passed."""
    max_refusals: PositiveInt = 64
    """By workers that had no room after all, of one request; each is followed by a pause, 10 ms at first, then up to
    500 ms."""
    default_retry_after_s: NonNegativeFloat = 1.0
    """For refusals of which nothing better is known."""
    tenants: dict[str, TenantPolicy] = Field(default_factory=dict)
    """By name."""
    default_tenant: TenantPolicy = TenantPolicy()
    """For each of those not named."""

    def policy(self, tenant: str) -> TenantPolicy:
        return self.tenants.get(tenant, self.default_tenant)
