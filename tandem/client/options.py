"""Keyword arguments that the calls of both clients share, as types."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from protos import inference_pb2 as pb
from tandem.client.call_span import Metadata
from tandem.client.parts import Medium, Message

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
