"""Keyword arguments that the calls of both clients share, as types.

Chat messages and media as callers write them, to messages of the wire.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_args

from cluster.errors import InvalidRequest
from engine.media import MediaKind
from protos import inference_pb2 as pb
from tandem.client.call_span import Metadata

Part = str | Mapping[str, Any] | pb.ContentPart
"""Part of a message: a text, or a mapping. `{"type": "text", "text": ...}` is a text; `{"type": "image"}`, or "audio"
or "video", is a file with one of `path` (read here), `data` (bytes) and `url`."""
Medium = Mapping[str, Any] | pb.Media
Message = tuple[str, str | Sequence[Part]]
"""Chat message as (role, content); the content is a text, or parts."""
KINDS: tuple[str, ...] = get_args(MediaKind)
SOURCES = ("path", "data", "url")


def chat_message(message: Message | pb.ChatMessage, where: str) -> pb.ChatMessage:
    """Return a message; `where` names it in errors.

    Raises InvalidRequest.
    """
    if isinstance(message, pb.ChatMessage):
        return message
    role, content = message
    if isinstance(content, str):
        return pb.ChatMessage(role=role, content=content)
    parts = [_part(part, f"{where}.parts[{place}]") for place, part in enumerate(content)]
    return pb.ChatMessage(role=role, parts=parts)


def medium(given: Medium, where: str) -> pb.Media:
    """Return a picture, sound or video, whose file is read where a path is given; `where` names it in errors.

    Raises InvalidRequest.
    """
    if isinstance(given, pb.Media):
        return given
    kind, sources = str(given.get("type")), [name for name in SOURCES if given.get(name) is not None]
    unknown = given.keys() - {"type", *SOURCES}
    if kind not in KINDS or len(sources) != 1 or unknown:
        reason = f'needs "type", one of {", ".join(KINDS)}, and one of {", ".join(SOURCES)}, not {sorted(given)}'
        raise InvalidRequest(where, reason)
    (source,) = sources
    if source != "path":
        return pb.Media(kind=kind, **{source: given[source]})
    try:
        return pb.Media(kind=kind, data=Path(given["path"]).read_bytes())
    except OSError as error:
        raise InvalidRequest(where, f"{given['path']} cannot be read: {error.strerror}") from None


def picture(given: str) -> dict[str, str]:
    """Return a picture that is named by a path or a URL."""
    is_url = given.lower().startswith(("http://", "https://", "data:"))
    return {"type": "image", "url" if is_url else "path": given}


def _part(part: Part, where: str) -> pb.ContentPart:
    if isinstance(part, pb.ContentPart):
        return part
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return pb.ContentPart(text=part["text"])
    return pb.ContentPart(media=medium(part, where))


Json = str | Mapping[str, Any]
"""JSON object, as text or as a mapping."""


class CallOptions(TypedDict, total=False):
    """Options of any call."""

    timeout_s: float | None
    """Deadline of the call in seconds; None: no deadline."""
    metadata: Metadata
    """gRPC metadata sent with the call beside the client's own; names in lower case."""


class PromptOptions(CallOptions, total=False):
    """Options that say what the prompt is, where it is no text, and which model reads it."""

    messages: Sequence[Message | pb.ChatMessage]
    token_ids: Sequence[int]
    tools: Sequence[Json]
    """Functions that the model may call, each as OpenAI's `{"type": "function", ...}`."""
    chat_template_kwargs: Json
    """Further variables of the chat template."""
    model: str
    """Name of a served model, or "auto"; empty: the router's default."""


class PromptEndOptions(PromptOptions, total=False):
    """Options that say where the prompt of a chat ends."""

    continue_final_message: bool
    """Whether the output goes on with the last message's text."""
    no_generation_prompt: bool
    """Whether the prompt ends after the last message, without the template's beginning of an answer."""


class TokenizeOptions(PromptEndOptions, total=False):
    """Options of `tokenize`."""

    add_special_tokens: bool | None
    """Whether a text gets the special tokens that the tokenizer puts around a prompt; default true."""


class GenerateOptions(PromptEndOptions, total=False):
    """Options of `generate` and `explain`; fields of GenerateRequest in docs/grpc.md."""

    sampling: pb.Sampling | None
    request_id: str
    session_id: str
    """Name of a conversation, whose requests prefer the same workers."""
    prompt_cache_key: str
    cache_salt: str
    priority: int
    """Priority class; higher runs first, below 0 is batch work."""
    tenant: str
    max_ttft_ms: float | None
    task: str
    min_quality: float
    media: Sequence[Medium]
    """Pictures, sounds and videos for the placeholders in a text or in token ids; those of messages are their parts."""
    parse_output: bool
    """Whether pieces hold reasoning and tool calls as `parts` too."""
    stream_tool_calls: bool
    """Whether `parts` hold tool calls also as deltas while these are generated; needs `parse_output`."""
    tool_choice: str
    single_tool_call: bool
    reasoning_effort: str
    cache_retention_s: float | None
    """Time for which the prompt's blocks stay in the cache, in seconds."""


class WarmOptions(PromptOptions, total=False):
    """Options of `warm`; fields of WarmRequest in docs/grpc.md."""

    workers: int
    """Number of decode workers that shall hold the prompt; default 1."""
    cache_retention_s: float | None
    store: bool
    """Whether the blocks are written to the shared store too."""
    tenant: str
    cache_salt: str
    priority: int | None
    request_id: str


class EmbedOptions(CallOptions, total=False):
    """Options of `embed`."""

    model: str
    dimensions: int | None
    """Length of each vector; None: the model's own."""
    cache_salt: str
    session_id: str
    prompt_cache_key: str
    tenant: str
    priority: int
    max_ttft_ms: float | None
