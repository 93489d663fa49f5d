"""Boundaries of chains with several KV groups: what a worker announces, and what a router makes of it."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.vllm.kv.boundaries import Boundaries
from kvcache.block_keys import block_keys, resume_name, root_key
from kvcache.chain import GroupBlock, name_of
from router.placement.fleet.index import PrefixIndex

WINDOW, OTHER_WINDOW, STATE = 1, 2, 3
TAILS = [([WINDOW, OTHER_WINDOW], 3), ([STATE], 1)]
NEEDED = {WINDOW: 3, OTHER_WINDOW: 3, STATE: 1}


def chain(*branches: int, length: int = 6) -> list[bytes]:
    """Keys of a chain of blocks of one token; chains of equal first branches share their first blocks."""
    return block_keys(root_key(b"model", ""), [*branches, *range(100, 100 + length)][:length], 1)


CHAINS = [chain(), chain(1), chain(1, 2), chain(1, 2, 3), chain(4)]


def blocks_of(keys: Sequence[bytes]) -> list[GroupBlock]:
    return [
        GroupBlock(end, group, key, name_of(key, group), keys[end - 2] if end > 1 else b"")
        for end, key in enumerate(keys, 1)
        for group in NEEDED
    ]


BLOCKS = sorted({block for keys in CHAINS for block in blocks_of(keys)})


def resumable(held: set[GroupBlock]) -> set[bytes]:
    """Keys at which all groups have what they need, by looking at all chains."""
    has = {(block.group, block.key) for block in held}
    return {
        keys[end - 1]
        for keys in CHAINS
        for end in range(1, len(keys) + 1)
        if all((group, key) in has for group, count in NEEDED.items() for key in keys[max(0, end - count) : end])
    }


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(BLOCKS), max_size=120))
def test_boundaries_are_those_whose_blocks_are_all_there(flips: list[GroupBlock]) -> None:
    boundaries, held, announced = Boundaries(TAILS), set[GroupBlock](), set[bytes]()
    for block in flips:
        if block in held:
            held.remove(block)
            gone = boundaries.remove(block)
            assert set(gone) <= announced
            announced.difference_update(gone)
        else:
            held.add(block)
            new = boundaries.add(block)
            assert len(set(new)) == len(new)
            assert announced.isdisjoint(new)
            announced.update(new)
        assert announced == boundaries.keys == resumable(held)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 6), st.sets(st.integers(1, 6))), min_size=1),
    st.sets(st.sampled_from("abcdx")),
)
def test_a_match_of_a_bounded_worker_ends_at_its_last_boundary(
    workers: dict[str, tuple[int, set[int]]], bounded: set[str]
) -> None:
    index, keys, expected = PrefixIndex(), CHAINS[0], dict[str, int]()
    for worker_id, (depth, ends) in workers.items():
        index.add(worker_id, [*keys[:depth], *(resume_name(keys[end - 1]) for end in ends)])
        most = max((end for end in ends if end <= depth), default=0) if worker_id in bounded else depth
        if most:
            expected[worker_id] = most
    matched = index.match(keys)
    index.cut_to_boundaries(keys, matched, bounded)
    assert matched == expected
    index.check_integrity()
