"""A rank on another node, which maps no memory of node 0: its parts of whole blocks go over the connection."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from queue import SimpleQueue

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.block_parts.messages import GatheredBlocks, Joined
from engine.block_parts.part_service import EngineLink, PartCopies, SharedMemory, serve_part
from engine.process.ranks.ranks import DistantLink
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.ranks import BlockPart, shares_of
from kvtransfer.transport import Pool
from loans.reads.block_reads import LocalRank

BLOCK, PLANES, NUM_BLOCKS = 96, 3, 8
PARTS = [
    BlockPart(BLOCK, 1, 2),
    BlockPart(BLOCK, 0, 1, PLANES, NUM_BLOCKS, shares_of([1, 3])[1]),
    BlockPart(BLOCK, 1, 2, 1, 0, shares_of([1, 3])[0], 4),
]


class Rank:
    """The second rank: its pool, one row of the part's bytes for each block, and its end of the connection."""

    def __init__(self, part: BlockPart) -> None:
        self.part = part
        self.pool = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, part.num_bytes), np.uint8)
        ours, theirs = Pipe()
        self.link = DistantLink(1, ours, SharedMemory(), lambda: None)
        transport = LocalTransport(LocalNetwork(), "rank")
        transport.register(Pool(self.pool))
        local = LocalRank(transport, part, self.fingerprints)
        copies = PartCopies(part, self, None, local)
        engine = EngineLink(theirs)
        engine.send(Joined(b"endpoint", "local", None, NUM_BLOCKS, part))

        def serve() -> None:
            with suppress(EOFError, OSError):
                serve_part(engine, local, copies, self.fingerprints)

        self._serving = threading.Thread(target=serve, daemon=True)
        self._serving.start()
        self.link.joined.result(5)

    def close(self) -> None:
        self.link.close()
        self._serving.join(5)

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        return self.pool[list(blocks)].astype(np.uint64).sum(axis=1, keepdims=True)

    def read_blocks(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        return [self.pool[block] for block in blocks]

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        self.pool[block] = content


@pytest.fixture(params=PARTS)
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    rank = Rank(request.param)
    yield rank
    rank.close()


def test_its_parts_arrive_in_whole_blocks(rank: Rank) -> None:
    whole = np.zeros((2, BLOCK), np.uint8)
    for row, block in zip(whole, (5, 2), strict=True):
        rank.part.put(rank.pool[block], row)
    gathered = GatheredBlocks(BLOCK, [rank.link], lambda count, width: np.zeros((count, width), np.uint8))
    assert [row.tobytes() for row in gathered.read([5, 2])] == [row.tobytes() for row in whole]


def test_it_gets_its_parts_of_whole_blocks(rank: Rank) -> None:
    whole = np.random.default_rng(2).integers(0, 256, (2, BLOCK), np.uint8)
    quiet: SimpleQueue[tuple[tuple[bytes, ...] | None, bool]] = SimpleQueue()
    rank.link.start_copy(list(whole), [7, 0], lambda *said: quiet.put(said))
    prints, gone = quiet.get()
    assert not gone
    for row, block in zip(whole, (7, 0), strict=True):
        assert rank.pool[block].tobytes() == rank.part.of(row).tobytes()
    assert prints == tuple(each.tobytes() for each in rank.fingerprints([7, 0]))
