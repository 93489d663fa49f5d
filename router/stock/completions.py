"""Requests of a router as bodies of `/v1/completions`, and the chunks of the answers as an engine's messages.

Pure. Prompts and outputs are token ids, so that a stream can go on at another server.

Requests at servers that return no token ids: text in, text out, in OpenAI's API.

Such a stream goes on nowhere else. Stop strings, usage and the end are the server's own.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer

from cluster.errors import InvalidRequest, RevisionGone, ServiceError, Unavailable
from engine.core_types import FinishReason, StructuredOutput, TokenLogprobs
from engine.messages.from_engine import PromptScored, Token
from engine.sampling.structured_output import FIELD, read_structured
from loans.account import KvAccount
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from worker.requests.output_stream import origin_of
from worker.requests.placed_request import emitted_of, num_choices
from worker.requests.receipt import build_receipt, price_of

FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Finish reasons of vLLM that end a choice well. Its others, such as `abort`, end it because the server stops."""
TOKEN_ID = "token_id:"
"""Prefix of tokens in log probabilities, with `return_tokens_as_token_ids`."""
MAX_SEED = (1 << 63) - 1
FORMS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""Key in vLLM's `structured_outputs` of each form that is one text."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request of a stream: that of all choices, or of one which goes on."""

    body: dict[str, Any]
    choice: int | None
    """Number of its only choice; None: those of the answer's `index`."""

    @property
    def streams(self) -> bool:
        """Whether the answer comes in chunks."""
        return bool(self.body.get("stream"))


def inexact_options(request: pb.DecodeRequest) -> list[str]:
    """Return the options with which another server cannot go on exactly after the tokens that were sent.

    Its grammar would begin anew, its penalties would not count earlier output, and a seed would draw the same numbers
    again.
    """
    sampling = request.sampling
    given = {
        FIELD: sampling.HasField("structured"),
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.seed": not request.seed_is_drawn and sampling.temperature != 0,
    }
    return [option for option, is_given in given.items() if is_given]


def calls_of(
    request: pb.DecodeRequest, model: str, prompt: Sequence[int], lender: str, approximately: bool
) -> list[Call]:
    """Return the HTTP requests for what is left of a stream; `lender` is the URL of the server that lends, or empty.

    Raises InvalidRequest for what a stock server cannot do, and RevisionGone where it cannot go on exactly and may not
    go on `approximately`.
    """
    if request.HasField("embedding"):
        raise InvalidRequest("embedding", "stock servers behind this router generate only")
    if request.items:
        raise InvalidRequest("media", "stock servers behind this router read text only")
    emitted = [emitted_of(request, choice)[0] for choice in range(num_choices(request.sampling))]
    common = _options(request) | {"model": model}
    if lender:
        common["kv_transfer_params"] = {"lender": lender}
    if not any(emitted) and not request.finished_choices:
        choices = {"n": len(emitted)} if len(emitted) > 1 else {}
        return [Call(common | choices | _lengths(request, 0) | {"prompt": list(prompt)}, None)]
    if (inexact := inexact_options(request)) and not approximately:
        raise RevisionGone(
            f"the server of this stream is gone, and no other can go on exactly with {' and '.join(inexact)}: send the"
            " request again, or set continue_approximately in the fleet's file"
        )
    common.pop("structured_outputs", None)  # its grammar would begin anew in the middle of the output
    common.pop("prompt_logprobs", None)
    finished = set(request.finished_choices)
    return [
        Call(common | _lengths(request, len(tokens)) | {"prompt": [*prompt, *tokens], "stream": True}, choice)
        for choice, tokens in enumerate(emitted)
        if choice not in finished
    ]


