"""State of one choice while its answer is made."""

from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from router.frontend.http.generation import PromptInfo
from router.frontend.openai.logprobs import CompletionLogprobs
from router.models.output_format import OutputParser


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice so far."""

    index: int
    """Index over all prompts in order, and the choices of each."""
    served: PromptInfo
    head: bytes
    """Beginning of each of its events."""
    parser: OutputParser | None
    """Parser of reasoning and tool calls; None where all output is text."""
    offsets: CompletionLogprobs
    begun: bool = False
    num_tokens: int = 0
    reason: str | None = None
    stop_reason: str | int | None = None
    text: list[str] = field(default_factory=list)
    """Text in pieces; this and the following are kept for a whole answer only."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def quoted(text: str) -> bytes:
    """Return a text as a JSON string."""
    return encode_basestring(text).encode()
