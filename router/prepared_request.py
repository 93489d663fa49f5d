"""A checked and tokenised request, from preprocessing until its last message."""

import time
from dataclasses import dataclass, field

from cluster.errors import DeadlineExceeded
from protos import inference_pb2 as pb
from router.admission.request import RequestInfo
from router.models.model_runtime import ModelRuntime
from router.models.model_selection import Verdict
from router.placement.place import Decision
from router.placement.request_demand import num_outputs


@dataclass(slots=True)
class PreparedRequest:
    """A checked request and its clock."""

    request: pb.GenerateRequest
    request_id: str
    model: ModelRuntime
    """Whose workers serve it, whatever happens to them."""
    model_reason: str
    verdicts: tuple[Verdict, ...]
    """Of the models that were compared, where the request left the choice to the router."""
    prompt: list[int]
    sampling: pb.Sampling
    cache_salt: str
    """The request's, and its tenant's where tenants are kept apart."""
    arrived_at: float
    tokenised_at: float
    deadline: float
    """Seconds of the monotonic clock, as are the others."""
    info: RequestInfo
    finish: pb.Finish | None = None
    """The last one, once it ended well: with its receipt, and the usage and reason of the choice that ended last."""
    decision: Decision | None = None
    """Of its last attempt."""
    num_output_tokens: int = 0
    """Of all choices, once it ended."""
    reasons: list[pb.FinishReason.ValueType] = field(default_factory=list)
    """Why each choice ended, by its index."""

    @property
    def most_tokens(self) -> int:
        """Of prompt and output."""
        return len(self.prompt) + self.sampling.max_tokens * num_outputs(self.sampling)

    def remaining_s(self) -> float:
        """Raises DeadlineExceeded when nothing remains."""
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded("the deadline passed before the request was done")
        return remaining
