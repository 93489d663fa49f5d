"""Requests between this version and the one before, byte for byte: a rolling upgrade has routers and workers of both.

The version before has messages of its own for requests, RouterFrame and DecodeFrame of protos/decode.proto then, which
are made here as they were.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import status_pb2

from cluster.errors import Overloaded
from cluster.network.error_status import from_proto, to_proto
from cluster.network.mux import FRAME, NOTE, OPEN, WINDOW, Channel, Mux
from protos import decode_pb2, membership_pb2
from protos import inference_pb2 as public_pb
from worker.requests.service import serve_request

_TYPE = descriptor_pb2.FieldDescriptorProto


def _old_messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="old_decode.proto", package="old", syntax="proto3")
    for name, fields in {
        "RouterFrame": [
            ("placed", 1, "PlacedRequest", True),
            ("cancelled", 2, _TYPE.TYPE_UINT64, True),
            ("paused", 3, _TYPE.TYPE_UINT64, True),
            ("resumed", 4, _TYPE.TYPE_UINT64, True),
        ],
        "PlacedRequest": [
            ("number", 1, _TYPE.TYPE_UINT64, False),
            ("request", 2, "DecodeRequest", False),
            ("timeout_ms", 3, _TYPE.TYPE_DOUBLE, False),
        ],
        "DecodeRequest": [
            ("request_id", 1, _TYPE.TYPE_STRING, False),
            ("worker_incarnation", 2, _TYPE.TYPE_BYTES, False),
            ("prompt_token_ids", 3, _TYPE.TYPE_UINT32, True),
        ],
        "DecodeFrame": [("parts", 1, "Part", True)],
        "Part": [
            ("number", 1, _TYPE.TYPE_UINT64, False),
            ("messages", 2, _TYPE.TYPE_BYTES, True),
            ("ended", 3, _TYPE.TYPE_BOOL, False),
            ("status", 4, _TYPE.TYPE_BYTES, False),
        ],
    }.items():
        message = file.message_type.add(name=name)
        for field, number, kind, is_repeated in fields:
            made = message.field.add(name=field, number=number)
            made.label = _TYPE.LABEL_REPEATED if is_repeated else _TYPE.LABEL_OPTIONAL
            if isinstance(kind, str):
                made.type, made.type_name = _TYPE.TYPE_MESSAGE, f".old.{kind}"
            else:
                made.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"old.{message.name}"))
        for message in file.message_type
    }


OLD = _old_messages()


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + bytes([kind]) + payload


def taken(mux: Mux) -> Iterator[tuple[int, bytes]]:
    """Yield frames as the version before reads them; it refuses kinds other than these."""
    while raw := mux.take():
        assert int.from_bytes(raw[:4], "big") == len(raw) - 5
        assert raw[4] in (OPEN, FRAME, NOTE)
        yield raw[4], raw[5:]


class Attempt:
    """Attempt that the test drives."""

    failure: Overloaded | None = None
    over = is_closed = False

    def __init__(self, request: decode_pb2.DecodeRequest, on_news: Callable[[], object]) -> None:
        self.request, self.on_news = request, on_news
        self.unsent: list[int] = []

    def say(self, *tokens: int) -> None:
        self.unsent += tokens
        self.on_news()

    def end(self, failure: Overloaded | None = None) -> None:
        self.over, self.failure = True, failure
        self.on_news()

    def take(self) -> Iterator[public_pb.GenerateResponse]:
        if self.unsent:
            tokens, self.unsent = self.unsent, []
            yield public_pb.GenerateResponse(token_ids=tokens)

    def close(self) -> None:
        self.is_closed = True


class OldRouter:
    """Router of the version before, at a worker of this one."""

    def __init__(self) -> None:
        self.attempts: dict[str, Attempt] = {}
        self.openings: list[bytes] = []
        self.events: list[bytes] = []
        self.worker = Mux(None, functools.partial(serve_request, self._begin), lambda: None)
        self.worker.on_opened = self.openings.append
        self.worker.receive(frame(OPEN, membership_pb2.StreamOpening(key=b"key").SerializeToString()))

    def _begin(self, request: decode_pb2.DecodeRequest, on_news: Callable[[], object]) -> Any:
        attempt = self.attempts[request.request_id] = Attempt(request, on_news)
        return attempt

    def send(self, **fields: Any) -> None:
        self.worker.receive(frame(FRAME, OLD["RouterFrame"](**fields).SerializeToString()))

    def place(self, number: int, request_id: str) -> None:
        request = OLD["DecodeRequest"](request_id=request_id, worker_incarnation=b"i", prompt_token_ids=[1, 2, 300])
        self.send(placed=[OLD["PlacedRequest"](number=number, request=request, timeout_ms=1000.0)])

    def parts(self) -> list[Any]:
        """Return the parts of the worker's next frames."""
        found: list[Any] = []
        for kind, payload in taken(self.worker):
            if kind == NOTE:
                self.events.append(payload)
            else:
                found += OLD["DecodeFrame"].FromString(payload).parts
        return found

    def tokens(self) -> dict[int, list[int]]:
        return {
            part.number: [
                token for message in part.messages for token in public_pb.GenerateResponse.FromString(message).token_ids
            ]
            for part in self.parts()
        }


