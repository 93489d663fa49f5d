"""One HTTP exchange of a gateway, as Envoy's external processing tells of it: messages in, answers and events out.

Pure. The request waits for a pick, and the response passes unchanged. What the pick is made from, and which answer
names the endpoint, depends on how the gateway sends the request's body:

    FULL_DUPLEX_STREAMED   from the whole body: no answer before its end, then headers, body in pieces, trailers
    BUFFERED(_PARTIAL)     from the body: the headers are answered at once, the answer to the body names the endpoint
    STREAMED               from the whole body, as above, if the gateway sends it without waiting for an answer to the
                           headers, and the client tells its length: trailers come after answers here, so that they do
                           not end a body; otherwise by load, in the answer to the headers
    NONE, no body          by load, in the answer to the headers

A gateway that tells no mode sends FULL_DUPLEX_STREAMED, as InferencePool's protocol asks for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from cluster.errors import InvalidRequest
from router.frontend.http.errors import ErrorAnswer

ENDPOINT = "x-gateway-destination-endpoint"
"""Header, and key in the metadata `envoy.lb`, with host:port of the picked servers."""
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE, NAMESPACE = "envoy.lb.subset_hint", "envoy.lb"
PIECE_BYTES = 62_000
"""Longest piece of a body; Envoy advises at most 64 KiB."""
NONE, STREAMED, BUFFERED = ProcessingMode.NONE, ProcessingMode.STREAMED, ProcessingMode.BUFFERED
BUFFERED_PARTIAL, FULL_DUPLEX = ProcessingMode.BUFFERED_PARTIAL, ProcessingMode.FULL_DUPLEX_STREAMED
MODES = (NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX)
WHOLE = (BUFFERED, BUFFERED_PARTIAL)
"""Modes in which the body comes in one message."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Message to the gateway."""

    message: Any
    """ProcessingResponse."""


@dataclass(frozen=True, slots=True)
class PickWanted:
    """Event: an endpoint is wanted; `picked` or `refused` must follow."""

    headers: Mapping[str, str]
    body: bytes | None
    """Whole body; None where the pick cannot wait for it, or there is none."""
    subset: frozenset[str] | None
    """Endpoints from which the gateway lets choose, as host:port; None: all."""


@dataclass(frozen=True, slots=True)
class ResponseBegan:
    """Event: the response's headers came."""

    status: int
    """HTTP status; 0 without one."""
    served: str
    """Endpoint that served the request; empty where the gateway does not tell."""
    streams: bool
    """Whether the body is a stream of events that are shown."""


@dataclass(frozen=True, slots=True)
class ResponseBytes:
    """Event: bytes of the response's body came; none where it has no body, or the gateway does not show it."""

    body: bytes = b""


class Event(Enum):
    """Further events of a response."""

    ENDED = auto()
    """The response is complete."""


Action = Answer | PickWanted | ResponseBegan | ResponseBytes | Event


@dataclass(slots=True)
class _Direction:
    """Messages of a request or a response in their order."""

    name: str
    mode: int = FULL_DUPLEX
    begun: bool = False
    over: bool = False
    has_body: bool = False

    def headers(self, end_of_stream: bool) -> None:
        if self.begun:
            raise InvalidRequest(f"{self.name}_headers", "came a second time")
        self.begun, self.over = True, end_of_stream

    def body(self, end_of_stream: bool) -> None:
        self._check("body")
        if self.mode == NONE or (self.has_body and self.mode in WHOLE):
            more = "a body" if self.mode == NONE else "a second body"
            raise InvalidRequest(
                f"{self.name}_body", f"{more} cannot come in mode {ProcessingMode.BodySendMode.Name(self.mode)}"
            )
        self.has_body, self.over = True, end_of_stream

    def trailers(self) -> None:
        self._check("trailers")
        self.over = True

    def _check(self, part: str) -> None:
        if not self.begun:
            raise InvalidRequest(f"{self.name}_{part}", f"came before {self.name}_headers")
        if self.over:
            raise InvalidRequest(f"{self.name}_{part}", f"came after the end of the {self.name}")


@dataclass(slots=True)
class _Owed:
    """Messages of the request that are not answered yet, in order."""

    headers: bool = False
    bodies: list[Any] = field(default_factory=list)
    trailers: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(len(each.body) for each in self.bodies)


