"""Answers of /v1/messages: events of a stream, or the whole message; and the form of errors.

POST /v1/messages/count_tokens: the tokens of a prompt, as its model reads it.
"""

import secrets
from typing import Any

from pydantic_core import from_json

from protos import inference_pb2 as pb
from router.frontend.anthropic.messages import MessagesRequest, read_prompt
from router.frontend.http.blocks import CALL, REASONING, Block, BlockAnswer, event
from router.frontend.http.body.media import Given, named_media
from router.frontend.http.endpoint import EndpointContext, JsonEndpoint
from router.frontend.http.errors import Caller

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status; any other one is `api_error`."""


def error_form(
    status: int, kind: str, message: str, param: str | None, code: str | None
) -> tuple[dict[str, Any], bytes]:
    """Return an error in Anthropic's form."""
    error = {"type": ERRORS.get(status, "api_error"), "message": message}
    return {"type": "error", "error": error}, b"event: error\n"


class MessagesAnswer(BlockAnswer[MessagesRequest]):
    """Answer of /v1/messages."""

    def started(self) -> bytes:
        message = self._message([], None, None) | {"usage": self._usage_so_far()}
        return event("message_start", {"type": "message_start", "message": message})

    def opened(self, block: Block) -> bytes:
        empty = self._content(block)
        if block.call is not None:
            empty["input"] = {}
        return _event("content_block_start", block, content_block=empty)

    def added(self, block: Block, text: str) -> bytes:
        if block.call is not None:
            return _event("content_block_delta", block, delta={"type": "input_json_delta", "partial_json": text})
        if block.kind == REASONING:
            return _event("content_block_delta", block, delta={"type": "thinking_delta", "thinking": text})
        return _event("content_block_delta", block, delta={"type": "text_delta", "text": text})

    def closed(self, block: Block) -> bytes:
        return _event("content_block_stop", block)

    def ended(self) -> bytes:
        reason, stop = self._reason()
        body: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": self._usage(),
        }
        return event("message_delta", body) + event("message_stop", {"type": "message_stop"})

    def new_id(self, kind: str) -> str:
        return f"toolu_{secrets.token_hex(12)}" if kind == CALL else ""

    def object(self) -> dict[str, Any]:
        return self._message([self._content(block) for block in self.blocks], *self._reason()) | {
            "usage": self._usage()
        }

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
        }

    def _content(self, block: Block) -> dict[str, Any]:
        if block.kind == REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        if block.call is None:
            return {"type": "text", "text": block.text}
        try:  # of a call that was cut off the values that are complete, as Anthropic's clients read a stream
            arguments = from_json(block.call.arguments, allow_partial=True)
        except ValueError:
            arguments = {}
        made = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        return {"type": "tool_use", "id": block.call.id or block.id, "name": block.call.name, "input": made}

    def _reason(self) -> tuple[str, str | None]:
        assert self.finish is not None, "the answer is complete"
        if self.finish.reason == pb.FINISH_REASON_LENGTH:
            return "max_tokens", None
        if self.finish.stop_match in self.api_request.requests[0].sampling.stop and self.finish.stop_match:
            return "stop_sequence", self.finish.stop_match
        calls = [block.call for block in self.blocks if block.call is not None]
        return ("tool_use" if calls and not calls[-1].is_cut else "end_turn"), None

    def _usage_so_far(self) -> dict[str, Any]:
        assert self.served is not None, "the answer has begun"
        return _usage_of(len(self.served.prompt), 0, 0)

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return _usage_of(usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens, usage.completion_tokens)


def _usage_of(computed: int, cached: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _event(name: str, block: Block, **fields: Any) -> bytes:
    return event(name, {"type": name, "index": block.index, **fields})


def token_counter(context: EndpointContext) -> JsonEndpoint[tuple[pb.GenerateRequest, Given]]:
    """Return the application of the path."""

    async def count(api_request: tuple[pb.GenerateRequest, Given], caller: Caller) -> dict[str, Any]:
        request, media = api_request
        with named_media(request.messages, media):
            return {"input_tokens": await context.queries.num_prompt_tokens(request, caller.principal)}

    return JsonEndpoint(context, read_prompt, count, error_form)
