"""What is known of one prompt, and of one choice, while its answer is made."""

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from router.frontend.openai.logprobs import CompletionLogprobs, TokenText
from router.frontend.openai.tool_calls import ToolCallParser


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """A prompt, once it was checked."""

    model: str
    """That serves it."""
    prompt: list[int]
    echo: str
    """What the text begins with."""
    text_of: TokenText


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice so far."""

    index: int
    """Prompts in order, and the choices of each."""
    served: PromptInfo
    head: bytes
    """What each event of it begins with."""
    parser: ToolCallParser | None
    """Where calls of tools are looked for."""
    offsets: CompletionLogprobs
    begun: bool = False
    num_tokens: int = 0
    reason: str | None = None
    stop_reason: str | int | None = None
    text: list[str] = field(default_factory=list)
    """In pieces; this and what follows is kept for a whole answer only."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def quoted(text: str) -> bytes:
    """As JSON."""
    return encode_basestring(text).encode()


def compact(value: Any) -> str:
    """As JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
