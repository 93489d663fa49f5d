"""Validation of a request: limits, each with the field it names, and defaults.

Pure.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import get_args

from cluster.errors import InvalidRequest
from engine.core_types import MAX_CHAINS, Pooler
from engine.media import MediaKind
from engine.model.detokenizer import check_token_ids
from engine.model.model_dir import ModelDir
from engine.sampling.structured_output import FIELD, read_structured
from protos import inference_pb2 as pb

DEFAULT_MAX_TOKENS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_ANSWER_MIB = 128
"""Memory of an answer that is not streamed: the router keeps all of it."""
TOKEN_BYTES, LOGPROB_BYTES = 64, 150
"""Memory of a token in such an answer, and of each of its log probabilities."""
MAX_MESSAGES = 4096
"""Messages of a chat, and tool calls in them."""
MAX_MEDIA = 256
"""Pictures, sounds and videos of a request; a preprocessor may take fewer."""
MEDIA_KINDS = get_args(MediaKind)
MEDIA_SCHEMES = ("http://", "https://", "data:")
MAX_URL_CHARS = 8192
"""Longest URL of a medium, but for data: URLs."""
MAX_LOGPROBS = 20
MAX_NAME_CHARS = 256
MAX_REPETITION_PENALTY = 10.0
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MAX_TEMPERATURE = 100.0
MAX_RETENTION_S = 86_400.0


def resolve_sampling(sampling: pb.Sampling, num_prompt: int, model_dir: ModelDir, clamps: bool = False) -> pb.Sampling:
    """Return a copy with every field set and in range.

    `clamps`: lower a `max_tokens` beyond the context instead of refusing it. Raises InvalidRequest.
    """
    for name in ("beam_width", "length_penalty", "early_stopping"):
        if name in {field.name for field, _ in sampling.ListFields()}:
            raise InvalidRequest(f"sampling.{name}", "Tandem serves no beam search")
    resolved = pb.Sampling()
    resolved.CopyFrom(sampling)
    context = model_dir.max_context_tokens
    if not sampling.HasField("max_tokens"):
        resolved.max_tokens = max(1, min(DEFAULT_MAX_TOKENS, context - num_prompt))
    elif clamps and sampling.max_tokens > context - num_prompt > 0:
        resolved.max_tokens = context - num_prompt
    if not sampling.HasField("n"):
        resolved.n = 1
    _fill_defaults(resolved, model_dir.sampling_defaults)
    if not sampling.HasField("seed"):
        resolved.seed = secrets.randbits(63)
    _check_numbers(resolved)
    _check_stops(resolved, model_dir)
    _check_bias(resolved, model_dir.vocab_size)
    _check_structured(resolved, model_dir)
    if num_prompt + resolved.max_tokens > context:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"prompt of {num_prompt} tokens + max_tokens of {resolved.max_tokens} exceed the context of {context}; "
            "the setting clamp_max_tokens lowers max_tokens instead",
        )
    return resolved


def _fill_defaults(sampling: pb.Sampling, recommended: Mapping[str, float]) -> None:
    """Fill unset fields with the model's recommendations, where in range, or with neutral values."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    sound = {name: value for name, value in recommended.items() if _is_in_range(name, value)}
    for name, value in (neutral | sound).items():
        if not sampling.HasField(name):  # type: ignore[arg-type]
            setattr(sampling, name, value)


def _is_in_range(name: str, value: float) -> bool:
    option = pb.Sampling(max_tokens=1, n=1, temperature=1, top_p=1, repetition_penalty=1)
    try:
        setattr(option, name, value)
        _check_numbers(option)
    except (InvalidRequest, TypeError, ValueError):
        return False
    return True


def check_prompt(token_ids: Sequence[int], field: str, model_dir: ModelDir) -> None:
    """Check a prompt.

    Raises InvalidRequest for an empty one, a token out of range, or a length beyond the context.
    """
    if not token_ids:
        raise InvalidRequest(field, "the prompt is empty")
    check_token_ids(token_ids, field, model_dir.vocab_size)
    if len(token_ids) >= model_dir.max_context_tokens:
        limit = model_dir.max_context_tokens
        raise InvalidRequest(field, f"prompt of {len(token_ids)} tokens leaves no room in the context of {limit}")


