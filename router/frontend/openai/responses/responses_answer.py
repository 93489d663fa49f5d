"""Answers of /v1/responses: events of a stream, or the whole response; and the form of errors within a stream.

Log probabilities of the texts of a response's output, apart from reasoning, calls and dropped whitespace. Pure.

Pure.
"""

import re
from collections import deque
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from protos import inference_pb2 as pb
from router.frontend.http.blocks import CALL, REASONING, Block, BlockAnswer, event
from router.frontend.http.generation import PromptInfo
from router.frontend.openai.completions import LogprobForm
from router.frontend.openai.responses.responses import ResponsesRequest
from router.models.output.call_reading import ToolCall
from router.models.output.token_texts import TextToken, TokensInText


class OutputLogprobs:
    """Log probabilities of one output, dealt to the texts that its parser makes of it.

    Call `add` with each message, then `of` with each piece of text, in order, and `close` where a text ends.
    """

    def __init__(self, served: PromptInfo) -> None:
        self._form = LogprobForm(served.form_of)
        self._tokens = TokensInText(served.form_of, 0, served.keeps_special, served.prompt)
        self._certain: deque[TextToken] = deque()
        """Tokens that belong to no text yet."""
        self._unread = ""
        """End of the output in which no text was found yet."""
        self._num_read = 0
        """Characters before that end."""
        self._spans: list[tuple[int, int]] = []
        """First character, and the one after the last, of each text whose tokens are not all certain."""

    def add(self, message: pb.GenerateResponse) -> None:
        """Add a message of the output, before its texts."""
        self._unread += message.text
        token_ids = message.token_ids if message.logprobs else ()
        ends = message.HasField("finish")
        self._certain += self._tokens.add(token_ids, message.logprobs, message.text, ends)

    def of(self, text: str) -> list[dict[str, Any]]:
        """Return the entries that are certain with the next piece of a text; earlier pieces' may be among them.

        The bytes of all entries of a text, joined, are the text: a token that it has only in part has the bytes of
        this part.
        """
        at = self._unread.find(text)
        if at >= 0:
            first = self._num_read + at
            self._num_read = first + len(text)
            self._unread = self._unread[at + len(text) :]
            if self._spans and self._spans[-1][1] == first:
                first, _ = self._spans.pop()
            self._spans.append((first, self._num_read))
        return self._entries(closes=False)

    def close(self) -> list[dict[str, Any]]:
        """Return the remaining entries of a text that has ended."""
        return self._entries(closes=True)

    def _entries(self, closes: bool) -> list[dict[str, Any]]:
        found: list[TextToken] = []
        while self._certain and self._certain[0].offset < self._num_read:
            token = self._certain[0]
            end = token.offset + len(token.text)
            if end > self._num_read and not closes:
                break  # the text may go on with its rest
            self._certain.popleft()
            part = "".join(token.text[max(0, a - token.offset) : max(0, b - token.offset)] for a, b in self._spans)
            if part == token.text and (part or any(a <= end < b for a, b in self._spans)):
                found.append(token)  # also the first part of a character, which has no text
            elif part:
                found.append(replace(token, text=part, raw=part.encode()))
        begun = self._certain[0].offset if self._certain else self._num_read
        self._spans = [span for span in self._spans if span[1] > begun or span == self._spans[-1]]
        return self._form.chat(found)


ARGUMENTS = "function_call_arguments"
"""Name of events of a function call's arguments."""
PREFIXES = {CALL: "fc_", REASONING: "rs_"}
RESPONSE = "resp_"
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}")


def item_id(prefix: str, answer_id: str, number: int) -> str:
    """Return the id of a response's item, from which `response_of_item` makes that of the response."""
    return f"{prefix}{answer_id}{number:04x}"


def response_of_item(name: str) -> str:
    """Return the id of the response that has an item of this id; empty where it is no id of ours."""
    known = _ITEM_ID.fullmatch(name)
    return RESPONSE + known[1] if known else ""


