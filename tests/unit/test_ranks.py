"""Endpoints of several ranks, and which bytes go from whose part of a block to whose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.layout import KvLayout
from kvtransfer.errors import EndpointMismatch
from kvtransfer.fingerprint import PlaneFingerprints, fingerprint_blocks
from kvtransfer.ranks import (
    MAGIC,
    MAX_RANKS,
    PLANES_MAGIC,
    BlockPart,
    join_endpoints,
    part_spans,
    parts_of,
    split_endpoint,
    with_planes,
    without_planes,
)
from kvtransfer.transport import Span

HEADS = 12
HEAD_BYTES = 16
BLOCK = HEADS * HEAD_BYTES
WHOLE = BlockPart(4)


def test_neighbours_in_both_pools_become_one_span() -> None:
    assert part_spans(WHOLE, WHOLE, [(0, 5), (1, 6), (2, 7)]) == [Span(0, 20, 12)]
    assert part_spans(WHOLE, WHOLE, [(0, 5), (1, 7), (2, 8)]) == [Span(0, 20, 4), Span(4, 28, 8)]
    assert part_spans(WHOLE, WHOLE, [(1, 5), (0, 6)]) == [Span(4, 20, 4), Span(0, 24, 4)]
    assert part_spans(WHOLE, WHOLE, []) == []


def test_one_rank_of_two_reads_its_half_of_a_whole_block_and_back() -> None:
    whole, (first, second) = BlockPart(8), parts_of(8, 2)
    assert part_spans(first, whole, [(0, 3), (1, 4)]) == [Span(0, 24, 4), Span(4, 32, 4)]
    assert part_spans(second, whole, [(0, 3)]) == [Span(0, 28, 4)]
    assert part_spans(whole, first, [(0, 3)]) == [Span(0, 12, 4)]
    assert part_spans(whole, second, [(0, 3)]) == [Span(4, 12, 4)]


def test_equal_ranks_read_from_each_other_alone_and_in_long_spans() -> None:
    first, second = parts_of(8, 2)
    assert part_spans(first, first, [(0, 3), (1, 4)]) == [Span(0, 12, 8)]
    assert part_spans(first, second, [(0, 3)]) == []


sizes = st.sampled_from([1, 2, 3, 4, 6, 12])
pairings = st.permutations(range(5)).flatmap(lambda left: st.permutations(range(5)).map(lambda right: (left, right)))


@given(lenders=sizes, readers=sizes, pairing=pairings, count=st.integers(1, 5), seed=st.integers(0, 99))
def test_blocks_arrive_whole_whatever_the_two_sizes(
    lenders: int, readers: int, pairing: tuple[list[int], list[int]], count: int, seed: int
) -> None:
    """And each reader's fingerprints are those of its heads of the whole block."""
    blocks = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (5, BLOCK), np.uint8)
    theirs = {part: _cut(blocks, part) for part in parts_of(BLOCK, lenders)}
    ours = {part: np.zeros((5, part.num_bytes), np.uint8) for part in parts_of(BLOCK, readers)}
    pairs = list(zip(*pairing, strict=True))[:count]
    for own, pool in ours.items():
        target = pool.reshape(-1)
        read = 0
        for part, source in theirs.items():
            for span in part_spans(own, part, pairs):
                assert not target[span.local_offset :][: span.length].any(), "nothing is read twice"
                target[span.local_offset :][: span.length] = source.reshape(-1)[span.remote_offset :][: span.length]
                read += span.length
        assert read == count * own.num_bytes
    arrived = np.concatenate(list(ours.values()), axis=1)
    local, remote = (list(side) for side in zip(*pairs, strict=True))
    assert (arrived[local] == blocks[remote]).all()
    heads = HEADS // readers
    prints = [fingerprint_blocks(pool, local, heads) for pool in ours.values()]
    assert (np.concatenate(prints, axis=1) == fingerprint_blocks(blocks, remote, HEADS)).all()


def _cut(blocks: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]", part: BlockPart):  # type: ignore[no-untyped-def]
    return np.ascontiguousarray(blocks[:, part.start : part.end])


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=5))
def test_endpoints_come_apart_as_they_were_joined(endpoints: list[bytes]) -> None:
    assert split_endpoint(join_endpoints(endpoints)) == tuple(endpoints)


def test_that_of_one_rank_stays_as_it_is() -> None:
    assert join_endpoints([b"alone"]) == b"alone"
    assert split_endpoint(b"alone") == (b"alone",)
    assert split_endpoint(b"") == (b"",)


