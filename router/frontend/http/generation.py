"""Common parts of all generating APIs: a request as it was read, and the maker of its answer. Pure."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protos import inference_pb2 as pb
from router.frontend.http.body.media import GivenMedium
from router.models.output.output_format import OutputParser
from router.models.output.token_texts import FormOf


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """A prompt that was checked."""

    model: str
    """Model that serves it."""
    prompt: list[int]
    echo: str
    """Text before the output."""
    form_of: FormOf
    new_parser: Callable[[], OutputParser | None] = lambda: None
    """Function that returns a parser of a choice's output; None where all of it is text."""
    echo_pieces: Callable[[], list[str]] = list
    """Function that returns the part of `echo` that each token of the prompt has."""
    keeps_special: bool = False
    """Whether the output's text has special tokens."""


@dataclass(slots=True)
class Generation:
    """One HTTP request, as it is to be served and answered."""

    request_id: str
    """Id in logs, receipts and `x-request-id`: the client's, or one that was drawn."""
    requests: list[pb.GenerateRequest]
    """Requests, one for each prompt."""
    names: dict[str, str]
    """Client's names of fields that we call otherwise."""
    stream: bool = False
    deadline_s: float | None = None
    max_open: int | None = None
    """Requests that run at a time; None: all."""
    echo: bool = False
    """Whether the texts of completions begin with their prompts."""
    media: list[GivenMedium] = field(default_factory=list)
    """Media of the body in their order, which are the last ones of its only request."""
    ignored: Sequence[str] = ()
    """Fields of the body that had no effect."""
    answer_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Id of the answer without its prefix. Always drawn: `request_id` may be a client's, which can come twice."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since the epoch."""


class Answer(ABC):
    """Maker of the answer to one HTTP request.

    First `begin` each prompt, then `chunk` or `absorb` its messages.
    """

    @abstractmethod
    def begin(self, number: int, served: PromptInfo) -> None:
        """Begin a prompt that was checked."""

    @abstractmethod
    def chunk(self, number: int, message: pb.GenerateResponse) -> bytes:
        """Return the events of a prompt's message, perhaps none."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the finish of every choice was seen."""

    @abstractmethod
    def absorb(self, number: int, message: pb.GenerateResponse) -> None:
        """Add a message of a prompt to the whole answer."""

    @abstractmethod
    def whole(self) -> bytes:
        """Return the whole answer, once all messages were absorbed."""
