"""POST /v1/completions, /tokenize and /detokenize: bodies to requests, texts to tokens, and choices with logprobs.

Log probabilities have the formats of OpenAI's APIs, and of vLLM for prompts.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.blocks import in_one_line
from router.frontend.http.body.fields import BodyReader, Count, IgnoredFields, Inputs, Model, TokenId, inputs_of
from router.frontend.http.body.media import Given, named_media
from router.frontend.http.endpoint import EndpointContext, JsonEndpoint
from router.frontend.http.errors import Caller
from router.frontend.http.generation import PromptInfo
from router.frontend.openai.chat import (
    Message,
    ToolsBody,
    read_messages,
    read_prompt_end,
    read_tools,
    template_variables,
)
from router.frontend.openai.request import ApiRequest, GenerationBody, check_choices, common, read_sampling, requests_of
from router.models.output.call_reading import ToolCall
from router.models.output.output_format import OutputParser
from router.models.output.token_texts import FormOf, TextToken, TokensInText

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
MAX_PROMPTS = 256


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Inputs
    logprobs: Count | None = None
    echo: bool | None = None


def _request(body: CompletionBody, caller: Caller, ignored: IgnoredFields) -> ApiRequest:
    echo, max_tokens = bool(body.echo), DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if only_echo := echo and max_tokens == 0:
        max_tokens = 1  # an engine generates at least one token; the answer omits it
    names: dict[str, str] = {}
    sampling = read_sampling(body, max_tokens, body.logprobs, names)
    prompts = inputs_of(body.prompt, "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    request, api_request = common(body, caller, sampling, names)
    api_request.echo, api_request.only_echo = echo, only_echo
    api_request.echo_logprobs = echo and body.logprobs is not None
    if api_request.stream and (only_echo or api_request.echo_logprobs):
        raise InvalidRequest("echo", "cannot be streamed with logprobs or max_tokens 0")
    if api_request.echo_logprobs and body.prompt_logprobs is None:
        request.sampling.prompt_logprobs = request.sampling.logprobs
    api_request.requests += requests_of(request, prompts)
    check_choices(api_request, "n" if len(prompts) == 1 else "prompt")
    return api_request


read_completion = BodyReader(CompletionBody, _request)


@dataclass(frozen=True, slots=True)
class TokensRequest:
    """One request to tokenise."""

    request: pb.TokenizeRequest
    returns_texts: bool
    """Whether the answer has each token's text."""
    media: Given


def tokenizer_endpoint(context: EndpointContext) -> JsonEndpoint[TokensRequest]:
    """Return the application of /tokenize."""

    async def tokenize(api_request: TokensRequest, caller: Caller) -> dict[str, Any]:
        request = api_request.request
        with named_media(request.messages, api_request.media):
            reply = await context.queries.tokenize(request, caller.principal, is_charged=True)
        texts = None
        if api_request.returns_texts:
            encoder = context.queries.model_of(reply.model, caller.principal).encoder
            texts = [encoder.token(token_id).text for token_id in reply.token_ids]
        ids = list(reply.token_ids)
        return {"count": len(ids), "max_model_len": reply.max_context_tokens, "tokens": ids, "token_strs": texts}

    return JsonEndpoint(context, read_text, tokenize, names={"text": "prompt"})


class TokenizeBody(ToolsBody):
    """Body of POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


def _text_request(body: TokenizeBody, caller: Caller, ignored: IgnoredFields) -> TokensRequest:
    request = pb.TokenizeRequest(model=body.model or "", add_special_tokens=body.add_special_tokens)
    media: Given = []
    if body.messages is not None:
        ignored.unread("", "prompt", body.prompt)
        chat = pb.GenerateRequest(messages=read_messages(body.messages, media))
        read_tools(body, chat, ignored)
        read_prompt_end(body, chat)
        request.chat_template_kwargs = template_variables(body)
        request.messages.extend(chat.messages)
        request.tools.extend(chat.tools)
        request.continue_final_message = chat.continue_final_message
        request.no_generation_prompt = chat.no_generation_prompt
    elif body.prompt is not None:
        request.text = body.prompt
        for name in ToolsBody.__struct_fields__:  # those of a chat
            ignored.unread("", name, getattr(body, name))
    else:
        raise InvalidRequest("prompt", "is missing")
    return TokensRequest(request, bool(body.return_token_strs), media)


read_text = BodyReader(TokenizeBody, _text_request)


def detokenizer_endpoint(context: EndpointContext) -> JsonEndpoint[tuple[str, list[int]]]:
    """Return the application of /detokenize."""

    async def detokenize(api_request: tuple[str, list[int]], caller: Caller) -> dict[str, Any]:
        name, token_ids = api_request
        return {"prompt": await context.queries.detokenize(name, caller.principal, token_ids)}

    return JsonEndpoint(context, read_tokens, detokenize, names={"token_ids": "tokens"})


class DetokenizeBody(Model):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId] | None = None


read_tokens = BodyReader(DetokenizeBody, lambda body, _caller, _ignored: (body.model or "", body.tokens or []))


LEAST = -9999.0
"""Value in place of minus infinity, which JSON cannot express; vLLM's value."""