class HttpExchange:
    """One HTTP request and its response."""

    def __init__(self, max_body_bytes: int) -> None:
        """Create it; a pick does not wait for a body that is longer."""
        self._max_body_bytes = max_body_bytes
        self._request, self._response = _Direction("request"), _Direction("response")
        self._is_first = True
        self._waits_for_body = False
        """Whether the headers are answered only after the body."""
        self._length: int | None = None
        """Bytes of the body that is waited for, where the end of the request may not be told."""
        self._headers: Mapping[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._owed = _Owed()
        self._wanted = self._picked = self._refused = False
        self._endpoints = ""
        """Endpoints that the next answer must name; empty once one did."""

    def receive(self, message: Any) -> list[Action]:
        """Process a ProcessingRequest.

        Raises InvalidRequest for one at the wrong time.
        """
        if self._refused or message.observability_mode:  # the gateway ignores all answers
            return []
        if self._is_first:
            self._is_first = False
            self._read_modes(message)
        match message.WhichOneof("request"):
            case "request_headers":
                return self._request_headers(message)
            case "request_body":
                return self._request_body(message.request_body)
            case "request_trailers":
                self._request.trailers()
                self._owed.trailers = True
                return self._after_request_message()
            case "response_headers":
                return self._response_headers(message)
            case "response_body":
                return self._response_body(message.response_body)
            case "response_trailers":
                self._response.trailers()
                return [Answer(pb.ProcessingResponse(response_trailers=pb.TrailersResponse())), Event.ENDED]
            case _:
                raise InvalidRequest("request", "is no part of a request or a response that is known here")

    def picked(self, endpoints: str, body: bytes | None = None) -> list[Action]:
        """Go on to the picked endpoints, a list with commas; `body` takes the place of the one that was given."""
        self._picked, self._endpoints = True, endpoints
        return list(map(Answer, self._answers(body)))

    def refused(self, error: ErrorAnswer) -> list[Action]:
        """Answer the client with an error; nothing can follow."""
        self._refused = True
        headers = {"content-type": "application/json", **error.headers}
        immediate = pb.ImmediateResponse(headers=_set(headers), body=error.body)
        immediate.status.code = error.status
        return [Answer(pb.ProcessingResponse(immediate_response=immediate))]

    # ------------------------------------------------------------------ the request

    def _read_modes(self, message: Any) -> None:
        if not message.HasField("protocol_config"):
            self._waits_for_body = True
            return
        told = message.protocol_config
        self._request.mode, self._response.mode = told.request_body_mode, told.response_body_mode
        for direction in (self._request, self._response):
            if direction.mode not in MODES:
                known = ", ".join(map(ProcessingMode.BodySendMode.Name, MODES))
                raise InvalidRequest(
                    f"protocol_config.{direction.name}_body_mode", f"must be one of {known}, not {direction.mode}"
                )
        mode = self._request.mode
        self._waits_for_body = mode == FULL_DUPLEX
        if mode == STREAMED and told.send_body_without_waiting_for_header_response:
            length = _headers_of(message.request_headers).get("content-length", "")
            if length.isdigit() and 0 < int(length[:20]) <= self._max_body_bytes:
                self._length, self._waits_for_body = int(length), True

    def _request_headers(self, message: Any) -> list[Action]:
        has_body = not message.request_headers.end_of_stream
        self._request.headers(not has_body)
        self._headers, self._subset = _headers_of(message.request_headers), _subset_of(message)
        if has_body and self._request.mode in WHOLE:
            return [Answer(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))]
        self._owed.headers = True
        return [] if has_body and self._waits_for_body else [self._want(None)]

    def _request_body(self, body: Any) -> list[Action]:
        self._request.body(body.end_of_stream)
        self._owed.bodies.append(body)
        return self._after_request_message()

    def _after_request_message(self) -> list[Action]:
        """Ask for the pick once the body is complete, or too long to wait for; answer what came after the pick."""
        if self._picked:
            return list(map(Answer, self._answers(None)))
        if self._wanted:
            return []
        if self._owed.num_bytes > self._max_body_bytes:
            return [self._want(None)]
        is_whole = self._length is not None and self._owed.num_bytes >= self._length
        if self._request.over or is_whole or self._request.mode in WHOLE:
            return [self._want(b"".join(each.body for each in self._owed.bodies))]
        return []

    def _want(self, body: bytes | None) -> PickWanted:
        self._wanted = True
        return PickWanted(self._headers, body, self._subset)

    def _answers(self, body: bytes | None) -> Iterable[Any]:
        """Yield the answers to what came of the request; `body` takes the place of the bodies' bytes."""
        owed, self._owed = self._owed, _Owed()
        length = None if body is None or "content-length" not in self._headers else len(body)
        if owed.headers:
            common = self._with_endpoint(length)
            yield self._named(pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common)))
        if self._request.mode == FULL_DUPLEX:
            if owed.bodies:
                whole = b"".join(each.body for each in owed.bodies) if body is None else body
                for piece in _pieces(whole, owed.bodies[-1].end_of_stream):
                    yield pb.ProcessingResponse(request_body=piece)
        else:
            for number, each in enumerate(owed.bodies):
                common = pb.CommonResponse() if self._request.mode == STREAMED else self._with_endpoint(length)
                if body is not None:  # each message is answered, the last one with what is left
                    part = body if number == len(owed.bodies) - 1 else body[: len(each.body)]
                    body = body[len(part) :]
                    if part != each.body:
                        common.body_mutation.body = part
                yield self._named(pb.ProcessingResponse(request_body=pb.BodyResponse(response=common)))
        if owed.trailers:
            yield self._named(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))

    def _with_endpoint(self, length: int | None) -> Any:
        """Return the changes that name the endpoint to the gateway's router, and the length of a changed body."""
        headers = {ENDPOINT: self._endpoints} | ({} if length is None else {"content-length": str(length)})
        return pb.CommonResponse(header_mutation=_set(headers), clear_route_cache=True)

    def _named(self, answer: Any) -> Any:
        """Return the answer with the endpoint in its metadata, in the first answer after the pick."""
        if self._endpoints:
            answer.dynamic_metadata.get_or_create_struct(NAMESPACE)[ENDPOINT] = self._endpoints
            self._endpoints = ""
        return answer

    # ------------------------------------------------------------------ the response

    def _response_headers(self, message: Any) -> list[Action]:
        # A filter before this one may have answered, so there need not have been a request.
        is_over = message.response_headers.end_of_stream
        self._response.headers(is_over)
        headers = _headers_of(message.response_headers)
        status = headers.get(":status", "")
        streams = self._response.mode != NONE and headers.get("content-type", "").startswith("text/event-stream")
        served = _value_of(message, NAMESPACE, SERVED).string_value
        began = ResponseBegan(int(status) if status.isdigit() else 0, served, streams)
        answer = Answer(pb.ProcessingResponse(response_headers=pb.HeadersResponse()))
        if is_over:
            return [answer, began, ResponseBytes(), Event.ENDED]
        return [answer, began, ResponseBytes()] if self._response.mode == NONE else [answer, began]

    def _response_body(self, body: Any) -> list[Action]:
        self._response.body(body.end_of_stream)
        is_duplex = self._response.mode == FULL_DUPLEX
        answers = _pieces(body.body, body.end_of_stream) if is_duplex else [pb.BodyResponse()]
        actions: list[Action] = [Answer(pb.ProcessingResponse(response_body=each)) for each in answers]
        if body.body or body.end_of_stream:
            actions.append(ResponseBytes(body.body))
        return [*actions, Event.ENDED] if body.end_of_stream else actions


