"""Refusals: errors for clients, reasons for operators."""

from enum import StrEnum

from cluster.errors import DeadlineExceeded, Overloaded, RevisionGone, ServiceError, Unavailable

MIN_RETRY_AFTER_S = 0.05
MAX_RETRY_AFTER_S = 60.0
"""Largest predicted retry delay in seconds; a limit known to last longer is reported in full."""
DEFAULT_RETRY_AFTER_S = 1.0
"""Retry advice of refusals without a prediction, in seconds."""


class Reason(StrEnum):
    """Reasons by which refusals are counted."""

    QUEUE_FULL = "queue full"
    TENANT_QUEUE_FULL = "tenant's queue full"
    DISPLACED = "displaced"
    PREDICTED_MISS = "predicted miss"
    TOO_LATE = "too late"
    DEADLINE = "deadline passed"
    NO_ROOM = "refused by workers"
    NO_WORKER = "no worker"
    REVISION_GONE = "revision gone"
    REQUEST_RATE = "requests_per_s"
    TOKEN_RATE = "tokens_per_minute"
    MAX_RUNNING = "max_running"
    QUOTA = "quota_tokens"
    TOO_MANY_TENANTS = "too many tenants"


class Refusal(Exception):
    """A refusal; `error` is for the client."""

    def __init__(self, reason: Reason, error: ServiceError) -> None:
        super().__init__(str(error))
        self.reason = reason
        self.error = error
        error.refused_for = reason

    def take(self) -> ServiceError:
        """Return the error to be raised in place of this one, which then does not refer to it any more.

        Otherwise they would refer to each other, and keep the stack, and with it the request, until a collection.
        """
        error = self.error
        del self.error
        return error


def bounded(retry_after_s: float) -> float:
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, retry_after_s))


def queue_full(num_queued: int, retry_after_s: float, unit: str = "requests") -> Refusal:
    message = f"{num_queued} {unit} wait already, the limit"
    return Refusal(Reason.QUEUE_FULL, Overloaded(message, retry_after_s=bounded(retry_after_s)))


def tenant_queue_full(tenant: str, num_queued: int, retry_after_s: float, unit: str = "requests") -> Refusal:
    message = f"{num_queued} {unit} of tenant {tenant!r} wait already, the limit"
    return Refusal(Reason.TENANT_QUEUE_FULL, Overloaded(message, retry_after_s=bounded(retry_after_s)))


def displaced(priority: int, by: int, retry_after_s: float) -> Refusal:
    message = f"displaced from a full queue: priority {by} came, this one has {priority}"
    return Refusal(Reason.DISPLACED, Overloaded(message, retry_after_s=bounded(retry_after_s)))


def predicted_miss(wait_s: float, ttft_s: float, left_s: float) -> Refusal:
    """Return the refusal of a request that must start within `left_s` and cannot."""
    left_s = max(0.0, left_s)
    message = (
        f"predicted to wait {wait_s:.3g} s and then to need {ttft_s:.3g} s for the first token, "
        f"which must come within {left_s:.3g} s"
    )
    error = Overloaded(message, retry_after_s=bounded(wait_s + ttft_s - left_s))
    return Refusal(Reason.PREDICTED_MISS, error)


def too_late(waited_s: float, ttft_s: float, retry_after_s: float) -> Refusal:
    message = (
        f"waited {waited_s:.3g} s, and with {ttft_s:.3g} s predicted for the first token it can no longer come in time"
    )
    return Refusal(Reason.TOO_LATE, Overloaded(message, retry_after_s=bounded(retry_after_s)))


def deadline_passed() -> Refusal:
    return Refusal(Reason.DEADLINE, DeadlineExceeded("the deadline passed before the request was done"))


def too_often_refused(num_refusals: int, retry_after_s: float) -> Refusal:
    message = f"{num_refusals} workers that seemed to have room for it had none"
    return Refusal(Reason.NO_ROOM, Overloaded(message, retry_after_s=bounded(retry_after_s)))


def no_worker(num_blocks: int, largest: int | None, grace_s: float) -> Refusal:
    """Return the refusal without a fitting worker; `largest` is the largest decode pool, None without one."""
    if largest is None:
        return Refusal(Reason.NO_WORKER, Unavailable(f"no decode worker has joined within {grace_s:g} s"))
    message = f"no decode worker that is left could hold its {num_blocks} KV blocks; the largest pool has {largest}"
    return Refusal(Reason.NO_WORKER, Unavailable(message))


def revision_gone() -> Refusal:
    """Return the refusal of a request whose revision of the model, or of the adapter, no worker has any more."""
    return Refusal(Reason.REVISION_GONE, RevisionGone("no worker has the revision of the model with which it began"))


def over_limit(reason: Reason, tenant: str, limit: str, requested: str, retry_after_s: float) -> Refusal:
    """Return the refusal by a tenant's limit; an infinite `retry_after_s` means never."""
    reached = f"tenant:{tenant}", f"{reason}: {limit}"
    if retry_after_s == float("inf"):
        message = f"{reason} of tenant {tenant!r} is {limit}, and this one is {requested}: it can never be admitted"
        return Refusal(reason, Overloaded(message, permanent=True, limit=reached))
    error = Overloaded(f"tenant {tenant!r} is at its {reason} of {limit}", retry_after_s=retry_after_s, limit=reached)
    return Refusal(reason, error)
