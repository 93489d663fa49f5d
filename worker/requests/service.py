"""The decode role: runs placed requests on the engine, with loans from the lenders that the router chose."""

import functools
import itertools
from collections.abc import Callable

from tokenizers import Tokenizer

from engine.model.detokenizer import load_tokenizer
from protos import decode_pb2 as pb
from worker.requests.decode_attempt import DecodeAttempt
from worker.requests.router_stream import serve_request
from worker.runtime import WorkerContext


class DecodeService:
    """Factory of attempts.

    A request ends with its channel and leaves only cached blocks.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._numbers = itertools.count(1)
        if context.roles.role == "decode":
            self._tokenizer  # noqa: B018 # load it at start, not with the first request
        else:
            context.roles.before_decode.append(lambda: self._tokenizer)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self._context.model_dir)

    def begin(self, request: pb.DecodeRequest, on_news: Callable[[], object]) -> DecodeAttempt:
        """Begin a request.

        Raises ServiceError.
        """
        engine_id = f"request-{next(self._numbers)}"  # not the client's id, which may not be unique
        tokenizer = None if request.HasField("embedding") else self._tokenizer  # an embedding has no text
        return DecodeAttempt(self._context, tokenizer, engine_id, request, on_news)


def serve_requests(context: WorkerContext) -> None:
    """Have the requests of routers' connections served."""
    context.streams.serve = functools.partial(serve_request, DecodeService(context).begin)
