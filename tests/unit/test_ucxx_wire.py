"""What a lender of the ucxx transport accepts from the network, and what it does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import EndpointMismatch
from kvtransfer.transport import MAX_POSTED_BYTES_ON_GPU
from kvtransfer.ucx.ucxx_wire import (
    HEADER,
    MAX_ADDRESS_BYTES,
    NUMBER,
    SPAN,
    FrameReader,
    Kind,
    Malformed,
    ReadRequest,
    UcxxEndpoint,
    pack_frame,
    pack_greeting,
    unpack_greeting,
)

ENDPOINT = UcxxEndpoint("127.0.0.1", 4000, 1 << 20, bytes(range(16)), bytes(range(32)))
FRAMES = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40)), max_size=8)


def read(*pieces: tuple[int, int], number: int = 1) -> bytes:
    return NUMBER.pack(number) + b"".join(SPAN.pack(*piece) for piece in pieces)


@given(FRAMES, st.integers(1, 20))
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames: list[tuple[Kind, bytes]], cut: int) -> None:
    said = b"".join(pack_frame(kind, body) for kind, body in frames)
    reader = FrameReader(40)
    heard = [frame for start in range(0, len(said), cut) for frame in reader.feed(said[start : start + cut])]
    assert heard == frames


@given(st.binary(max_size=200))
def test_noise_is_frames_or_malformed(noise: bytes) -> None:
    try:
        frames = FrameReader(64).feed(noise)
    except Malformed:
        return
    assert sum(HEADER.size + len(body) for _, body in frames) <= len(noise)


def test_a_frame_is_refused_by_its_head() -> None:
    with pytest.raises(Malformed, match="100 bytes; the limit is 99"):
        FrameReader(99).feed(HEADER.pack(100, Kind.READ))
    with pytest.raises(Malformed, match="unknown kind 9"):
        FrameReader(99).feed(HEADER.pack(1, 9))


def test_an_endpoint_comes_out_as_it_went_in() -> None:
    assert UcxxEndpoint.unpack(ENDPOINT.pack()) == ENDPOINT


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_noise_is_no_endpoint(noise: bytes) -> None:
    with pytest.raises(EndpointMismatch):
        UcxxEndpoint.unpack(noise)


def test_a_hello_is_believed_only_as_it_was_signed() -> None:
    hello = pack_greeting(ENDPOINT, b"address")
    assert unpack_greeting(hello, ENDPOINT.incarnation, ENDPOINT.secret) == b"address"
    for place in range(len(hello)):
        forged = bytearray(hello)
        forged[place] ^= 1
        with pytest.raises(Malformed):
            unpack_greeting(bytes(forged), ENDPOINT.incarnation, ENDPOINT.secret)
    with pytest.raises(Malformed, match="incarnation"):
        unpack_greeting(hello, bytes(16), ENDPOINT.secret)
    with pytest.raises(Malformed, match="signature"):
        unpack_greeting(hello, ENDPOINT.incarnation, bytes(32))


@pytest.mark.parametrize("size", [0, MAX_ADDRESS_BYTES + 1])
def test_an_address_of_a_wrong_size(size: int) -> None:
    with pytest.raises(Malformed, match="UCX address has"):
        unpack_greeting(pack_greeting(ENDPOINT, bytes(size)), ENDPOINT.incarnation, ENDPOINT.secret)


def test_a_read_request_comes_out_as_it_went_in_with_a_tag_for_each_piece() -> None:
    request = ReadRequest(3, ((0, 8), (100, 24)))
    assert ReadRequest.unpack(request.pack(), 124) == request
    assert list(request.tags()) == [3 << 16, (3 << 16) + 1]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 7,
        read(),
        read((0, 1))[:-1],
        read((0, 0)),
        read((0, 125)),
        read((124, 1)),
        read((1 << 63, 1 << 63)),
        read((1, (1 << 64) - 1)),
        read((0, 8), number=1 << 48),
    ],
)
def test_bad_read_requests(body: bytes) -> None:
    with pytest.raises(Malformed):
        ReadRequest.unpack(body, 124)


def test_a_read_of_more_than_may_be_posted() -> None:
    half = MAX_POSTED_BYTES_ON_GPU // 2
    assert ReadRequest.unpack(read((0, half), (0, half)), MAX_POSTED_BYTES_ON_GPU).number == 1
    with pytest.raises(Malformed, match="limit"):
        ReadRequest.unpack(read((0, half), (0, half), (0, 1)), MAX_POSTED_BYTES_ON_GPU)


@given(st.binary(max_size=100), st.integers(1, 1 << 20))
def test_noise_is_no_read_beyond_the_pool(noise: bytes, pool_bytes: int) -> None:
    try:
        request = ReadRequest.unpack(noise, pool_bytes)
    except Malformed:
        return
    assert all(length > 0 and offset + length <= pool_bytes for offset, length in request.pieces)
