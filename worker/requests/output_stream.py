"""Output of one request on its decode worker: engine messages in, client messages out."""

import time

import numpy as np
from tokenizers import Tokenizer

from cluster.errors import InvalidRequest, Overloaded, ServiceError, Unavailable
from engine.core_types import FinishReason, TokenLogprobs
from engine.messages.from_engine import Embedded, Failed, Filled, FromEngine, PromptScored, Rejected, Token
from engine.model.detokenizer import TextStream
from kvcache.block_keys import token_digest
from loans.account import KvAccount
from protos import decode_pb2 as internal_pb
from protos import inference_pb2 as pb
from worker.requests.placed_request import emitted_of, num_choices
from worker.requests.receipt import build_receipt, price_of

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


MAX_PROMPT_LOGPROBS = 4096
"""Prompt log probabilities in one message at most; with 20 alternatives each, less than 1 MiB."""
MAX_TOKENS_AT_ONCE = 64
"""Tokens of one choice in one message at most: about 20 kB with 20 alternatives each. A message of all pending tokens
could exceed the connection's limit and break it for every other request."""


class _Choice:
    """Text of one choice, and its part that is not sent yet."""

    def __init__(self, index: int, text: TextStream, num_completion: int, finished: bool) -> None:
        self.index = index
        self.text = text
        self.num_completion = num_completion
        self.finished = finished
        self.token_ids: list[int] = []
        self.logprobs: list[pb.TokenLogprobs] = []
        self.pieces: list[str] = []
        self.finish: pb.Finish | None = None
        self.embedding: list[float] = []

    def take(self) -> tuple[pb.GenerateResponse, bool]:
        """Return the next message, and whether more is pending."""
        if len(self.token_ids) > MAX_TOKENS_AT_ONCE:
            return self._take_some(MAX_TOKENS_AT_ONCE), True
        message = pb.GenerateResponse(token_ids=self.token_ids, text="".join(self.pieces), index=self.index)
        if self.logprobs:  # most messages have only tokens and text
            message.logprobs.extend(self.logprobs)
        if self.finish is not None:
            message.finish.CopyFrom(self.finish)
            message.embedding.extend(self.embedding)
        self.token_ids, self.logprobs, self.pieces, self.finish = [], [], [], None
        return message, False

    def _take_some(self, count: int) -> pb.GenerateResponse:
        message = pb.GenerateResponse(
            token_ids=self.token_ids[:count],
            text="".join(self.pieces[:count]),
            logprobs=self.logprobs[:count],
            index=self.index,
        )
        del self.token_ids[:count], self.logprobs[:count], self.pieces[:count]
        return message