def _options(request: pb.DecodeRequest) -> dict[str, Any]:
    """Return the options of sampling, each named: a server's own defaults must not fill in.

    Stop strings are searched by the router, which sees the text over all servers of a stream.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if not request.seed_is_drawn:  # with a seed of its own a request is sampled apart from its batch
        body["seed"] = sampling.seed & MAX_SEED
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.HasField("logprobs"):
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if (structured := read_structured(sampling)) is not None:
        body["structured_outputs"] = _structured(structured)
    if sampling.HasField("prompt_logprobs") and not request.emitted_prompt_logprobs:
        # vLLM has them in whole answers only.
        body |= {"prompt_logprobs": sampling.prompt_logprobs, "stream": False}
        del body["stream_options"]
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return body


def _structured(structured: StructuredOutput) -> dict[str, Any]:
    if structured.kind == "json_object":
        return {"json_object": True}
    if structured.kind == "choice":
        return {"choice": list(structured.texts)}
    return {FORMS[structured.kind]: structured.texts[0]}


def _lengths(request: pb.DecodeRequest, num_emitted: int) -> dict[str, Any]:
    sampling = request.sampling
    warm = request.HasField("warm")  # a server generates at least one token
    lengths: dict[str, Any] = {"max_tokens": 1 if warm else sampling.max_tokens - num_emitted}
    if (left := sampling.min_tokens - num_emitted) > 0:
        lengths["min_tokens"] = left
    return lengths


# ---------------------------------------------------------------------------- answers


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class Chunk(msgspec.Struct):
    """Chunk of an answer, or a whole one."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server had cached; None where it does not tell."""
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return None if details is None else details.cached_tokens


_decoder = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes, where: str) -> Chunk:
    """Parse a chunk. Raises ServiceError for an error that the server sent, and for what is no chunk."""
    try:
        chunk = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"{where} sent no chunk of a completion: {error}") from None
    if chunk.error is not None:
        raise error_of(chunk.error.code, chunk.error.message, where)
    return chunk


def error_of(code: int | str | None, message: str, where: str) -> ServiceError:
    """Return the error for a status that a server answered with, or wrote into its stream."""
    if code in (400, 413, 422):
        return InvalidRequest("request", f"{where} refuses it: {message}")
    return Unavailable(f"{where} answered {code}: {message}")


def tokens_of(call: Call, chunk: Chunk, request: pb.DecodeRequest, where: str) -> list[Token]:
    """Return the tokens of a chunk as an engine's messages.

    Raises Unavailable for an end that is none of the request's, and a chunk without token ids.
    """
    tokens: list[Token] = []
    num_top = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
    for part in chunk.choices:
        index = part.index if call.choice is None else call.choice
        if part.token_ids is None:
            raise Unavailable(f"{where} sent text without token ids")
        finish = None
        if part.finish_reason is not None:
            finish = FINISHES.get(part.finish_reason)
            if finish is None or not part.token_ids:
                raise Unavailable(f"{where} ended the request: finish_reason {part.finish_reason!r}")
        last = len(part.token_ids) - 1
        for number, token_id in enumerate(part.token_ids):
            scores = None if num_top is None else _logprobs(part.logprobs, number, num_top, where)
            ends = finish if number == last else None
            tokens.append(Token(request.request_id, token_id, scores, None, ends, index))
    return tokens


def _logprobs(given: _Logprobs | None, number: int, num_top: int, where: str) -> TokenLogprobs:
    if given is None or number >= len(given.token_logprobs):
        raise Unavailable(f"{where} sent a token without the log probabilities that were asked for")
    own = given.token_logprobs[number]
    top = (given.top_logprobs or [])[number : number + 1]
    ranked = sorted(((top[0] if top else None) or {}).items(), key=lambda each: -each[1])[:num_top]
    ids = tuple(int(name.removeprefix(TOKEN_ID)) for name, _ in ranked)
    return TokenLogprobs(float("-inf") if own is None else own, ids, tuple(score for _, score in ranked))


def prompt_scores(chunk: Chunk, request: pb.DecodeRequest, prompt: Sequence[int]) -> PromptScored | None:
    """Return the log probabilities of the prompt in a whole answer; None where it has none."""
    found = next((each.prompt_logprobs for each in chunk.choices if each.prompt_logprobs), None)
    if found is None:
        return None
    scored = []
    for token_id, given in zip(prompt[1:], found[1:], strict=False):
        by_id: Mapping[str, _PromptLogprob] = given or {}
        own = by_id.get(str(token_id))
        ranked = sorted(by_id.items(), key=lambda each: -each[1].logprob)[: request.sampling.prompt_logprobs]
        ids, scores = tuple(int(each) for each, _ in ranked), tuple(score.logprob for _, score in ranked)
        scored.append(TokenLogprobs(own.logprob if own is not None else float("-inf"), ids, scores))
    return PromptScored(request.request_id, tuple(scored))


REASONS = {"stop": public_pb.FINISH_REASON_STOP, "length": public_pb.FINISH_REASON_LENGTH}