def check_resume(request: pb.GenerateRequest) -> None:
    """Check what a request to continue a stream may be combined with.

    Raises InvalidRequest.
    """
    sampling = request.sampling
    if request.HasField("embedding") or request.stream_tool_calls:
        raise InvalidRequest("resume", "cannot be combined with embedding and stream_tool_calls")
    if request.media or any(part.HasField("media") for message in request.messages for part in message.parts):
        raise InvalidRequest("resume", "a stream of a prompt with media cannot be continued elsewhere")
    if not (sampling.HasField("seed") or (sampling.HasField("temperature") and sampling.temperature == 0)):
        raise InvalidRequest("sampling.seed", "is needed to resume a stream, unless temperature is 0")
    try:
        revision = bytes.fromhex(request.resume.origin.revision)
    except ValueError:
        revision = b""
    if not revision:
        raise InvalidRequest("resume.origin.revision", f"{request.resume.origin.revision!r} is no revision")


def check_resumed(resume: pb.Resume, sampling: pb.Sampling, num_prompt: int, vocab_size: int) -> None:
    """Check what a client has of a stream against its resolved options.

    Raises InvalidRequest.
    """
    indices = [choice.index for choice in resume.choices]
    for number, choice in enumerate(resume.choices):
        field = f"resume.choices.{number}"
        if choice.index >= sampling.n or choice.index in indices[:number]:
            raise InvalidRequest(f"{field}.index", f"must be below n, {sampling.n}, and named once, not {choice.index}")
        check_token_ids(choice.token_ids, f"{field}.token_ids", vocab_size)
        most = sampling.max_tokens - (not choice.finished)
        if len(choice.token_ids) > most:
            reason = (
                f"has {len(choice.token_ids)} tokens, at most {most} of max_tokens {sampling.max_tokens} are possible"
            )
            raise InvalidRequest(f"{field}.token_ids", reason)
    if sum(choice.finished for choice in resume.choices) == sampling.n:
        raise InvalidRequest("resume.choices", "all choices are finished: there is nothing to continue")
    most = num_prompt - 1 if sampling.HasField("prompt_logprobs") else 0
    if resume.prompt_logprobs > most:
        raise InvalidRequest("resume.prompt_logprobs", f"must be at most {most}, not {resume.prompt_logprobs}")


def check_embedding(request: pb.GenerateRequest, pooler: Pooler) -> None:
    """Check a request for a vector by a model with this pooler.

    Raises InvalidRequest.
    """
    for field in ("sampling", "messages", "tools", "parse_output", "media"):
        if request.HasField(field) if field == "sampling" else getattr(request, field):  # type: ignore[arg-type]
            raise InvalidRequest(field, "cannot be combined with embedding")
    wanted = request.embedding
    if wanted.HasField("dimensions") and not 1 <= wanted.dimensions <= pooler.dimensions:
        raise InvalidRequest("embedding.dimensions", f"must be 1 to {pooler.dimensions}, not {wanted.dimensions}")
    if wanted.HasField("text_pair") and not (pooler.classifies and request.HasField("text")):
        raise InvalidRequest("embedding.text_pair", "needs text, and a model that classifies pairs of texts")


def check_name_length(name: str, field: str) -> None:
    """Check the length of a name.

    Raises InvalidRequest for one that is too long.
    """
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(field, f"is longer than {MAX_NAME_CHARS} characters")


def check_names(request: pb.GenerateRequest) -> None:
    """Check names and the number of messages.

    Raises InvalidRequest for a name that is too long, and for too many messages.
    """
    for field in ("model", "tenant", "session_id", "prompt_cache_key", "request_id", "cache_salt", "task"):
        check_name_length(getattr(request, field), field)
    check_messages(request.messages)


