"""Whole blocks in memory that the ranks of an engine map: parts put into them and taken out of them."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.block_parts.messages import GATHER_BYTES, GatheredBlocks, GatheringRank
from engine.block_parts.part_service import MappedMemory, PartCopies, SharedMemory
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.ranks import BlockPart, part_spans
from kvtransfer.transport import Pool
from loans.reads.block_reads import LocalRank
from support.memory_objects import StepExecutor

RANKS, PLANES, SPAN = st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)


def random_bytes(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@given(ranks=RANKS, planes=PLANES, span=SPAN)
def test_parts_of_all_ranks_are_the_block(ranks: int, planes: int, span: int) -> None:
    """They are the bytes that a rank of a worker of one would read of it, too."""
    block = random_bytes(ranks * planes * span)
    parts = [BlockPart(len(block), rank, ranks, planes, 1) for rank in range(ranks)]
    rebuilt = np.zeros_like(block)
    whole = BlockPart(len(block), 0, 1, planes, 1)
    for part in parts:
        content = part.of(block)
        assert content.shape == (part.num_bytes,)
        part.put(content, rebuilt)
        read = np.zeros(part.num_bytes, np.uint8)
        for each in part_spans(part, whole, [(0, 0)]):
            piece = block[each.remote_offset : each.remote_offset + each.length]
            read[each.local_offset : each.local_offset + each.length] = piece
        assert np.array_equal(read, content)
    assert np.array_equal(rebuilt, block)


def test_rows_of_rank_0_are_those_that_a_follower_maps() -> None:
    memory = SharedMemory()
    mapped = MappedMemory(os.dup(memory.descriptor))
    first = memory.take(3, 1000)
    assert first.shape == (3, 1000)
    assert not first.any()
    first[2] = 7
    assert mapped.row(memory.offset_of(first[2]), 1000).tolist() == [7] * 1000
    second = memory.take(2, 9000)  # after the follower has mapped the first
    mapped.row(memory.offset_of(second[1]), 9000)[5] = 9
    assert second[1, 5] == 9
    assert memory.offset_of(second[1, 100:]) == memory.offset_of(second[1]) + 100
    assert first[2].tolist() == [7] * 1000
    with pytest.raises(AssertionError, match="not lie in shared memory"):
        memory.offset_of(np.zeros(1, np.uint8))
    with pytest.raises(MemoryError):
        memory.take(1 << 40, 1 << 20)
    assert memory.take(1, 10).shape == (1, 10), "a refusal takes nothing"


class Follower(GatheringRank):
    """A follower in this process, which works when its end is awaited."""

    def __init__(self, part: BlockPart, pool: NDArray[np.uint8]) -> None:
        self._part = part
        self._pool = pool
        self._asked: list[tuple[list[int], NDArray[np.uint8]]] = []
        self.num_gathers = 0

    def begin_gather(self, blocks: list[int], rows: NDArray[np.uint8]) -> None:  # type: ignore[override]
        assert len(blocks) == len(rows)
        self._asked.append((list(blocks), rows))
        self.num_gathers += 1

    def end_gather(self) -> None:
        blocks, rows = self._asked.pop()
        assert not self._asked, "one gather at a time"
        for block, row in zip(blocks, rows, strict=True):
            self._part.put(self._pool[block], row)


@given(ranks=st.integers(2, 4), planes=PLANES, blocks=st.lists(st.integers(0, 8), max_size=9))
def test_whole_blocks_are_gathered_of_all_parts(ranks: int, planes: int, blocks: list[int]) -> None:
    width = GATHER_BYTES // 4 // (ranks * planes) * (ranks * planes)
    whole = random_bytes(9, width)
    parts = [BlockPart(width, rank, ranks, planes, 9) for rank in range(ranks)]
    pools = [np.array([part.of(block) for block in whole]) for part in parts]
    followers = [Follower(part, pool) for part, pool in zip(parts[1:], pools[1:], strict=True)]
    memory = SharedMemory()
    own = parts[0], lambda chosen: [pools[0][block] for block in chosen]
    gathered = GatheredBlocks(width, followers, memory.take, own)
    found = gathered.read(blocks)
    for block in blocks:
        assert np.array_equal(next(found), whole[block])
    assert next(found, None) is None
    assert {each.num_gathers for each in followers} == {-(-len(blocks) // 4)}, "four blocks at once"
    os.close(memory.descriptor)


class PartPool:
    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory

    def read_blocks(self, blocks: list[int]) -> list[NDArray[np.uint8]]:  # type: ignore[override]
        return [self.memory[block] for block in blocks]

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        self.memory[block] = content


class Copying:
    """The second of two ranks, its whole blocks and what its copies said."""

    def __init__(self) -> None:
        self.whole = random_bytes(4, 64)
        self.memory = SharedMemory()
        self.rows = self.memory.take(4, 64)
        self.rows[:] = self.whole
        part = BlockPart(64, 1, 2)
        self.pool = PartPool(np.zeros((8, 32), np.uint8))
        transport = LocalTransport(LocalNetwork(), "rank")
        transport.register(Pool(self.pool.memory))
        rank = LocalRank(transport, part, lambda blocks: self.pool.memory[list(blocks)].view(np.uint64))
        self.thread = StepExecutor()
        self.copies = PartCopies(
            part,
            self.pool,  # type: ignore[arg-type]
            MappedMemory(os.dup(self.memory.descriptor)),
            rank,
            self.thread,
            clock=lambda: self.now,
        )
        self.now = 0.0
        self.quiet: list[tuple[tuple[bytes, ...] | None, bool]] = []

    def source(self, block: int) -> int:
        return self.memory.offset_of(self.rows[block])

    def part_of(self, block: int) -> bytes:
        return self.whole[block, 32:].tobytes()

    def run(self) -> None:
        while self.thread.step():
            pass


@pytest.fixture
def copying() -> Copying:
    return Copying()


def test_parts_are_copied_from_memory_and_from_messages(copying: Copying) -> None:
    sources = [copying.source(0), copying.part_of(1), copying.source(2), copying.part_of(3)]
    read = copying.copies.start(sources, [7, 5, 3, 1], lambda *said: copying.quiet.append(said))
    assert not read.is_quiet
    copying.run()
    assert read.is_quiet
    assert [copying.pool.memory[block].tobytes() for block in (7, 5, 3, 1)] == [copying.part_of(i) for i in range(4)]
    assert copying.quiet == [(tuple(copying.part_of(index) for index in range(4)), False)], "fingerprints of its part"


def test_a_copy_that_has_not_begun_is_withdrawn(copying: Copying) -> None:
    first = copying.copies.start([copying.source(0)], [0], lambda *_: None)
    second = copying.copies.start([copying.source(1)], [1], lambda *said: copying.quiet.append(said))
    copying.now = 5.0
    assert (first.stuck_s(), second.stuck_s()) == (5.0, 5.0)
    assert first.withdraw() == [], "it has not begun"
    copying.run()
    assert copying.quiet == [((copying.part_of(1),), False)]


def test_parts_are_gathered_into_neighbouring_rows(copying: Copying) -> None:
    copying.pool.memory[4], copying.pool.memory[6] = 4, 6
    copying.copies.gather([6, 4], copying.memory.offset_of(copying.rows[1]))
    copying.whole[1, 32:], copying.whole[2, 32:] = 6, 4
    assert np.array_equal(copying.rows, copying.whole), "the first rank's half is as it was"
