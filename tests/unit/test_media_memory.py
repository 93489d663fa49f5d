"""Memory of a preprocessor: blobs with and without a request, shares of tenants, and frames of children."""

import asyncio
import io

import pytest

from cluster.errors import Overloaded, UnknownBlob
from preprocessor.blobs import BlobStore, Shares
from preprocessor.children import read_answer
from preprocessor.frames import Frame, NoFrame, encoded, read_frame, receive_frame
from preprocessor.service import item_identifier

MIB = 1 << 20


def blob(number: int) -> tuple[bytes, bytes]:
    return bytes([number]) * 16, bytes([number]) * MIB


def has(store: BlobStore, number: int) -> bool:
    try:
        return store.read([blob(number)[0]]) == [blob(number)]
    except UnknownBlob:
        return False


def test_blobs_without_a_request_go_the_least_recently_used_first() -> None:
    store = BlobStore(3 * MIB)
    for number in range(3):
        lease = store.lease("")
        lease.add(*blob(number))
        lease.close()
    assert has(store, 0)  # used now, so 1 goes first
    kept = store.lease("")
    kept.add(*blob(3))
    assert [has(store, number) for number in range(4)] == [True, False, True, True]
    kept.close()
    assert store.num_bytes == 3 * MIB
    assert store.shares.total == 0


def test_blobs_of_requests_stay_and_one_of_two_requests_is_enough() -> None:
    store = BlobStore(2 * MIB)
    first, second = store.lease("a"), store.lease("b")
    first.add(*blob(1))
    second.add(*blob(1))
    second.add(*blob(2))
    second.add(*blob(3))
    assert [has(store, number) for number in (1, 2, 3)] == [True] * 3
    assert store.num_bytes == 3 * MIB
    second.close()
    assert [has(store, number) for number in (1, 2, 3)].count(True) == 2
    assert has(store, 1)
    first.close()
    first.close()
    assert store.shares.total == 0


def test_a_tenant_that_fills_the_memory_leaves_some_to_others() -> None:
    shares = Shares(8 * MIB, "files")
    shares.take("greedy", 8 * MIB)
    with pytest.raises(Overloaded, match="8 MiB of 8 MiB"):
        shares.check("greedy")
    shares.check("other")
    shares.take("other", 2 * MIB)
    with pytest.raises(Overloaded):
        shares.check("other")
    shares.give_back("greedy", 4 * MIB)
    shares.check("other")
    with pytest.raises(ZeroDivisionError), shares.using("third", MIB):
        _ = 1 // 0
    assert shares.total == 6 * MIB


def test_identifiers_differ_by_content_and_salt() -> None:
    pairs = [("a", ""), ("b", ""), ("a", "s"), ("as", ""), ("", "as"), ("a", "s\0")]
    assert len({item_identifier(*pair) for pair in pairs}) == len(pairs)
    assert all(len(item_identifier(*pair)) == 16 for pair in pairs)


async def read(data: bytes, max_bytes: int = 100) -> Frame:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await read_frame(reader, max_bytes)


async def test_frames() -> None:
    frame = Frame({"a": [1, "ü"]}, [b"", b"xy", bytes(98)])
    data = b"".join(encoded(frame))
    assert await read(data) == frame
    assert receive_frame(io.BytesIO(data)) == frame
    assert receive_frame(io.BytesIO(b"")) is None
    with pytest.raises(NoFrame, match="at most 99"):
        await read(data, 99)
    for end in range(len(data)):
        with pytest.raises(asyncio.IncompleteReadError):
            await read(data[:end])


@pytest.mark.parametrize(
    "data", [b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{]", b"\0\0\0\0\xff\xff\xff\xff", b"\0" * 8]
)
async def test_what_a_hostile_child_may_write_is_no_frame(data: bytes) -> None:
    with pytest.raises(NoFrame):
        await read(data)


@pytest.mark.parametrize(
    "answer",
    [
        Frame({}),
        Frame({"items": []}),
        Frame({"items": [["a", 1]]}, [b"", b"", b""]),
        Frame({"items": [["a", 1, 2]]}, [b"", b""]),
        Frame({"items": [["a", [], 2]]}, [b"", b"", b""]),
        Frame({"items": 5}, [b""]),
        Frame({"items": []}, [b"abc"]),
        Frame({"refused": "x"}),
        Frame({"refused": "x", "place": "y"}),
    ],
)
def test_what_a_hostile_child_may_answer_is_no_answer(answer: Frame) -> None:
    with pytest.raises(NoFrame):
        read_answer(answer)