def _pieces(body: bytes, end_of_stream: bool) -> Iterable[Any]:
    """Yield a body as answers of FULL_DUPLEX_STREAMED."""
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        answer = pb.BodyResponse()
        streamed = answer.response.body_mutation.streamed_response
        streamed.body = body[start : start + PIECE_BYTES]
        streamed.end_of_stream = end_of_stream and start + PIECE_BYTES >= len(body)
        yield answer


def _set(headers: Mapping[str, str]) -> Any:
    """Return the change that sets headers, whatever the client sent under these names."""
    mutation = pb.HeaderMutation()
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, value.encode("latin-1")
    return mutation


def _headers_of(message: Any) -> dict[str, str]:
    return {
        header.key.lower(): header.raw_value.decode("latin-1") if header.raw_value else header.value
        for header in message.headers.headers
    }


def _value_of(message: Any, namespace: str, key: str) -> Any:
    """Return a value of the exchange's metadata; an empty one where it is missing."""
    within = message.metadata_context.filter_metadata
    fields = within[namespace].fields if namespace in within else {}
    return fields[key] if key in fields else struct_pb2.Value()


def _subset_of(message: Any) -> frozenset[str] | None:
    value = _value_of(message, SUBSET_NAMESPACE, SUBSET)
    if value.WhichOneof("kind") is None:
        return None
    listed = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return frozenset(each.strip() for each in listed) - {""}
