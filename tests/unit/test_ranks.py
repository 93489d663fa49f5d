"""Endpoints of several ranks, and which bytes go from whose part of a block to whose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.layout import KvLayout
from kvtransfer.errors import EndpointMismatch
from kvtransfer.fingerprint import Cut, Fingerprints, PlaneFingerprints, fingerprint_blocks
from kvtransfer.ranks import (
    ALL,
    MAGIC,
    MAX_RANKS,
    PLANES_MAGIC,
    STAGES_MAGIC,
    BlockPart,
    RankGrid,
    Share,
    join_endpoints,
    part_spans,
    parts_of,
    shares_of,
    split_endpoint,
    with_planes,
    with_stages,
    without_planes,
    without_stages,
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


pairings = st.permutations(range(5)).flatmap(lambda left: st.permutations(range(5)).map(lambda right: (left, right)))


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


LAYER_BYTES = 16
"""Bytes of a head in one layer."""


@st.composite
def stages(draw: st.DrawFn, layers: int) -> list[int]:
    """Where the stages end."""
    ends = draw(st.sets(st.integers(1, layers), max_size=4))
    return sorted(ends | {layers})


@st.composite
def pools(draw: st.DrawFn, layers: int, heads: int) -> tuple[list[int], int, int]:
    """The ends of stages, the ranks of each, and the blocks of a pool."""
    ranks = draw(st.sampled_from([each for each in range(1, heads + 1) if heads % each == 0]))
    return draw(stages(layers)), ranks, draw(st.integers(5, 8))


def parts_in(pool: tuple[list[int], int, int], layers: int, heads: int, in_planes: bool) -> list[BlockPart]:
    ends, ranks, num_blocks = pool
    shares = shares_of(ends) if len(ends) > 1 else (ALL,)
    size = layers * heads * LAYER_BYTES
    return parts_of(size, ranks * len(ends), layers if in_planes else 1, num_blocks, shares, heads)


def pool_of(part: BlockPart, blocks: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"):  # type: ignore[no-untyped-def]
    """Memory of a rank that has its part of these whole blocks."""
    planes, pieces = len(part.own_planes), [part.of(block) for block in blocks]
    return np.array([piece.reshape(planes, -1) for piece in pieces]).transpose(1, 0, 2).reshape(-1)


@given(data=st.data(), layers=st.integers(2, 5), heads=st.sampled_from([1, 2, 4, 6]), in_planes=st.booleans())
def test_each_byte_moves_once_between_pools_of_any_stages_and_ranks(
    data: st.DataObject, layers: int, heads: int, in_planes: bool
) -> None:
    """Blocks of a worker with any stages and ranks arrive whole in one with any others, with their fingerprints."""
    lender, reader = data.draw(pools(layers, heads)), data.draw(pools(layers, heads))
    seed, pairing = data.draw(st.integers(0, 99)), data.draw(pairings)
    pairs = list(zip(*pairing, strict=True))[: data.draw(st.integers(1, 5))]
    rng = np.random.Generator(np.random.PCG64(seed))
    blocks = rng.integers(0, 256, (lender[2], layers * heads * LAYER_BYTES), np.uint8)
    theirs = [(part, pool_of(part, blocks)) for part in parts_in(lender, layers, heads, in_planes)]
    arrived = np.zeros((reader[2], blocks.shape[1]), np.uint8)
    prints = []
    ours = parts_in(reader, layers, heads, in_planes)
    assert sum(part.num_bytes for part in ours) == blocks.shape[1]
    for own in ours:
        pool, times = np.zeros((2, reader[2] * own.num_bytes), np.uint8)
        for part, source in theirs:
            for span in part_spans(own, part, pairs):
                here, there = slice(span.local_offset, span.local_offset + span.length), span.remote_offset
                assert there + span.length <= len(source)
                pool[here] = source[there : there + span.length]
                times[here] += 1
        of_blocks = times.reshape(len(own.own_planes), reader[2], -1)
        locals_ = [local for local, _ in pairs]
        assert (of_blocks[:, locals_] == 1).all()
        assert of_blocks.sum() == len(pairs) * own.num_bytes, "and nothing else is written"
        planes = pool.reshape(len(own.own_planes), reader[2], -1)
        for local in locals_:
            own.put(planes[:, local].reshape(-1), arrived[local])
        prints.append(prints_of(own, pool, heads // own.ranks, locals_))
    for local, remote in pairs:
        np.testing.assert_array_equal(arrived[local], blocks[remote])
    joined = RankGrid(len(ours), len(reader[0])).joined(prints)
    expected = prints_of(
        BlockPart(blocks.shape[1], 0, 1, layers if in_planes else 1, lender[2]),
        pool_of(BlockPart(blocks.shape[1], 0, 1, layers if in_planes else 1, lender[2]), blocks),
        heads,
        [remote for _, remote in pairs],
    )
    np.testing.assert_array_equal(joined, expected)


def prints_of(  # type: ignore[no-untyped-def]
    part: BlockPart, pool: "np.ndarray[tuple[int], np.dtype[np.uint8]]", heads: int, blocks: list[int]
):
    if part.planes > 1:
        cut = Cut(part.own_planes.start, part.planes)
        return PlaneFingerprints(pool, part.num_blocks, len(part.own_planes), heads, cut).of(blocks)
    head_bytes = part.block_bytes // (heads * part.ranks)
    cut = Cut(part.columns.start // 8 if part.share != ALL else 0, head_bytes // 8)
    return Fingerprints(pool.reshape(part.num_blocks, -1), heads, cut).of(blocks)


@given(count=st.integers(1, 1500), first=st.integers(0, 700), rest=st.integers(0, 600), seed=st.integers(0, 99))
def test_parts_of_a_long_head_add_up(count: int, first: int, rest: int, seed: int) -> None:
    """They begin within a page of multipliers, or with one, and may have several."""
    words = first + count + rest
    pool = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (2, words * 8), np.uint8)
    cuts = [(start, end) for start, end in ((0, first), (first, first + count), (first + count, words)) if start < end]
    parts = [
        Fingerprints(np.ascontiguousarray(pool[:, 8 * start : 8 * end]), 1, Cut(start, words)) for start, end in cuts
    ]
    total = sum((part.of([1, 0]) for part in parts), np.zeros((2, 1), np.uint64))
    np.testing.assert_array_equal(total, fingerprint_blocks(pool, [1, 0], 1))


def test_an_endpoint_names_its_stages() -> None:
    shares = shares_of([2, 5])
    assert shares == (Share(0, 2, 5), Share(2, 5, 5))
    endpoint = with_stages(with_planes(JOINED, 5, 100), shares)
    assert without_stages(endpoint) == (shares, with_planes(JOINED, 5, 100))
    assert with_stages(JOINED, (ALL,)) == JOINED
    assert without_stages(JOINED) == ((ALL,), JOINED)


@pytest.mark.parametrize("ends", [[], [3], [2, 2], [3, 1], [0, 2]])
def test_malformed_stages_are_refused(ends: list[int]) -> None:
    header = np.array([len(ends), *ends], "<u4").tobytes()
    with pytest.raises(EndpointMismatch, match="stages"):
        without_stages(STAGES_MAGIC + header)
    with pytest.raises(EndpointMismatch, match="stages"):
        without_stages(STAGES_MAGIC + header[:-2])


@pytest.mark.parametrize(
    ("ranks", "planes", "ends", "heads"),
    [(3, 4, [2, 4], 1), (1, 1, [1, 2], 1), (2, 4, [1, 3], 1), (4, 1, [1, 2], 1), (2, 1, [1, 7], 2)],
)
def test_stages_that_a_block_does_not_have_are_refused(ranks: int, planes: int, ends: list[int], heads: int) -> None:
    with pytest.raises(EndpointMismatch, match="stages"):
        parts_of(64, ranks, planes, 9, shares_of(ends), heads)
