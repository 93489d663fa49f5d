"""Bytes of an HTTP answer: heartbeats before the first event, and streams to clients that know no chunks."""

import asyncio
from typing import Any

from cluster.errors import InvalidRequest
from router.frontend.anthropic.messages import read_messages
from router.frontend.http.blocks import compact, event
from router.frontend.http.errors import Caller, error_answer
from router.frontend.http.exchange import HEARTBEAT, Exchange
from router.frontend.http.server import UnchunkedTransport
from router.frontend.openai.completions import quoted
from support.refusals import refusal_of
from support.virtual_loop import VirtualLoop

BREAKS = "a\u0085b\u2028c\u2029d"


def test_no_line_break_of_unicode_is_in_json() -> None:
    for text in (compact({BREAKS: [BREAKS]}), quoted(BREAKS).decode()):
        assert text.splitlines() == [text]
        assert "\\u0085b\\u2028c\\u2029d" in text
    assert event("e", {"text": BREAKS}).decode().splitlines() == ["event: e", f"data: {compact({'text': BREAKS})}", ""]


class Sent:
    """Messages of one exchange, with their times."""

    def __init__(self) -> None:
        self.messages: list[tuple[float, Any]] = []
        self.exchange = Exchange({"headers": []}, self._receive, self._send)

    async def _receive(self) -> Any:
        await asyncio.Future()

    async def _send(self, message: Any) -> None:
        self.messages.append((asyncio.get_running_loop().time(), message))

    @property
    def bodies(self) -> list[tuple[float, bytes]]:
        return [(at, message["body"]) for at, message in self.messages if message["type"] == "http.response.body"]


async def test_heartbeats_come_until_the_first_event() -> None:
    sent = Sent()
    async with sent.exchange.heartbeats(2.0):
        await asyncio.sleep(5.0)
        await sent.exchange.send_events(b"one")
        await asyncio.sleep(9.0)
        await sent.exchange.end_events(b"two")
    await asyncio.sleep(9.0)
    assert sent.bodies == [(2.0, HEARTBEAT), (4.0, HEARTBEAT), (5.0, b"one"), (14.0, b"two")]
    starts = [message for _, message in sent.messages if message["type"] == "http.response.start"]
    assert [start["status"] for start in starts] == [200]
    assert (b"content-type", b"text/event-stream; charset=utf-8") in starts[0]["headers"]


async def test_a_failure_after_a_heartbeat_is_an_event_and_before_one_a_status() -> None:
    answer = error_answer(InvalidRequest("prompt", "is bad"), {})
    for every_s, started in ((2.0, True), (4.0, False), (None, False)):
        sent = Sent()
        async with sent.exchange.heartbeats(every_s):
            await asyncio.sleep(3.0)
        await sent.exchange.fail(answer)
        await asyncio.sleep(9.0)
        assert sent.messages[0][1]["status"] == (200 if started else 400)
        assert sent.bodies[-1][1] == (answer.event if started else answer.body)
        assert len(sent.bodies) == 1 + started


class Written(asyncio.Transport):
    """Transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: Any) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.data += b"|closed"


def test_chunks_are_taken_apart_for_clients_of_http_1_0() -> None:
    loop = VirtualLoop()
    try:
        written = Written()
        transport = UnchunkedTransport(written, loop)
        transport.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
        transport.write(b"b\r\ndata: \r\n1\r\n\r\n")
        transport.write(b"2\r\nxy\r\n0\r\n\r\n")
        transport.close()
        assert written.data == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: \r\n1\r\nxy|closed"
        written = Written()
        transport = UnchunkedTransport(written, loop)
        transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        transport.write(b"2\r\nxy")
        transport.close()
        assert written.data.endswith(b"\r\n\r\n2\r\nxy|closed"), "its length is known, so there are no chunks"
    finally:
        loop.close()


def test_a_message_without_a_block_is_refused_by_its_name() -> None:
    for messages, field in (
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": []}], "messages[1].content"),
    ):
        with refusal_of(field, match="must have a block"):
            read_messages({"messages": messages, "max_tokens": 5}, Caller("", "r"))
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": []}]
    (request,) = read_messages({"messages": begun, "max_tokens": 5}, Caller("", "r")).requests
    assert [message.role for message in request.messages] == ["user"], "an empty answer begins a new one"