def plain_call(
    request: pb.DecodeRequest, model: str, prompt: Sequence[int], tokenizer: Tokenizer | None, takes_ids: bool
) -> Call:
    """Return the HTTP request.

    Raises InvalidRequest for options beyond OpenAI's API, and RevisionGone for a stream that began elsewhere.
    """
    sampling = request.sampling
    for option in refused_options(request):
        raise InvalidRequest(option, "is unknown to this server, which is no vLLM with token ids")
    if request.emitted_token_ids or request.emitted_chars or request.emitted_choices or request.finished_choices:
        raise RevisionGone("the server of this stream is gone, and it returned no token ids with which it could go on")
    if takes_ids or tokenizer is None:
        text: Any = list(prompt)
    else:
        text = tokenizer.decode(list(prompt), skip_special_tokens=False)
    body: dict[str, Any] = {
        "model": model,
        "prompt": text,
        "max_tokens": max(1, sampling.max_tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    given = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "n": num_choices(sampling) if num_choices(sampling) > 1 else None,
        "seed": None if request.seed_is_drawn else sampling.seed & MAX_SEED,
    }
    return Call(body | {name: value for name, value in given.items() if value}, None)


def refused_options(request: pb.DecodeRequest) -> Iterator[str]:
    """Yield the options of a request that OpenAI's API does not have."""
    sampling = request.sampling
    given = {
        "embedding": request.HasField("embedding"),
        "media": bool(request.items),
        "sampling.top_k": sampling.top_k > 0,
        "sampling.min_p": sampling.min_p > 0,
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.min_tokens": sampling.min_tokens > 0,
        "sampling.stop_token_ids": bool(sampling.stop_token_ids),
        "sampling.ignore_eos": sampling.ignore_eos,
        "sampling.logprobs": sampling.HasField("logprobs"),
        "sampling.prompt_logprobs": sampling.HasField("prompt_logprobs"),
        "sampling.structured": sampling.HasField("structured"),
    }
    return (option for option, is_given in given.items() if is_given)


class PlainOutput:
    """Client messages of an answer that has text only."""

    def __init__(self, request: pb.DecodeRequest, worker_id: str, where: str) -> None:
        """Create it; `where` names the server in errors."""
        self._request = request
        self._worker_id = worker_id
        self._where = where
        self._received_at = time.monotonic()
        self._account = KvAccount(times={"admitted": self._received_at}, is_predicted=True)
        self._origin = origin_of(request) if request.tells_origin else None
        self._reasons: dict[int, public_pb.FinishReason.ValueType] = {}
        self._last: list[public_pb.GenerateResponse] = []
        self._num_choices = num_choices(request.sampling)
        self._usage: dict[str, int] = {}

    def absorb(self, chunk: Chunk) -> list[public_pb.GenerateResponse]:
        """Return the messages of a chunk; those that end a choice wait for the usage. Raises Unavailable."""
        messages = []
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self._usage = {"prompt": chunk.usage.prompt_tokens or 0, "completion": chunk.usage.completion_tokens}
        for part in chunk.choices:
            self._account.times.setdefault("first_token", time.monotonic())
            message = public_pb.GenerateResponse(text=part.text, index=part.index)
            if self._origin is not None:
                message.origin.CopyFrom(self._origin)
                self._origin = None
            if part.finish_reason is None:
                messages.append(message)
                continue
            reason = REASONS.get(part.finish_reason)
            if reason is None:
                raise Unavailable(f"{self._where} ended the request: finish_reason {part.finish_reason!r}")
            message.finish.reason = reason
            self._last.append(message)
        return messages

    def ended(self) -> list[public_pb.GenerateResponse]:
        """Return the last messages, after the answer's end. Raises Unavailable where choices have none."""
        if len(self._last) < self._num_choices:
            raise Unavailable(f"{self._where} ended the answer before the request was done")
        finish = self._last[-1].finish
        num_completion = self._usage.get("completion", 0)
        finish.usage.prompt_tokens = self._usage.get("prompt", len(self._request.prompt_token_ids))
        finish.usage.completion_tokens = num_completion
        receipt = build_receipt(self._request, self._account, 1, self._received_at, time.monotonic(), self._worker_id)
        if self._request.HasField("price"):
            receipt.price.CopyFrom(price_of(self._request, num_completion))
        finish.receipt.CopyFrom(receipt)
        return self._last
