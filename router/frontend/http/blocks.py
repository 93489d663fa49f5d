"""Answers that are a sequence of blocks: a text, a piece of reasoning, or a tool call at a time. Pure."""

import json
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from protos import inference_pb2 as pb
from router.frontend.http.generation import Answer, Generation, PromptInfo
from router.models.output.call_reading import CallArguments, CallBegun, ToolCall
from router.models.output.output_format import OutputParser, Piece, Reasoning

RequestT = TypeVar("RequestT", bound=Generation)


@dataclass(slots=True)
class Block:
    """One block of an answer."""

    index: int
    kind: str
    """One of TEXT, REASONING and CALL."""
    id: str
    pieces: list[str] = field(default_factory=list)
    """Texts, in order."""
    call: ToolCall | None = None
    """Tool call of a block of this kind; without arguments until these are complete."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


TEXT, REASONING, CALL = "text", "reasoning", "call"


class BlockAnswer(Answer, Generic[RequestT]):
    """Answer with one choice, in blocks.

    A stream's events and the whole answer are made by the same steps.
    """

    def __init__(self, api_request: RequestT, answer_id: str) -> None:
        self.api_request = api_request
        self.answer_id = answer_id
        self.served: PromptInfo | None = None
        self.blocks: list[Block] = []
        self.usage = pb.Usage()
        self.finish: pb.Finish | None = None
        """Finish of the choice, once it has ended."""
        self._parser: OutputParser | None = None
        self._open: Block | None = None
        self._has_begun = False

    # ------------------------------------------------------------------------------------ of each API

    @abstractmethod
    def started(self) -> bytes:
        """Return the events at the beginning of the answer."""

    @abstractmethod
    def opened(self, block: Block) -> bytes:
        """Return the events of a block that begins."""

    @abstractmethod
    def added(self, block: Block, text: str) -> bytes:
        """Return the events of further text, reasoning or arguments of a call."""

    @abstractmethod
    def closed(self, block: Block) -> bytes:
        """Return the events of a block that is complete."""

    @abstractmethod
    def ended(self) -> bytes:
        """Return the events at the end of the answer."""

    @abstractmethod
    def new_id(self, kind: str) -> str:
        """Return an id for a block."""

    @abstractmethod
    def object(self) -> dict[str, Any]:
        """Return the whole answer."""

    # ---------------------------------------------------------------------------------------- common

    def begin(self, number: int, served: PromptInfo) -> None:
        self.served = served
        self._parser = served.new_parser()

    @property
    def complete(self) -> bool:
        return self.finish is not None

    @property
    def model(self) -> str:
        assert self.served is not None, "the answer has begun"
        return self.served.model

    def chunk(self, number: int, message: pb.GenerateResponse) -> bytes:
        events = b""
        if not self._has_begun:
            self._has_begun = True
            events = self.started()
        pieces = self._pieces_of(message)
        if message.HasField("finish"):
            self.finish = message.finish  # before the last blocks end, which may be cut off
        for piece in pieces:
            events += self._piece(piece)
        if self.finish is not None:
            self.usage.CopyFrom(message.finish.usage)
            self.usage.reasoning_tokens = self._parser.num_reasoning if self._parser is not None else 0
            self.finish.receipt.ignored_fields.extend(self.api_request.ignored)
            events += self._close() + self.ended()
        return events

    def absorb(self, number: int, message: pb.GenerateResponse) -> None:
        self.chunk(number, message)

    def whole(self) -> bytes:
        return compact(self.object()).encode()

    def _pieces_of(self, message: pb.GenerateResponse) -> list[Piece]:
        if self._parser is None:
            return [message.text] if message.text else []
        pieces = self._parser.push(message.text, len(message.token_ids))
        if message.HasField("finish"):
            pieces += self._parser.finish()
        return pieces

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallBegun):
            return self._begin_call(ToolCall(piece.name, "", piece.id))
        if isinstance(piece, CallArguments):
            assert self._open is not None, "a call begins before its arguments"
            return self.added(self._open, piece.text)
        if isinstance(piece, ToolCall):
            events = b""
            if self._open is None or self._open.kind != CALL:
                events = self._begin_call(piece)
                assert self._open is not None, "it was just opened"
                events += self.added(self._open, piece.arguments)
            self._open.call = piece
            return events + self._close()
        kind, text = (REASONING, piece.text) if isinstance(piece, Reasoning) else (TEXT, piece)
        events = b""
        if self._open is None or self._open.kind != kind:
            block = self._add(kind)
            events, self._open = self._close(), block
            events += self.opened(block)
        self._open.pieces.append(text)
        return events + self.added(self._open, text)

    def _begin_call(self, call: ToolCall) -> bytes:
        events, block = self._close(), self._add(CALL)
        block.call, self._open = call, block
        return events + self.opened(block)

    def _add(self, kind: str) -> Block:
        block = Block(len(self.blocks), kind, self.new_id(kind))
        self.blocks.append(block)
        return block

    def _close(self) -> bytes:
        block, self._open = self._open, None
        return b"" if block is None else self.closed(block)


def compact(value: Any) -> str:
    """Return a value as compact JSON, in one line whatever a client takes for the end of one."""
    return in_one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def in_one_line(text: str) -> str:
    """Return JSON with all line breaks that Unicode has beyond ASCII escaped: some clients split streams at them."""
    if not text.isascii():  # every piece of every stream passes here
        for char, escape in LINE_BREAKS.items():
            text = text.replace(char, escape)
    return text


LINE_BREAKS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def event(name: str, value: dict[str, Any]) -> bytes:
    """Return a server-sent event of this name."""
    return f"event: {name}\ndata: {compact(value)}\n\n".encode()
