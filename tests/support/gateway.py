"""A gateway with Envoy's filter of external processing, as its documentation has it: what it may send when, and what it
makes of the answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import strategies as st

NONE, STREAMED, BUFFERED = ProcessingMode.NONE, ProcessingMode.STREAMED, ProcessingMode.BUFFERED
PARTIAL, DUPLEX = ProcessingMode.BUFFERED_PARTIAL, ProcessingMode.FULL_DUPLEX_STREAMED
WHOLE = (BUFFERED, PARTIAL)
ENDPOINT = "x-gateway-destination-endpoint"
MOST_PIECE = 64 << 10


@dataclass(slots=True)
class Sent:
    """One direction of an HTTP exchange, as it comes to the gateway."""

    chunks: Sequence[bytes]
    """None of them: there is no body."""
    trailers: bool = False
    length_told: bool = True

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def headers_end(self) -> bool:
        return not self.chunks and not self.trailers


@dataclass(slots=True)
class Direction:
    """One direction in the filter: what was sent to the picker, what was answered, what went on."""

    name: str
    given: Sent
    mode: int
    headers: dict[str, str]
    at_once: bool = False
    num_chunks: int = 0
    """Chunks sent; in a whole mode the body counts as all."""
    num_answered: int = 0
    sent: list[str] = field(default_factory=list)
    """Kinds of messages sent that are not answered."""
    headers_sent: bool = False
    headers_answered: bool = False
    body_answered: bool = False
    trailers_sent: bool = False
    trailers_answered: bool = False
    went_on: bytes = b""
    ended: bool = False
    """Whether the end of the body went on."""

    @property
    def is_body_sent(self) -> bool:
        return self.mode == NONE or self.num_chunks == len(self.given.chunks)

    def next(self) -> Any | None:
        """The message that it may send now; None: it waits, or has sent all."""
        if not self.headers_sent:
            return pb.HttpHeaders(headers=_header_map(self.headers), end_of_stream=self.given.headers_end)
        may_go_on = self.headers_answered or (self.mode == DUPLEX or self.at_once)
        if not may_go_on:
            return None
        if not self.is_body_sent:
            if self.mode in WHOLE:
                return pb.HttpBody(body=self.given.body, end_of_stream=not self.given.trailers)
            last = self.num_chunks == len(self.given.chunks) - 1
            return pb.HttpBody(body=self.given.chunks[self.num_chunks], end_of_stream=last and not self.given.trailers)
        if self.given.trailers and not self.trailers_sent and (self.mode == DUPLEX or not self.sent):
            return pb.HttpTrailers(trailers=_header_map({"checksum": "1"}))
        return None

    def was_sent(self, message: Any) -> None:
        match message:
            case pb.HttpHeaders():
                self.headers_sent = True
                self.sent.append("headers")
            case pb.HttpBody():
                self.num_chunks = len(self.given.chunks) if self.mode in WHOLE else self.num_chunks + 1
                self.sent.append("body")
            case _:
                self.trailers_sent = True
                self.sent.append("trailers")

    @property
    def done(self) -> bool:
        """Whether all was sent and answered."""
        return self.next() is None and not self.sent and self.headers_answered and self.is_body_sent

    def take(self, kind: str, answer: Any) -> None:
        """Apply an answer; fails for one that Envoy would refuse or misread."""
        if kind == "headers":
            assert self.sent[0] == "headers", "no headers wait for an answer"
            self.sent.pop(0)
            self.headers_answered = True
            self._mutate(answer.response)
        elif kind == "body" and self.mode == DUPLEX:
            assert self.headers_answered, "the body's answer came before that of the headers"
            assert answer.response.body_mutation.WhichOneof("mutation") == "streamed_response"
            streamed = answer.response.body_mutation.streamed_response
            assert len(streamed.body) <= MOST_PIECE
            assert not self.ended, "a piece came after the last one"
            self.went_on += streamed.body
            if streamed.end_of_stream:
                assert not self.given.trailers
                assert self.is_body_sent, "the end came before the client's"
                self.ended = True
            whole = self.is_body_sent and len(self.went_on) >= len(self.given.body)
            if whole and (self.ended or self.given.trailers):
                self.sent = [each for each in self.sent if each != "body"]
        elif kind == "body":
            assert self.sent[0] == "body", "no body waits for an answer"
            self.sent.pop(0)
            part = self.given.body if self.mode in WHOLE else self.given.chunks[self.num_answered]
            self.num_answered += 1
            match answer.response.body_mutation.WhichOneof("mutation"):
                case None:
                    self.went_on += part
                case "body":
                    self.went_on += answer.response.body_mutation.body
                case other:
                    raise AssertionError(f"{other} in mode {self.mode}")
            if self.mode in WHOLE:
                self._mutate(answer.response)
            else:
                assert not answer.response.HasField("header_mutation"), "they would have no effect"
        else:
            if self.mode == DUPLEX:  # pieces need not tell that they are the last ones
                self.sent = [each for each in self.sent if each != "body"]
            assert self.sent[0] == "trailers", "no trailers wait for an answer"
            self.sent.pop(0)
            self.trailers_answered = True

    def _mutate(self, response: Any) -> None:
        for option in response.header_mutation.set_headers:
            assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD
            self.headers[option.header.key] = option.header.raw_value.decode()


class Gateway:
    """One exchange."""

    def __init__(self, request: Sent, response: Sent, modes: tuple[int, int], **options: Any) -> None:
        """`options`: at_once, told, headers, metadata, status."""
        self.told = options.get("told", True)
        headers = {":method": "POST", ":path": "/v1/completions", **options.get("headers", {})}
        if request.length_told and request.chunks:
            headers["content-length"] = str(len(request.body))
        self.request = Direction("request", request, modes[0], headers, options.get("at_once", False))
        self.response = Direction("response", response, modes[1], {":status": str(options.get("status", 200))})
        self.metadata = options.get("metadata", {})
        self.endpoints: list[str] = []
        """Values in the metadata of answers."""
        self.immediate: Any = None
        self._is_first = True

    @property
    def done(self) -> bool:
        return self.immediate is not None or (self.request.done and self.response.done)

    def next(self, direction: Direction) -> Any | None:
        """The next message of one direction."""
        if self.immediate is not None or (part := direction.next()) is None:
            return None
        kinds = {pb.HttpHeaders: "headers", pb.HttpBody: "body", pb.HttpTrailers: "trailers"}
        message = pb.ProcessingRequest(**{f"{direction.name}_{kinds[type(part)]}": part})
        for namespace, values in self.metadata.items():
            message.metadata_context.filter_metadata[namespace].update(values)
        if self._is_first and self.told:
            message.protocol_config.request_body_mode = self.request.mode
            message.protocol_config.response_body_mode = self.response.mode
            message.protocol_config.send_body_without_waiting_for_header_response = self.request.at_once
        self._is_first = False
        direction.was_sent(part)
        return message

    def take(self, answer: Any) -> None:
        """Apply an answer."""
        assert self.immediate is None, "nothing can follow an immediate response"
        kind = answer.WhichOneof("response")
        if kind == "immediate_response":
            self.immediate = answer.immediate_response
            return
        if "envoy.lb" in answer.dynamic_metadata.fields:
            self.endpoints.append(answer.dynamic_metadata["envoy.lb"][ENDPOINT])
        name, _, part = kind.partition("_")
        direction = self.request if name == "request" else self.response
        direction.take(part, getattr(answer, kind))

    def check_forwarded(self, endpoints: str, body: bytes) -> None:
        """Check what the gateway forwards once all is answered."""
        request = self.request
        assert self.endpoints == [endpoints]
        only_trailers = request.mode in WHOLE and not request.given.chunks and request.given.trailers
        if not only_trailers:  # then there is no answer that may set headers
            assert request.headers[ENDPOINT] == endpoints
        if request.mode == NONE:
            return
        assert request.went_on == body
        if "content-length" in request.headers and request.mode in WHOLE:
            assert int(request.headers["content-length"]) == len(body), "Envoy refuses the mutation"


def _header_map(headers: dict[str, str]) -> Any:
    entries = [{"key": key, "raw_value": value.encode()} for key, value in headers.items()]
    return {"headers": entries}


def split(body: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Cut a body at these places, which may be equal."""
    ends = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    return [body[start:end] for start, end in pairwise(ends)]


CUTS = st.lists(st.integers(0, 400), max_size=5)


@st.composite
def sent(draw: st.DrawFn, bodies: st.SearchStrategy[bytes | None]) -> Sent:
    body = draw(bodies)
    chunks = [] if body is None else split(body, draw(CUTS))
    return Sent(chunks, draw(st.booleans()), draw(st.booleans()))
