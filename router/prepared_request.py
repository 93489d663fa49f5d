"""A checked and tokenised request, from preprocessing until its last message."""

from dataclasses import dataclass

from cluster.errors import DeadlineExceeded
from kvcache.items import Item
from protos import inference_pb2 as pb
from router.admission.request import RequestInfo
from router.models.media import ReadyMedia
from router.models.model_runtime import ModelRuntime
from router.models.model_selection import Verdict
from router.models.output.output_plan import OutputPlan


@dataclass(frozen=True, slots=True)
class WarmTarget:
    """Place where a request without output leaves the blocks of its prompt."""

    worker_id: str
    to_store: bool = False
    """Whether the worker writes them to the shared store, too."""


@dataclass(slots=True)
class PreparedRequest:
    """A checked request, its deadline, and what happened to it."""

    request: pb.GenerateRequest
    request_id: str
    model: ModelRuntime
    """Model runtime that serves it, bound to the files by which the prompt was read."""
    model_reason: str
    verdicts: tuple[Verdict, ...]
    """Verdicts on the compared models, when the request named `auto`."""
    prompt: list[int]
    """Prompt tokens, with all tokens of items."""
    sampling: pb.Sampling
    output: OutputPlan
    cache_salt: str
    """Cache salt of the request, with its tenant's where tenants are isolated."""
    arrived_at: float
    tokenised_at: float
    deadline: float
    """Deadline; all times are seconds of the router's clock."""
    info: RequestInfo
    media: ReadyMedia | None = None
    """Media of the prompt, which a preprocessor holds until they are closed; None: it has none."""
    items: tuple[Item, ...] = ()
    """Pictures, sounds and videos of the prompt, in order of their places."""
    revision: bytes = b""
    """Revision of the model that began the output; empty: none did."""
    warm: WarmTarget | None = None
    """Place of the prompt's blocks, which are wanted instead of an output; None: an output is wanted."""
    finish: pb.Finish | None = None
    """Last finish message of a successful request, with receipt and usage."""
    num_output_tokens: int = 0
    """Output tokens of all choices, set at the end."""

    def close(self) -> None:
        """Let go of the media, if there are any."""
        if self.media is not None:
            self.media.close()

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens, prompt and output."""
        return len(self.prompt) + self.sampling.max_tokens * self.sampling.n

    def remaining_s(self) -> float:
        """Return the seconds until the deadline.

        Raises DeadlineExceeded when none remain.
        """
        remaining = self.deadline - self.model.dispatcher.clock()
        if remaining <= 0:
            raise DeadlineExceeded("the deadline passed before the request was done")
        return remaining
