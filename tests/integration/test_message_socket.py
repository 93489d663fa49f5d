"""The socket between a front and its engine: whole messages, in order, and no side blocks."""

import socket
import threading
import time

import pytest

from engine.process.front_link import MessageSocket, SocketWaiter


@pytest.fixture
def ends() -> tuple[MessageSocket, MessageSocket]:
    one, other = socket.socketpair()
    return MessageSocket(one), MessageSocket(other)


def test_messages_arrive_whole_and_in_order(ends: tuple[MessageSocket, MessageSocket]) -> None:
    one, other = ends
    for number in range(100):
        one.send(("message", number))
    assert other.receive() == [("message", number) for number in range(100)]
    assert other.receive() == []


def test_a_message_in_pieces_is_one_message() -> None:
    raw, end = socket.socketpair()
    scratch, sink = socket.socketpair()
    MessageSocket(scratch).send({"a": list(range(50))})
    content = sink.recv(1 << 20)
    link = MessageSocket(end)
    for cut in range(0, len(content), 7):
        assert link.receive() == []
        raw.send(content[cut : cut + 7])
    assert link.receive() == [{"a": list(range(50))}]


def test_sending_more_than_the_socket_takes_waits_here(ends: tuple[MessageSocket, MessageSocket]) -> None:
    one, other = ends
    big = b"x" * (5 << 20)
    one.send(big)
    one.send("after")
    assert one.has_unsent
    received = []
    while len(received) < 2:
        received += other.receive()
        one.flush()
    assert received == [big, "after"]
    assert not one.has_unsent


def test_the_end_is_told_after_everything_that_was_said(ends: tuple[MessageSocket, MessageSocket]) -> None:
    one, other = ends
    one.send("last words")
    one.shut_down_sending()
    assert other.receive() == ["last words"]
    with pytest.raises(EOFError):
        other.receive()
    other.send("still possible")
    assert one.receive() == ["still possible"]


def test_a_wait_ends_by_a_message_by_a_wake_and_by_time(ends: tuple[MessageSocket, MessageSocket]) -> None:
    one, other = ends
    waiter = SocketWaiter(other)
    one.send(1)
    waiter.wait(60)
    assert other.receive() == [1]
    threading.Timer(0.05, waiter.wake).start()
    waiter.wait(60)
    assert other.receive() == []
    started_at = time.monotonic()
    waiter.wait(0.05)
    assert time.monotonic() - started_at >= 0.04


def test_a_wait_sends_what_is_left(ends: tuple[MessageSocket, MessageSocket]) -> None:
    one, other = ends
    waiter = SocketWaiter(one)
    big = b"y" * (5 << 20)
    one.send(big)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(_receive_one(other)))
    reader.start()
    while one.has_unsent:
        waiter.wait(1)
    reader.join(10)
    assert received == [big]


def _receive_one(link: MessageSocket) -> list[bytes]:
    waiter = SocketWaiter(link)
    while not (messages := link.receive()):
        waiter.wait(1)
    return messages