JOINED = join_endpoints([b"first", b"second"])


@pytest.mark.parametrize("cut", range(len(MAGIC), len(JOINED)))
def test_one_that_is_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(EndpointMismatch, match="the endpoint of several ranks"):
        split_endpoint(JOINED[:cut])


@pytest.mark.parametrize("count", [0, 1, MAX_RANKS + 1, 2**32 - 1])
def test_a_wrong_number_of_ranks_is_refused(count: int) -> None:
    with pytest.raises(EndpointMismatch, match=f"the endpoint has {count} ranks, not 2 to {MAX_RANKS}"):
        split_endpoint(MAGIC + count.to_bytes(4, "little"))


def test_what_comes_after_the_last_is_refused() -> None:
    with pytest.raises(EndpointMismatch, match="has"):
        split_endpoint(JOINED + b"x")


def test_blocks_that_cannot_be_spread_over_so_many_are_refused() -> None:
    with pytest.raises(EndpointMismatch, match="a block of 10 bytes cannot be split over 3 ranks"):
        parts_of(10, 3)


def test_a_rank_has_its_heads_of_a_block() -> None:
    layout = KvLayout(layers=2, kv_heads=6, head_dim=8, block_tokens=4, dtype="bfloat16")
    part = layout.part(3)
    assert part.kv_heads == 2
    assert part.head_bytes == layout.head_bytes
    assert part.block_bytes == BlockPart(layout.block_bytes, 1, 3).num_bytes


@given(
    planes=st.sampled_from([1, 2, 5]),
    lenders=sizes,
    readers=sizes,
    lender_blocks=st.integers(5, 9),
    pairing=pairings,
    count=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_blocks_in_several_planes_arrive_whole_in_pools_of_unlike_sizes(
    planes: int,
    lenders: int,
    readers: int,
    lender_blocks: int,
    pairing: tuple[list[int], list[int]],
    count: int,
    seed: int,
) -> None:
    size = planes * BLOCK
    rng = np.random.Generator(np.random.PCG64(seed))
    whole = rng.integers(0, 256, (planes, lender_blocks, BLOCK), np.uint8)
    expected = np.zeros((planes, 5, BLOCK), np.uint8)
    pairs = list(zip(*pairing, strict=True))[:count]
    for own in parts_of(size, readers, planes, 5):
        pool = np.zeros(5 * own.num_bytes, np.uint8)
        for theirs in parts_of(size, lenders, planes, lender_blocks):
            source = whole[:, :, theirs.start : theirs.end].reshape(-1)
            for span in part_spans(own, theirs, pairs):
                target = pool[span.local_offset :][: span.length]
                assert not target.any(), "nothing is read twice"
                target[:] = source[span.remote_offset :][: span.length]
        expected[:, :, own.start : own.end] = pool.reshape(planes, 5, -1)
    for local, remote in pairs:
        np.testing.assert_array_equal(expected[:, local], whole[:, remote])


def test_a_change_in_any_plane_changes_the_fingerprint_of_its_head_alone() -> None:
    pool = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 3 * 4 * BLOCK, np.uint8)
    before = PlaneFingerprints(pool, 4, 3, HEADS).of([2])
    for plane in range(3):
        changed = pool.copy()
        changed[(plane * 4 + 2) * BLOCK + 5 * HEAD_BYTES] ^= 1
        after = PlaneFingerprints(changed, 4, 3, HEADS).of([2])
        assert np.nonzero(before != after)[1].tolist() == [5]
    exchanged = pool.reshape(3, 4, BLOCK).copy()
    exchanged[[0, 1], 2] = exchanged[[1, 0], 2]
    assert (PlaneFingerprints(exchanged, 4, 3, HEADS).of([2]) != before).all()


def test_an_endpoint_names_its_planes() -> None:
    assert without_planes(with_planes(JOINED, 24, 1000)) == (24, 1000, JOINED)
    assert with_planes(b"alone", 1, 1000) == b"alone"
    assert without_planes(b"alone") == (1, 0, b"alone")


@pytest.mark.parametrize("broken", [b"", b"1234567", (0).to_bytes(8, "little"), b"\xff" * 8, b"\x02\0\0\0\0\0\0\0"])
def test_a_malformed_header_of_planes_is_refused(broken: bytes) -> None:
    with pytest.raises(EndpointMismatch):
        without_planes(PLANES_MAGIC + broken)
