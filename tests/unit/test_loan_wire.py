"""Messages of loans as bytes: what goes in comes out, and bytes that no engine sends raise ProtocolError."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.network.mux import ProtocolError
from kvcache.items import Item
from loans.network import Blocks, Peer, PlacementMark, Release, Started, Want
from loans.peers import connection
from router.stock import member

keys = st.lists(st.binary(min_size=16, max_size=16), max_size=5)
uint32 = st.integers(0, 2**32 - 1)
names = st.text(max_size=8)
peers = st.builds(Peer, names, names, st.binary(max_size=16))
items = st.builds(Item, st.binary(min_size=16, max_size=16), uint32, uint32, st.binary(max_size=4), names, names)
wants = st.builds(
    Want,
    request_id=names,
    keys=keys,
    first_block=uint32,
    may_compute=st.booleans(),
    token_ids=st.lists(uint32, max_size=9),
    root=st.binary(max_size=16),
    priority=st.integers(-(2**31), 2**31 - 1),
    adapter=st.binary(max_size=4),
    mark=st.builds(PlacementMark, names, st.integers(0, 2**64 - 1)),
    source=st.none() | peers,
    reads_store=st.booleans(),
    items=st.lists(items, max_size=2).map(tuple),
)
started = st.builds(Started, uint32, uint32, st.floats(allow_nan=False), uint32)


@given(wants)
def test_a_want(want: Want) -> None:
    found = connection.unpack_want(connection.pack_want(want))
    assert found._replace(keys=list(found.keys), token_ids=list(found.token_ids)) == want


@given(started)
def test_a_start(message: Started) -> None:
    assert [connection.unpack_lent(part) for part in connection.pack_lent(message)] == [message]


@given(st.integers(0, 2**31), st.lists(uint32, min_size=1, max_size=9), st.integers(0, 3), st.booleans())
def test_blocks(first: int, block_ids: list[int], heads: int, fetched: bool) -> None:
    message = Blocks(first, tuple(block_ids), bytes(range(8 * heads)) * len(block_ids), fetched)
    assert [connection.unpack_lent(part) for part in connection.pack_lent(message)] == [message]


@pytest.mark.parametrize("limit", [1, 16, 17, 32, 100])
def test_a_long_announcement_is_several_that_follow_each_other(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_FINGERPRINT_BYTES", limit)
    message = Blocks(7, (5, 3, 9, 4, 8), bytes(range(80)), True)
    parts = [part for part in map(connection.unpack_lent, connection.pack_lent(message)) if isinstance(part, Blocks)]
    assert len(parts) == {1: 5, 16: 5, 17: 5, 32: 3, 100: 1}[limit]
    assert [part.first for part in parts] == [7 + sum(len(p.block_ids) for p in parts[:i]) for i in range(len(parts))]
    assert sum((part.block_ids for part in parts), ()) == message.block_ids
    assert b"".join(part.fingerprints for part in parts) == message.fingerprints
    assert all(len(part.fingerprints) == 16 * len(part.block_ids) and part.fetched for part in parts)


@given(st.lists(st.tuples(uint32, uint32), max_size=4))
def test_releases(ranges: list[tuple[int, int]]) -> None:
    packed = [connection.pack_release(*each) for each in ranges]
    assert list(connection.unpack_releases(packed)) == [Release(*each) for each in ranges]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_protocol_error(payload: bytes) -> None:
    for unpack in (
        connection.unpack_want,
        connection.unpack_lent,
        lambda data: list(connection.unpack_releases([data])),
    ):
        with contextlib.suppress(ProtocolError):
            unpack(payload)


@given(wants, st.integers(0, 40), st.integers(0, 7))
def test_a_want_with_a_wrong_bit_is_a_want_or_a_protocol_error(want: Want, place: int, bit: int) -> None:
    payload = bytearray(connection.pack_want(want))
    if payload:
        payload[place % len(payload)] ^= 1 << bit
    with contextlib.suppress(ProtocolError):
        connection.unpack_want(bytes(payload))


@pytest.mark.parametrize(
    ("unpack", "payload", "reason"),
    [
        (connection.unpack_want, b"\xff", "a want is not valid"),
        (
            connection.unpack_want,
            connection.pb.Want(keys=bytes(17)).SerializeToString(),
            "17 bytes are not a whole number of keys",
        ),
        (connection.unpack_want, connection.pb.Want(token_ids=bytes(5)).SerializeToString(), "a want is not valid"),
        (connection.unpack_lent, b"", "a lender's message is empty"),
        (connection.unpack_lent, b"\xff", "a lender's message is not valid"),
        (lambda data: list(connection.unpack_releases([data])), b"\xff", "a release is not valid"),
    ],
)
def test_what_is_wrong_is_named(unpack: object, payload: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        unpack(payload)  # type: ignore[operator]


def test_the_address_of_a_peer() -> None:
    peer = Peer("w", "10.0.0.1:7", b"incarnation")
    assert connection.peer_of(connection.holder_of(peer)) == peer


def test_stock_servers_with_the_connector_speak_the_version_of_this_module() -> None:
    """The router cannot import it where no engine is installed, and pairs lenders and borrowers by the number."""
    assert member.LOANS == connection.VERSION