class OutputStream:
    """Converter from engine messages to client messages.

    Pure: no sockets, no engine.

    Call `absorb` with engine messages, then `take` the messages for the client. Each message belongs to one choice. The
    `finish` of the choice that ends last also has the receipt and the prompt's usage.
    """

    def __init__(
        self,
        request: internal_pb.DecodeRequest,
        tokenizer: Tokenizer | None,
        worker_id: str,
        block_tokens: int,
    ) -> None:
        self._request = request
        self._worker_id = worker_id
        self._block_tokens = block_tokens
        self._received_at = time.monotonic()
        self._account = KvAccount(times={"admitted": self._received_at})
        self._num_drafted = 0
        self._num_accepted = 0
        self._prompt_logprobs: list[pb.TokenLogprobs] = []
        self._origin = origin_of(request) if request.tells_origin else None
        """Origin for the first message; None once it is taken."""
        self._changed: dict[int, None] = {}
        """Indices of choices with something to send, in sending order."""
        self._stopped: list[int] = []
        self._choices = [self._choice(tokenizer, index) for index in range(num_choices(request.sampling))]
        self._num_unfinished = sum(not choice.finished for choice in self._choices)

    @property
    def finished(self) -> bool:
        """Whether every choice is finished."""
        return not self._num_unfinished

    def absorb(self, message: FromEngine | Token | None) -> None:
        """Process one engine message.

        Raises ServiceError when the request failed.
        """
        match message:
            case Token():
                self._token(message)
            case PromptScored(_, logprobs):
                self._prompt_logprobs += map(_logprobs, logprobs)
            case Embedded(_, vector, account):
                self._account = account
                choice = self._choices[0]
                choice.embedding = finished_embedding(vector, self._request.embedding)
                self._changed[choice.index] = None
                self._finish(choice, pb.FINISH_REASON_STOP, "")
            case Filled(_, account):
                self._account = account
                self._changed[0] = None
                self._finish(self._choices[0], pb.FINISH_REASON_STOP, "")
            case Rejected(_, reason, permanent):
                raise Overloaded(reason, "max_tokens" if permanent else "", permanent)
            case Failed(_, failure):
                raise InvalidRequest(failure.field, failure.reason)
            case None:
                raise Unavailable("the engine process of the decode worker has ended")

    def take(self) -> pb.GenerateResponse | None:
        """Return the next message of one choice, or None when nothing is pending."""
        if not (self._changed or self._prompt_logprobs):
            return None
        message = self._take()
        if self._origin is not None:
            message.origin.CopyFrom(self._origin)
            self._origin = None
        return message

    def _take(self) -> pb.GenerateResponse:
        if self._prompt_logprobs:
            scored = self._prompt_logprobs[:MAX_PROMPT_LOGPROBS]
            del self._prompt_logprobs[:MAX_PROMPT_LOGPROBS]
            return pb.GenerateResponse(prompt_logprobs=scored)
        index = next(iter(self._changed))
        message, more = self._choices[index].take()
        if not more:  # otherwise the choice keeps its place, since the last finish must be sent last
            del self._changed[index]
        return message

    def take_stopped(self) -> list[int]:
        """Return choices ended by a stop string since the last call; the engine does not know of these."""
        if not self._stopped:  # asked after each token
            return []
        stopped, self._stopped = self._stopped, []
        return stopped

    def _choice(self, tokenizer: Tokenizer | None, index: int) -> _Choice:
        """Create a choice that skips the tokens and the text that an earlier attempt streamed."""
        request = self._request
        token_ids, num_chars = emitted_of(request, index)
        sampling = request.sampling
        stream = TextStream(
            tokenizer,
            request.prompt_token_ids,
            sampling.stop,
            sampling.min_tokens,
            sampling.keep_special_tokens,
            sampling.include_stop_str_in_output,
        )
        text = "".join(stream.push(token_id) for token_id in token_ids)
        choice = _Choice(index, stream, len(token_ids), index in request.finished_choices)
        if not choice.finished and (rest := text[num_chars:]):
            choice.pieces.append(rest)
            self._changed[index] = None
        return choice

    def _token(self, token: Token) -> None:
        self._account = token.account or self._account
        self._num_drafted += token.drafted
        self._num_accepted += token.followed_draft
        self.add(token.token_id, token.choice, token.logprobs, token.finish)

    def add(
        self, token_id: int, index: int, logprobs: TokenLogprobs | None = None, finish: FinishReason | None = None
    ) -> None:
        """Process a token of the choice `index`."""
        choice = self._choices[index]
        if choice.finished:
            return
        choice.num_completion += 1
        self._changed[index] = None
        choice.token_ids.append(token_id)
        is_end_token = finish is FinishReason.STOP  # of the model or of the request; its text may be ordinary
        if not is_end_token or self._request.sampling.include_stop_str_in_output:
            choice.pieces.append(choice.text.push(token_id))
        if logprobs is not None:
            choice.logprobs.append(_logprobs(logprobs))
        if choice.text.stopped:
            if finish is None:
                self._stopped.append(index)
            self._finish(choice, pb.FINISH_REASON_STOP, choice.text.stopped)
        elif finish is not None:
            choice.pieces.append(choice.text.finish())
            is_stop_token = token_id in self._request.sampling.stop_token_ids
            self._finish(choice, _REASONS[finish], str(token_id) if is_stop_token else "")

    def _finish(self, choice: _Choice, reason: pb.FinishReason.ValueType, stop_match: str) -> None:
        choice.finished = True
        self._num_unfinished -= 1
        finish = choice.finish = pb.Finish(reason=reason, stop_match=stop_match)
        finish.usage.completion_tokens = choice.num_completion
        if self.finished:
            self._add_shared(finish)
        del self._changed[choice.index]
        self._changed[choice.index] = None  # move behind all others: the last finish is the last message

    def _add_shared(self, finish: pb.Finish) -> None:
        account = self._account
        cached_blocks = account.reused_blocks + account.restored_blocks + account.store_blocks
        cached_blocks += account.lender_cached_blocks + account.lender_fetched_blocks
        finish.usage.prompt_tokens = len(self._request.prompt_token_ids)
        finish.usage.cached_tokens = cached_blocks * self._block_tokens
        receipt = build_receipt(
            self._request, account, self._block_tokens, self._received_at, time.monotonic(), self._worker_id
        )
        if self._num_drafted:
            drafted = pb.Speculation(draft_tokens=self._num_drafted, accepted_tokens=self._num_accepted)
            receipt.speculation.CopyFrom(drafted)
        if self._request.HasField("price"):
            num_completion = sum(choice.num_completion for choice in self._choices)
            receipt.price.CopyFrom(price_of(self._request, num_completion))
        finish.receipt.CopyFrom(receipt)


def origin_of(request: internal_pb.DecodeRequest) -> pb.Origin:
    """Return what a router needs to continue the stream elsewhere."""
    prompt = token_digest(request.prompt_token_ids)
    return pb.Origin(model=request.model, revision=request.placement.revision, prompt=prompt)


def _logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob, top_token_ids=logprobs.top_token_ids, top_logprobs=logprobs.top_logprobs
    )


def finished_embedding(vector: bytes, wanted: internal_pb.Embedding) -> list[float]:
    """Return the wanted dimensions of a float32 vector, scaled to length 1 where wanted.

    Raises ServiceError for a vector that is no embedding, such as one of overflowed numbers.
    """
    values = np.frombuffer(vector, np.float32)
    if not np.isfinite(values).all():
        raise ServiceError("the model's hidden state has numbers that are not finite")
    if wanted.dimensions:
        values = values[: wanted.dimensions]
    if wanted.normalize:
        length = float(np.linalg.norm(values))
        if not length:
            raise ServiceError("the model's hidden state is zero and has no direction")
        values = values / np.float32(length)
    kept: list[float] = values.tolist()
    return kept