class LogprobForm:
    """Form of one request's log probabilities."""

    def __init__(self, form_of: FormOf, as_ids: bool = False) -> None:
        """Create it; `as_ids`: name tokens `token_id:7` instead of their texts."""
        self._form_of = form_of
        self._as_ids = as_ids

    def chat(self, tokens: Iterable[TextToken]) -> list[dict[str, Any]]:
        """Return one entry for each token; its bytes are those that the text has of it."""
        return [
            self._entry(token.token_id, token.value.logprob, token.raw)
            | {"top_logprobs": [self._entry(top_id, top) for top_id, top in _tops(token.value)]}
            for token in tokens
        ]

    def _entry(self, token_id: int, logprob: float, raw: bytes | None = None) -> dict[str, Any]:
        raw = self._form_of(token_id).raw if raw is None else raw
        return {"token": self._name(token_id), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    def completion(self, tokens: Sequence[TextToken]) -> dict[str, list[Any]]:
        """Return the lists of a completion: names, offsets and values of the tokens."""
        return {
            "tokens": [self._name(token.token_id, token.text) for token in tokens],
            "token_logprobs": [max(token.value.logprob, LEAST) for token in tokens],
            "top_logprobs": [self._named_tops(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _named_tops(self, token: TextToken) -> dict[str, float]:
        name = self._name(token.token_id, token.text)
        named: dict[str, float] = {}
        for top_id, top in _tops(token.value):
            named.setdefault(name if top_id == token.token_id else self._name(top_id), top)
        return named | {name: max(token.value.logprob, LEAST)}

    def _name(self, token_id: int, text: str | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._form_of(token_id).text if text is None else text

    def echoed(
        self, prompt: Sequence[int], pieces: Sequence[str], scored: Sequence[pb.TokenLogprobs]
    ) -> dict[str, list[Any]]:
        """Return the lists of an echoed prompt, whose first token has no values."""
        tokens, offset = [], 0
        for token_id, text, value in zip(prompt, pieces, (pb.TokenLogprobs(), *scored), strict=True):
            tokens.append(TextToken(token_id, value, text, text.encode(), offset))
            offset += len(text)
        lists = self.completion(tokens)
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        return lists


def joined(parts: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Join the parts of several messages of one choice; None without any."""
    whole: dict[str, list[Any]] | None = None
    for part in parts:
        if whole is None:
            whole = {name: [] for name in part}
        for name, values in part.items():
            whole[name] += values
    return whole


def prompt_logprobs(
    prompt: Sequence[int], scored: Sequence[pb.TokenLogprobs], form_of: FormOf
) -> list[dict[str, Any] | None]:
    """Return one entry for each token of the prompt, None for the first.

    A rank is known for the likeliest tokens only.
    """
    entries: list[dict[str, Any] | None] = [None]
    for token_id, logprobs in zip(prompt[1:], scored, strict=True):
        entry: dict[str, Any] = {
            str(top_id): {"logprob": top, "rank": rank, "decoded_token": form_of(top_id).text}
            for rank, (top_id, top) in enumerate(_tops(logprobs), start=1)
        }
        own = {"logprob": max(logprobs.logprob, LEAST), "rank": None, "decoded_token": form_of(token_id).text}
        entry.setdefault(str(token_id), own)
        entries.append(entry)
    return entries


def _tops(logprobs: pb.TokenLogprobs) -> Iterable[tuple[int, float]]:
    return zip(logprobs.top_token_ids, (max(top, LEAST) for top in logprobs.top_logprobs), strict=True)


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
    tokens: TokensInText
    """Tokens with log probabilities that wait for their text."""
    logprob_form: LogprobForm
    has_logprobs: bool = False
    """Whether a message had log probabilities."""
    has_begun: bool = False
    num_tokens: int = 0
    reason: str | None = None
    stop_reason: str | int | None = None
    text: list[str] = field(default_factory=list)
    """Text in pieces; this and the following are kept for a whole answer only."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    begun: str = ""
    """Id of a call whose arguments are being streamed; empty: none."""
    is_cut: bool = False
    """Whether the last call is not complete."""
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add_call(self, call: ToolCall) -> dict[str, Any]:
        """Add a whole call, begun or not; return it as the API has it."""
        call_id, self.begun = self.begun or call_id_of(call.id), ""
        function = {"name": call.name, "arguments": call.arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})
        self.is_cut = call.is_cut
        return self.calls[-1]

    def certain(self, message: pb.GenerateResponse) -> list[TextToken]:
        """Return the tokens with log probabilities whose text is known with this message.

        The text may lag the tokens, and a stop string may still cut it off.
        """
        self.has_logprobs = self.has_logprobs or bool(message.logprobs)
        if not self.has_logprobs:
            return []
        token_ids = message.token_ids if message.logprobs else ()
        return self.tokens.add(token_ids, message.logprobs, message.text, message.HasField("finish"))


def call_id_of(own: str) -> str:
    """Return the id of a call: the model's own, if any."""
    return own or f"call_{secrets.token_hex(12)}"


def quoted(text: str) -> bytes:
    """Return a text as a JSON string."""
    return in_one_line(encode_basestring(text)).encode()
