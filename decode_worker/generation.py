"""One request on its decode worker: engine messages in, client messages out."""

import time

from tokenizers import Tokenizer

from cluster.errors import InvalidRequest, Overloaded, Unavailable
from decode_worker.receipt import build_receipt
from engine.messages import Failed, FromEngine, KvAccount, LendClosed, Rejected, Token
from engine.text import TextStream
from engine.vocabulary import FinishReason
from protos import decode_pb2 as internal_pb
from protos import inference_pb2 as pb

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


class Generation:
    """Pure: no sockets, no engine. `absorb` tokens, then `take` the message for the client."""

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
        self._text = TextStream(tokenizer, request.prompt_token_ids, request.sampling.stop)
        self._account = KvAccount(times={"admitted": self._received_at})
        self._num_completion = len(request.emitted_token_ids)
        self._message = pb.GenerateResponse()
        self._dirty = False
        self.finished = False
        self._replay()

    def absorb(self, message: FromEngine | LendClosed | None) -> None:
        """Raises ServiceError when the request failed."""
        match message:
            case Token():
                self._token(message)
            case Rejected(_, reason, permanent):
                raise Overloaded(reason, "max_tokens" if permanent else "", permanent)
            case Failed(_, failure):
                raise InvalidRequest(failure.field, failure.reason)
            case None:
                raise Unavailable("the engine of the decode worker is gone")

    def take(self) -> pb.GenerateResponse | None:
        """What is new since the last call; None when nothing is."""
        if not self._dirty:
            return None
        message, self._message, self._dirty = self._message, pb.GenerateResponse(), False
        return message

    def _replay(self) -> None:
        """An earlier attempt streamed tokens and text: skip just that much of the text they make."""
        text = "".join(self._text.push(token_id) for token_id in self._request.emitted_token_ids)
        if rest := text[self._request.emitted_chars :]:
            self._message.text, self._dirty = rest, True

    def _token(self, token: Token) -> None:
        self._account = token.account or self._account
        self._num_completion += 1
        self._dirty = True
        message = self._message
        message.token_ids.append(token.token_id)
        message.text += self._text.push(token.token_id)
        if token.logprobs is not None:
            message.logprobs.append(
                pb.TokenLogprobs(
                    logprob=token.logprobs.logprob,
                    top_token_ids=token.logprobs.top_token_ids,
                    top_logprobs=token.logprobs.top_logprobs,
                )
            )
        if self._text.stopped:
            self._finish(pb.FINISH_REASON_STOP, self._text.stopped)
        elif token.finish is not None:
            message.text += self._text.finish()
            is_stop_token = token.token_id in self._request.sampling.stop_token_ids
            self._finish(_REASONS[token.finish], str(token.token_id) if is_stop_token else "")

    def _finish(self, reason: pb.FinishReason.ValueType, stop_match: str) -> None:
        self.finished = True
        account = self._account
        cached_blocks = account.reused_blocks + account.lender_cached_blocks
        receipt = build_receipt(
            self._request, account, self._block_tokens, self._received_at, time.monotonic(), self._worker_id
        )
        usage = pb.Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._num_completion,
            cached_tokens=cached_blocks * self._block_tokens,
        )
        self._message.finish.CopyFrom(pb.Finish(reason=reason, stop_match=stop_match, usage=usage, receipt=receipt))