def test_a_router_of_the_version_before_is_served() -> None:
    router = OldRouter()
    assert membership_pb2.StreamOpening.FromString(router.openings[0]).key == b"key"
    for number, name in ((1, "a"), (2, "b"), (5, "c")):
        router.place(number, name)
    request = router.attempts["a"].request
    assert (request.worker_incarnation, list(request.prompt_token_ids)) == (b"i", [1, 2, 300])
    assert request.timeout_ms == 0, "only the router itself knows when its request is late"
    router.attempts["a"].say(1, 2)
    router.attempts["b"].say(3)
    router.worker.note(b"event")
    assert router.tokens() == {1: [1, 2], 2: [3]}
    assert router.events == [b"event"]

    router.send(paused=[1], cancelled=[2])
    assert router.attempts["b"].is_closed
    router.attempts["a"].say(4)
    router.attempts["c"].say(5)
    assert router.tokens() == {5: [5]}
    router.send(resumed=[1])
    assert router.tokens() == {1: [4]}

    router.attempts["a"].end()
    router.attempts["c"].end(Overloaded("no room"))
    ended = {part.number: part for part in router.parts()}
    assert ended[1].ended
    assert ended[1].status == b""
    assert isinstance(from_proto(status_pb2.Status.FromString(ended[5].status)), Overloaded)
    assert router.worker.num_channels == 0


def test_a_router_of_the_version_before_gives_no_credit_and_needs_none() -> None:
    router = OldRouter()
    router.place(1, "a")
    for token in range(1, 10 * WINDOW):
        router.attempts["a"].say(token)
        assert router.tokens() == {1: [token]}
        router.place(1 + token, f"more-{token}")
        assert not list(taken(router.worker)), "nothing is answered that it would not understand"


def test_a_worker_of_the_version_before_serves_this_versions_router() -> None:
    events: list[bytes] = []
    opening = membership_pb2.StreamOpening(key=b"key").SerializeToString()
    router = Mux(opening, lambda channel, opening: None, lambda: None)
    router.on_note = events.append
    seen: dict[str, tuple[list[list[bytes]], list[bytes]]] = {}

    def place(name: str) -> Channel:
        request = decode_pb2.DecodeRequest(
            request_id=name,
            worker_incarnation=b"i",
            prompt_token_ids=[1, 2, 300],
            timeout_ms=500.0,
            block_keys=b"k" * 16,
        )
        channel = router.open(request.SerializeToString())
        messages, ends = seen[name] = [], []
        channel.on_messages = lambda new: messages.append(list(new))
        channel.on_end = ends.append
        return channel

    def answer(*parts: Any) -> None:
        router.receive(frame(FRAME, OLD["DecodeFrame"](parts=parts).SerializeToString()))

    channels = {name: place(name) for name in ("a", "b", "c")}
    (kind, first), (_, payload) = taken(router)
    assert kind == OPEN
    assert membership_pb2.StreamOpening.FromString(first).key == b"key"
    placed = OLD["RouterFrame"].FromString(payload).placed
    assert [each.number for each in placed] == [1, 2, 3], "in order, as that worker demands"
    assert [each.request.request_id for each in placed] == ["a", "b", "c"]
    assert list(placed[0].request.prompt_token_ids) == [1, 2, 300]
    assert placed[0].timeout_ms == 0

    router.receive(frame(NOTE, b"event"))
    answer(OLD["Part"](number=1, messages=[b"x", b"y"]), OLD["Part"](number=2, messages=[b"z"], ended=True))
    assert (events, seen["a"], seen["b"]) == ([b"event"], ([[b"x", b"y"]], []), ([[b"z"]], [b""]))
    channels["a"].pause()
    channels["c"].cancel()
    ((_, payload),) = taken(router)
    said = OLD["RouterFrame"].FromString(payload)
    assert (list(said.paused), list(said.cancelled), list(said.placed)) == ([1], [3], [])
    channels["a"].resume()
    ((_, payload),) = taken(router)
    assert list(OLD["RouterFrame"].FromString(payload).resumed) == [1]
    status = to_proto(Overloaded("no room")).SerializeToString()
    answer(OLD["Part"](number=3, messages=[b"late"]), OLD["Part"](number=1, ended=True, status=status))
    assert seen["a"][1] == [status]
    assert router.num_channels == 0

    for number in range(4, 10 * WINDOW):  # no credit, and no end of requests and answers
        place(f"{number}")
        ((_, payload),) = taken(router)
        assert [each.number for each in OLD["RouterFrame"].FromString(payload).placed] == [number]
        answer(OLD["Part"](number=number, messages=[b"x"]))
        assert not list(taken(router))
