"""The links of the `ucxx` transport: what a lender says to those who misbehave, and what ends with a link."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import PeerGone, TransferError
from kvtransfer.transport import MAX_POSTED_BYTES, MAX_POSTED_BYTES_ON_GPU, Pool, Span
from kvtransfer.ucx.ucxx_links import Ucx, UcxEnd
from kvtransfer.ucx.ucxx_wire import (
    HEADER,
    MAX_BODY_BYTES,
    NUMBER,
    SPAN,
    FrameReader,
    Kind,
    UcxxEndpoint,
    pack_frame,
    pack_greeting,
)
from kvtransfer.ucxx import UcxxTransport

POOL_BYTES = 1 << 16
TIMEOUT_S = 20.0
UNTOUCHED = 0xEE
Lender = tuple[UcxxTransport, UcxxEndpoint]
Reading = tuple[UcxxTransport, Pool]


def open_with_pool(num_bytes: int = POOL_BYTES, fill: int = UNTOUCHED) -> tuple[UcxxTransport, Pool, bytes]:
    transport, pool = UcxxTransport(), Pool(np.full((1, num_bytes), fill, np.uint8))
    return transport, pool, transport.register(pool)


@pytest.fixture
def lender() -> Iterator[Lender]:
    """In this process; whatever the test did to it, it still serves."""
    transport, pool, packed = open_with_pool()
    pool.memory[0] = np.arange(POOL_BYTES, dtype=np.uint64).astype(np.uint8)
    yield transport, UcxxEndpoint.unpack(packed)
    reader, copy, _ = open_with_pool()
    try:
        reader.read(reader.connect(packed), [Span(0, 0, POOL_BYTES)]).result(TIMEOUT_S)
        assert copy.memory.tobytes() == pool.memory.tobytes()
    finally:
        reader.close()
        transport.close()


@pytest.fixture
def reading() -> Iterator[Reading]:
    """A transport that reads, and its own pool."""
    reader, pool, _ = open_with_pool()
    yield reader, pool
    reader.close()


@pytest.fixture
def end() -> Iterator[UcxEnd]:
    """A real UCX worker to be sent to."""
    made = UcxEnd(Ucx())
    yield made
    made.destroy()


class Borrower:
    """Says what it likes."""

    def __init__(self, endpoint: UcxxEndpoint) -> None:
        self._socket = socket.create_connection((endpoint.host, endpoint.port), TIMEOUT_S)
        self._reader = FrameReader(MAX_BODY_BYTES)

    def say(self, said: bytes) -> None:
        self._socket.sendall(said)

    def heard(self) -> tuple[Kind, str] | None:
        """The next frame; None when the lender has closed."""
        while True:
            try:
                received = self._socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not received:
                return None
            if frames := self._reader.feed(received):
                return frames[0][0], frames[0][1].decode(errors="replace")

    def is_refused(self, answer: str) -> None:
        heard = self.heard()
        assert heard[0] == Kind.REFUSED
        assert answer in heard[1]


def request(*pieces: tuple[int, int], number: int = 1) -> bytes:
    return pack_frame(Kind.READ, NUMBER.pack(number) + b"".join(SPAN.pack(*piece) for piece in pieces))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\nHost: tandem\r\n\r\n", "limit"),
        (HEADER.pack(1 << 31, Kind.HELLO), "limit"),
        (HEADER.pack(0, 77), "unknown kind 77"),
        (pack_frame(Kind.HELLO), "incarnation"),
        (pack_frame(Kind.WELCOME), "unexpected message WELCOME"),
        (request((0, 8)), "unexpected message READ"),
    ],
)
def test_whoever_does_not_greet_properly_is_refused(lender: Lender, said: bytes, answer: str) -> None:
    borrower = Borrower(lender[1])
    borrower.say(said)
    borrower.is_refused(answer)
    assert borrower.heard() is None


def test_an_address_that_nobody_signed_never_reaches_ucx(lender: Lender) -> None:
    """UCX would read it as structures of its own, wherever they lead."""
    borrower = Borrower(lender[1])
    borrower.say(pack_frame(Kind.HELLO, pack_greeting(replace(lender[1], secret=bytes(32)), b"\xff" * 200)))
    assert borrower.heard() == (Kind.REFUSED, "the greeting's signature does not match the endpoint's secret")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (request((POOL_BYTES, 1)), f"1 bytes at offset {POOL_BYTES} lie outside the pool of {POOL_BYTES}"),
        (request((0, POOL_BYTES + 1)), "outside the pool of"),
        (request((0, 8), ((1 << 64) - 8, 8)), "outside the pool of"),
        (request((0, 0)), "outside the pool of"),
        (request(*[(0, POOL_BYTES)] * (MAX_POSTED_BYTES_ON_GPU // POOL_BYTES + 1)), "the limit is"),
        (request((0, 8), number=2), "unexpected read number 2, expected 1"),
        (pack_frame(Kind.READ, b"12345"), "a read request cannot have 5 bytes"),
        (pack_frame(Kind.HELLO), "unexpected message HELLO"),
        (b"".join(request((0, POOL_BYTES), number=number) for number in range(1, 9)), "reads at a time"),
        (HEADER.pack(MAX_BODY_BYTES + 1, Kind.READ), "the limit is"),
    ],
)
def test_a_borrower_who_asks_for_what_is_not_there_is_refused(
    lender: Lender, end: UcxEnd, said: bytes, answer: str
) -> None:
    borrower = Borrower(lender[1])
    borrower.say(pack_frame(Kind.HELLO, pack_greeting(lender[1], end.address)))
    welcome = borrower.heard()
    assert welcome[0] == Kind.WELCOME
    borrower.say(said)
    borrower.is_refused(answer)


@pytest.mark.parametrize(
    ("wrong", "first_byte", "said"),
    [
        pytest.param({"incarnation": bytes(16)}, 0, "another incarnation", id="a process at the address of another"),
        pytest.param({"num_bytes": 2 * POOL_BYTES}, POOL_BYTES, "outside the pool of", id="a pool that is smaller"),
    ],
)
def test_an_endpoint_that_does_not_fit_its_process_is_not_read(
    lender: Lender, reading: Reading, wrong: dict[str, Any], first_byte: int, said: str
) -> None:
    reader, pool = reading
    read = reader.read(reader.connect(replace(lender[1], **wrong).pack()), [Span(0, first_byte, 8)])
    with pytest.raises(TransferError, match=said):
        read.result(TIMEOUT_S)
    assert (pool.memory == UNTOUCHED).all()


def test_somebody_who_listens_and_never_greets(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.ucx.ucxx_links.GREETING_S", 0.2)
    reader, _ = reading
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = UcxxEndpoint("127.0.0.1", silent.getsockname()[1], POOL_BYTES, bytes(16), bytes(32))
        reads = [reader.read(reader.connect(endpoint.pack()), [Span(0, 0, 8)]) for _ in range(2)]
        for read in reads:
            with pytest.raises(PeerGone, match="no greeting within"):
                read.result(TIMEOUT_S)


def test_a_link_that_was_cut_is_made_anew_by_the_next_read(lender: Lender, reading: Reading) -> None:
    reader, pool = reading
    peer = reader.connect(lender[1].pack())
    reader.read(peer, [Span(0, 0, 8)]).result(TIMEOUT_S)
    for link in list(lender[0].lends):
        link.control.connection.shutdown(socket.SHUT_RDWR)
    give_up_at = time.monotonic() + TIMEOUT_S
    while reader.borrows[peer].control is not None:
        assert time.monotonic() < give_up_at
        time.sleep(0.002)
    reader.read(peer, [Span(8, 0, 8)]).result(TIMEOUT_S)
    assert pool.memory[0, 8:16].tobytes() == pool.memory[0, :8].tobytes()


def test_idle_links_take_no_time(lender: Lender, reading: Reading) -> None:
    reader, _ = reading
    reader.read(reader.connect(lender[1].pack()), [Span(0, 0, 8)]).result(TIMEOUT_S)
    time.sleep(0.2)
    before, began = time.process_time(), time.monotonic()
    time.sleep(1.0)
    share = (time.process_time() - before) / (time.monotonic() - began)
    assert share < 0.5, f"two idle transports took {share:.1%} of a core: one of them polls"


def test_what_is_closed_leaves_no_descriptor_behind(lender: Lender) -> None:
    """That of a UCX worker among them: it is gone, and writes nothing any more."""

    def open_and_close() -> int:
        reader, _, _ = open_with_pool()
        reader.read(reader.connect(lender[1].pack()), [Span(0, 0, POOL_BYTES)]).result(TIMEOUT_S)
        reader.close()
        give_up_at = time.monotonic() + TIMEOUT_S
        while lender[0].lends and time.monotonic() < give_up_at:
            time.sleep(0.002)
        return len(os.listdir("/proc/self/fd"))

    first = open_and_close()
    assert [open_and_close() for _ in range(3)] == [first] * 3


def test_lenders_killed_in_mid_read_leave_nothing_behind() -> None:
    """What is half received can neither complete nor be cancelled; its UCX worker is gone all the same."""
    reader, pool, _ = open_with_pool(MAX_POSTED_BYTES)
    command = [sys.executable, "-m", "kvtransfer.contract.lender", "mortal", "1", str(MAX_POSTED_BYTES), "ucxx"]
    numbers: list[int] = []
    try:
        for _ in range(5):
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
                peer = reader.connect(json.loads(lender.stdout.readline())["endpoint"].encode())
                pool.memory[:] = UNTOUCHED
                reads = [reader.read(peer, [Span(0, 0, MAX_POSTED_BYTES)]) for _ in range(8)]
                give_up_at = time.monotonic() + TIMEOUT_S
                while (pool.memory[0, :64] == UNTOUCHED).all() and time.monotonic() < give_up_at:
                    time.sleep(0.0002)
                lender.kill()
            errors = [read.exception(TIMEOUT_S) for read in reads]
            assert any(isinstance(error, PeerGone) for error in errors)
            reader.drop(peer)
            numbers.append(len(os.listdir("/proc/self/fd")))
        assert max(numbers) == min(numbers)
    finally:
        reader.close()


def test_a_process_without_ucxx_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['ucxx'] = None\n"
        "from kvtransfer.registry import open_transport\n"
        "open_transport('ucxx', 'nobody')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "TransportUnavailable: ucxx does not load" in done.stderr
