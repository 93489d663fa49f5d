"""Block reads of one rank over the local transport: its peers, and the end of every read."""

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.fingerprint import Folding, fingerprint_blocks
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.ranks import BlockPart, join_endpoints
from kvtransfer.transport import Pool
from loans.reads import block_reads as block_read
from loans.reads.block_reads import LocalRank
from loans.reads.verification import Corruption
from support.slow_transport import SlowTransport

BLOCK = 64


class PoolMemory:
    """The bytes of a pool's blocks, as an engine has them."""

    def __init__(self, pool: Pool) -> None:
        self._memory = pool.memory

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        return fingerprint_blocks(self._memory, blocks, kv_heads=2)

    def read_blocks(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        return [self._memory[block] for block in blocks]

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        self._memory[block] = content


def pool_of(value: int) -> Pool:
    return Pool(np.full((4, BLOCK), value, np.uint8))


def test_who_was_not_read_from_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_read, "MAX_PEERS", 2)
    network, pool = LocalNetwork(), pool_of(0)
    reader = LocalTransport(network, "reader")
    reader.register(pool)
    rank = LocalRank(reader, BlockPart(BLOCK), lambda blocks: pool.memory[list(blocks), :8].view(np.uint64))
    lenders = {value: LocalTransport(network, f"lender-{value}") for value in (1, 2, 3)}
    endpoints = {value: lender.register(pool_of(value)) for value, lender in lenders.items()}
    quiet: list[tuple[bytes, ...] | None] = []

    def read_from(values: Sequence[int]) -> None:
        for value in values:
            rank.start_read(endpoints[value], [0], [1], "flow", lambda prints, gone: quiet.append(prints))
            assert quiet.pop() == (bytes([value]) * 8,)

    read_from([1, 2, 1, 3])
    assert [endpoints[value] in rank.peers for value in (1, 2, 3)] == [True, False, True]
    read_from([2, 3])
    assert [endpoints[value] in rank.peers for value in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize("eager", [True, False])
def test_a_landing_that_is_over_is_freed_at_once(eager: bool) -> None:
    """And does not wait for a collection of cycles, which would be a pause for everybody."""
    network, pool = LocalNetwork(), pool_of(0)
    reader, lender = LocalTransport(network, "reader", eager), LocalTransport(network, "lender")
    reader.register(pool)
    rank = LocalRank(reader, BlockPart(BLOCK), lambda blocks: pool.memory[list(blocks), :8].view(np.uint64))
    endpoint = lender.register(pool_of(7))
    quiet: list[tuple[bytes, ...] | None] = []
    gc.disable()
    try:
        block_read = rank.start_read(endpoint, [0, 2], [1, 3], "flow", lambda prints, gone: quiet.append(prints))
        while reader.step():
            pass
        assert quiet == [(b"\7" * 8,) * 2]
        assert (block_read.is_quiet, block_read.withdraw(), block_read.stuck_s()) == (True, [], 0.0)
        freed = weakref.ref(block_read)
        del block_read
        assert freed() is None
    finally:
        gc.enable()


def test_what_a_transport_found_on_the_way_is_not_looked_for_again() -> None:
    """By a read of whole blocks from one rank; of several, each brings a piece of each block."""
    network = dict[bytes, Pool]()
    reader, pool = SlowTransport(network, "reader"), pool_of(0)
    reader.register(pool)
    looked: list[list[int]] = []

    def fingerprints(blocks: Sequence[int]) -> NDArray[np.uint64]:
        looked.append(list(blocks))
        return fingerprint_blocks(pool.memory, blocks, kv_heads=2)

    rank = LocalRank(reader, BlockPart(BLOCK), fingerprints, Folding(BLOCK // 2 // 8))
    contents = np.random.default_rng(1).integers(0, 256, (4, BLOCK), np.uint8)
    whole = SlowTransport(network, "whole").register(Pool(contents))
    halves = [
        SlowTransport(network, f"half {half}").register(Pool(contents[:, half * 32 : half * 32 + 32].copy()))
        for half in (0, 1)
    ]
    quiet: list[tuple[bytes, ...] | None] = []

    def read_from(endpoint: bytes) -> list[tuple[bytes, ...] | None]:
        pool.memory[:] = 0
        looked.clear()
        quiet.clear()
        rank.start_read(endpoint, [3, 1], [0, 2], "flow", lambda prints, gone: quiet.append(prints))
        for peer in reader.busy():
            reader.post(peer)
            reader.land(peer)
        assert np.array_equal(pool.memory[[0, 2]], contents[[3, 1]])
        return quiet

    expected = tuple(row.tobytes() for row in fingerprint_blocks(contents, [3, 1], kv_heads=2))
    assert read_from(whole) == [expected]
    assert looked == []
    assert read_from(whole) == [expected]
    assert looked == [[0, 2]]  # this transport looks every other time
    for _ in range(2):
        assert read_from(join_endpoints(halves)) == [expected]
        assert looked == [[0, 2]]


def test_a_corrupted_block_has_another_fingerprint_whoever_took_it() -> None:
    """One bit of each of the next blocks flips before the check, also where the transport would have looked on the
    way, and no further block changes."""
    network = dict[bytes, Pool]()
    reader, pool = SlowTransport(network, "reader"), pool_of(0)
    reader.register(pool)
    memory = PoolMemory(pool)
    rank = LocalRank(reader, BlockPart(BLOCK), memory.fingerprints, Folding(BLOCK // 2 // 8))
    contents = np.random.default_rng(1).integers(0, 256, (4, BLOCK), np.uint8)
    lender = SlowTransport(network, "lender").register(Pool(contents))
    quiet: list[tuple[bytes, ...] | None] = []

    def read() -> tuple[list[int], list[bool]]:
        """Bits that differ in each block, and whether its fingerprint is right."""
        quiet.clear()
        rank.start_read(lender, [3, 1, 2], [0, 2, 3], "flow", lambda prints, gone: quiet.append(prints))
        for peer in reader.busy():
            reader.post(peer)
            reader.land(peer)
        expected = [row.tobytes() for row in fingerprint_blocks(contents, [3, 1, 2], kv_heads=2)]
        (found,) = quiet
        flipped = np.unpackbits(pool.memory[[0, 2, 3]] ^ contents[[3, 1, 2]], axis=1).sum(axis=1)
        return flipped.tolist(), [one == other for one, other in zip(found, expected, strict=True)]

    assert read() == ([0, 0, 0], [True] * 3)
    rank.corruption = Corruption(memory, 4)
    assert read() == ([1, 1, 1], [False] * 3)
    assert read() == ([1, 0, 0], [False, True, True])
    assert read() == read() == ([0, 0, 0], [True] * 3)