def check_messages(messages: Sequence[pb.ChatMessage]) -> None:
    """Check the messages of a chat.

    Raises InvalidRequest for too many of them, of their tool calls or their media, for a role or name that is too long,
    and for a part without a text or a medium that can be read.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"at most {MAX_MESSAGES} messages, not {len(messages)}")
    num_calls = num_media = 0
    for number, message in enumerate(messages):
        num_calls += len(message.tool_calls)
        if message.parts:
            num_media += _check_parts(message, f"messages[{number}]")
        for field in ("role", "name", "tool_call_id"):
            if len(name := getattr(message, field)) > MAX_NAME_CHARS:  # the field's name is made only for a refusal
                check_name_length(name, f"messages[{number}].{field}")
    if num_calls > MAX_MESSAGES:
        raise InvalidRequest("messages", f"at most {MAX_MESSAGES} tool calls, not {num_calls}")
    _check_num_media(num_media, "messages")


def check_media(request: pb.GenerateRequest) -> None:
    """Check the media beside a text or token ids; `check_messages` checks those of messages.

    Raises InvalidRequest.
    """
    if not request.media:
        return
    if request.messages:
        raise InvalidRequest("media", "is for text and token_ids: with messages, media are in their parts")
    _check_num_media(len(request.media), "media")
    for number, medium in enumerate(request.media):
        _check_medium(medium, f"media[{number}]")


def _check_parts(message: pb.ChatMessage, where: str) -> int:
    """Check the parts of a message and return how many are media."""
    if message.content:
        raise InvalidRequest(f"{where}.parts", "cannot be combined with content")
    num_media = 0
    for place, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            raise InvalidRequest(f"{where}.parts[{place}]", "must have a text or a medium")
        if kind == "media":
            num_media += 1
            _check_medium(part.media, f"{where}.parts[{place}]")
    return num_media


def _check_medium(medium: pb.Media, where: str) -> None:
    if medium.kind not in MEDIA_KINDS:
        raise InvalidRequest(where, f"the kind must be one of {', '.join(MEDIA_KINDS)}, not {medium.kind[:80]!r}")
    source = medium.WhichOneof("source")
    if source is None:
        raise InvalidRequest(where, "needs data or a url")
    if source == "url":
        check_url(medium.url, where)


def check_url(url: str, field: str) -> None:
    """Check the form of a medium's URL; a preprocessor decides which hosts are allowed.

    Raises InvalidRequest.
    """
    if not url[:8].lower().startswith(MEDIA_SCHEMES):
        raise InvalidRequest(field, f"a url must begin with {', '.join(MEDIA_SCHEMES)}, not with {url[:16]!r}")
    if len(url) > MAX_URL_CHARS and not url[:5].lower() == "data:":
        raise InvalidRequest(field, f"a url may have {MAX_URL_CHARS} characters at most, not {len(url)}")


def _check_num_media(number: int, field: str) -> None:
    if number > MAX_MEDIA:
        raise InvalidRequest(field, f"at most {MAX_MEDIA} pictures, sounds and videos, not {number}")


def check_whole_answer(requests: Sequence[pb.GenerateRequest]) -> None:
    """Check that an answer to all of these requests can be kept until it is whole.

    Raises InvalidRequest.
    """
    num_bytes = 0
    for request in requests:
        sampling = request.sampling
        num_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        num_choices = max(1, sampling.n)
        num_logprobs = 1 + sampling.logprobs if sampling.HasField("logprobs") else 0
        num_bytes += num_choices * num_tokens * (TOKEN_BYTES + num_logprobs * LOGPROB_BYTES)
    if num_bytes > MAX_ANSWER_MIB << 20:
        reason = f"the whole answer could take {num_bytes >> 20} MiB, at most {MAX_ANSWER_MIB} can be kept: stream it"
        raise InvalidRequest("sampling.max_tokens", f"{reason}, or ask for fewer choices, tokens or logprobs")


def check_time_limit(request: pb.GenerateRequest) -> None:
    """Check the limit of the time to first token.

    Raises InvalidRequest.
    """
    if request.HasField("max_ttft_ms") and not 0 < request.max_ttft_ms < math.inf:
        raise InvalidRequest("max_ttft_ms", f"must be above 0 and finite, not {request.max_ttft_ms}")


def check_retention(request: pb.GenerateRequest) -> None:
    """Check the time for which the prompt's blocks are kept.

    Raises InvalidRequest.
    """
    if not request.HasField("cache_retention_s"):
        return
    if not 0 < request.cache_retention_s <= MAX_RETENTION_S:
        reason = f"must be above 0 and at most {MAX_RETENTION_S:g}, not {request.cache_retention_s:g}"
        raise InvalidRequest("cache_retention_s", reason)
    if request.HasField("embedding"):
        raise InvalidRequest("cache_retention_s", "is not available for embeddings")


def check_quality(request: pb.GenerateRequest) -> None:
    """Check the requested quality.

    Raises InvalidRequest for a quality that no model can have.
    """
    if not 0 <= request.min_quality <= 1:  # NaN is outside every range
        raise InvalidRequest("min_quality", f"must be 0 to 1, not {request.min_quality}")


def prompt_field(request: pb.GenerateRequest) -> str:
    """Return the name of the field that holds the prompt."""
    if request.HasField("text"):
        return "text"
    return "messages" if request.messages else "token_ids"


def _check_numbers(sampling: pb.Sampling) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens", f"must be at least 1, not {sampling.max_tokens}")
    if not math.isfinite(sampling.temperature) or not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise InvalidRequest("sampling.temperature", f"must be 0 to {MAX_TEMPERATURE:g}, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("sampling.top_p", f"must be above 0 and at most 1, not {sampling.top_p}")
    if sampling.top_k < 0:
        raise InvalidRequest("sampling.top_k", f"must be 0 (off) or more, not {sampling.top_k}")
    _check_range(sampling.min_p, "min_p", 0, 1)
    if not 0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        limits = f"above 0 and at most {MAX_REPETITION_PENALTY:g}"
        raise InvalidRequest("sampling.repetition_penalty", f"must be {limits}, not {sampling.repetition_penalty}")
    _check_range(sampling.presence_penalty, "presence_penalty", -2, 2)
    _check_range(sampling.frequency_penalty, "frequency_penalty", -2, 2)
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        limits = f"0 to max_tokens, {sampling.max_tokens}"
        raise InvalidRequest("sampling.min_tokens", f"must be {limits}, not {sampling.min_tokens}")
    if sampling.HasField("logprobs") and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest("sampling.logprobs", f"must be 0 to {MAX_LOGPROBS}, not {sampling.logprobs}")
    if sampling.HasField("prompt_logprobs"):
        _check_range(sampling.prompt_logprobs, "prompt_logprobs", 0, MAX_LOGPROBS)
    _check_range(sampling.n, "n", 1, MAX_CHAINS)


def _check_stops(sampling: pb.Sampling, model_dir: ModelDir) -> None:
    vocab_size = model_dir.vocab_size
    if sampling.stop and not model_dir.has_tokenizer:
        raise InvalidRequest("sampling.stop", "this model has no tokenizer, so its output has no text to stop in")
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("sampling.stop", f"at most {MAX_STOP_STRINGS} stop strings, not {len(sampling.stop)}")
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in sampling.stop):
        raise InvalidRequest("sampling.stop", f"each must have 1 to {MAX_STOP_CHARS} characters")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        num_ids = len(sampling.stop_token_ids)
        raise InvalidRequest("sampling.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} token ids, not {num_ids}")
    if any(token_id >= vocab_size for token_id in sampling.stop_token_ids):
        raise InvalidRequest("sampling.stop_token_ids", f"token ids must be below {vocab_size}")


def _check_bias(sampling: pb.Sampling, vocab_size: int) -> None:
    if len(sampling.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(
            "sampling.logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, not {len(sampling.logit_bias)}"
        )
    for token_id, bias in sampling.logit_bias.items():
        if token_id >= vocab_size:
            raise InvalidRequest("sampling.logit_bias", f"token ids must be below {vocab_size}, not {token_id}")
        _check_range(bias, "logit_bias", -MAX_BIAS, MAX_BIAS)


def _check_structured(sampling: pb.Sampling, model_dir: ModelDir) -> None:
    """Check the form's fields; `router/models/grammars/grammar_checker.py` checks that the grammar compiles."""
    if read_structured(sampling) is not None and not model_dir.has_tokenizer:
        raise InvalidRequest(
            FIELD, "this model has no tokenizer, so its tokens have no text that a grammar could check"
        )


def _check_range(value: float, field: str, low: float, high: float) -> None:
    """Check a range, which NaN is outside of."""
    if not low <= value <= high:
        raise InvalidRequest(f"sampling.{field}", f"must be {low:g} to {high:g}, not {value}")
