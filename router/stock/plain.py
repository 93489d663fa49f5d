"""Requests at servers that return no token ids: text in, text out, in OpenAI's API.

Such a stream goes on nowhere else. Stop strings, usage and the end are the server's own.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from cluster.errors import InvalidRequest, RevisionGone, Unavailable
from loans.account import KvAccount
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from router.stock.completions import MAX_SEED, Call, Chunk
from worker.requests.output_stream import origin_of
from worker.requests.placed_request import num_choices
from worker.requests.receipt import build_receipt, price_of

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