class ResponsesAnswer(BlockAnswer[ResponsesRequest]):
    """Answer of /v1/responses."""

    def __init__(self, api_request: ResponsesRequest, request_id: str) -> None:
        super().__init__(api_request, request_id)
        self._num_events = 0
        self._logprobs: OutputLogprobs | None = None
        """Log probabilities of the output; None where the request asked for none."""
        self._entries: dict[int, list[dict[str, Any]]] = {}
        """Entries of log probabilities by the index of their block."""

    def begin(self, number: int, served: PromptInfo) -> None:
        super().begin(number, served)
        if self.api_request.requests[0].sampling.HasField("logprobs"):
            self._logprobs = OutputLogprobs(served)

    def chunk(self, number: int, message: pb.GenerateResponse) -> bytes:
        if self._logprobs is not None:
            self._logprobs.add(message)
        return super().chunk(number, message)

    def started(self) -> bytes:
        return self._event("response.created", response=self.object()) + self._event(
            "response.in_progress", response=self.object()
        )

    def opened(self, block: Block) -> bytes:
        if block.call is not None:
            item = self._item(block) | {"status": "in_progress", self._call_field(block.call)[1]: ""}
            return self._event("response.output_item.added", output_index=block.index, item=item)
        at = {"output_index": block.index, "item_id": block.id, "content_index": 0}
        item = self._item(block) | {"status": "in_progress", "content": []}
        events = self._event("response.output_item.added", output_index=block.index, item=item)
        return events + self._event("response.content_part.added", **at, part=self._part(block, ""))

    def added(self, block: Block, text: str) -> bytes:
        if block.call is not None:
            kind, _ = self._call_field(block.call)
            if kind != ARGUMENTS:  # the input is a value in the arguments, known when these are complete
                return b""
            return self._event(f"response.{kind}.delta", output_index=block.index, item_id=block.id, delta=text)
        at = {"output_index": block.index, "item_id": block.id, "content_index": 0, "delta": text}
        if block.kind == REASONING:
            return self._event("response.reasoning_text.delta", **at)
        return self._added(block, text, [] if self._logprobs is None else self._logprobs.of(text))

    def _added(self, block: Block, text: str, entries: list[dict[str, Any]]) -> bytes:
        self._entries.setdefault(block.index, []).extend(entries)
        at = {"output_index": block.index, "item_id": block.id, "content_index": 0}
        return self._event("response.output_text.delta", **at, delta=text, logprobs=entries)

    def closed(self, block: Block) -> bytes:
        if block.call is not None:
            return self._call_done(block, block.call)
        at = {"output_index": block.index, "item_id": block.id, "content_index": 0}
        if block.kind == REASONING:
            events = self._event("response.reasoning_text.done", **at, text=block.text)
        else:
            events = b""
            if self._logprobs is not None and (entries := self._logprobs.close()):
                events = self._added(block, "", entries)
            done = {"text": block.text, "logprobs": self._entries.get(block.index, [])}
            events += self._event("response.output_text.done", **at, **done)
        events += self._event("response.content_part.done", **at, part=self._part(block, block.text))
        return events + self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def ended(self) -> bytes:
        return self._event(f"response.{self._status()}", response=self.object())

    def new_id(self, kind: str) -> str:
        return item_id(PREFIXES.get(kind, "msg_"), self.answer_id, len(self.blocks))

    @property
    def id(self) -> str:
        """Id of the response."""
        return RESPONSE + self.answer_id

    def object(self) -> dict[str, Any]:
        status = self._status()
        api_request, usage = self.api_request, None
        if self.finish is not None:
            usage = {
                "input_tokens": self.usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": self.usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.usage.reasoning_tokens},
                "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": api_request.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": api_request.instructions,
            "model": self.model,
            "output": [self._item(block) for block in self.blocks] if self.finish is not None else [],
            "previous_response_id": api_request.previous_id or None,
            "store": api_request.is_stored,
            "background": False,
            "service_tier": "default",
            "usage": usage,
            **api_request.echoed,
        }

    def messages(self) -> list[pb.ChatMessage]:
        """Return the answer as a message of the assistant, for the next turn."""
        message = pb.ChatMessage(role="assistant")
        for block in self.blocks:
            if block.call is not None:
                call = block.call
                message.tool_calls.add(id=call.id or block.id, name=call.name, arguments=call.arguments)
            elif block.kind == REASONING:
                message.reasoning += block.text
            else:
                message.content += block.text
        return [message]

    def _call_field(self, call: ToolCall) -> tuple[str, str]:
        """Return the name of a call's events, and the field of its item that these build up."""
        return ("custom_tool_call_input", "input") if self._is_custom(call) else (ARGUMENTS, "arguments")

    def _is_custom(self, call: ToolCall) -> bool:
        return call.name in self.api_request.custom_tools

    def _call_done(self, block: Block, call: ToolCall) -> bytes:
        item, (kind, field) = self._item(block), self._call_field(call)
        at = {"output_index": block.index, "item_id": block.id}
        events = self._event(f"response.{kind}.delta", **at, delta=item[field]) if kind != ARGUMENTS else b""
        events += self._event(f"response.{kind}.done", **at, name=call.name, **{field: item[field]})
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block) -> dict[str, Any]:
        values: dict[str, Any] = {"id": block.id, "status": self._status_of(block)}
        if block.call is not None:
            call = block.call
            values |= {"call_id": call.id or block.id, "name": call.name}
            if self._is_custom(call):
                return values | {"type": "custom_tool_call", "input": _input_of(call.arguments)}
            return values | {"type": "function_call", "arguments": call.arguments}
        parts = [self._part(block, block.text)]
        if block.kind == REASONING:
            return values | {"type": "reasoning", "summary": [], "content": parts}
        return values | {"type": "message", "role": "assistant", "content": parts}

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._entries.get(block.index, []),
        }

    def _status_of(self, block: Block) -> str:
        """Return the status of a block that has ended: of texts only the last of an incomplete response is cut off."""
        if block.call is not None:
            return "incomplete" if block.call.is_cut else "completed"
        return "incomplete" if self._status() == "incomplete" and block is self.blocks[-1] else "completed"

    def _status(self) -> str:
        if self.finish is None:
            return "in_progress"
        return "incomplete" if self.finish.reason == pb.FINISH_REASON_LENGTH else "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event(kind, {"type": kind, "sequence_number": number, **fields})


def _input_of(arguments: str) -> str:
    """Return the text that a custom tool was called with, as far as it goes where the call was cut off."""
    try:
        values = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    return str(values.get("input", "")) if isinstance(values, dict) else arguments


def error_form(
    status: int, kind: str, message: str, param: str | None, code: str | None
) -> tuple[dict[str, Any], bytes]:
    """Return an error in OpenAI's form, which is also readable as the event `error`."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": error, "type": "error", "sequence_number": 0, "message": message, "param": param, "code": code}, (
        b"event: error\n"
    )
