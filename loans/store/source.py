"""A store below the pool as the source of a loan.

    find ──▶ Started ──fetch, FETCHES_AHEAD at once──▶ Announced ──copy into the pool──▶ ReadCompleted ──▶ next fetch

A fetch brings objects into memory of the store, where their headers are checked. Its blocks are announced in order with
the stored fingerprints, and then copied into the pool, where the loan compares them as it compares all others. So a
store that hangs never keeps blocks of the pool.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import BlockKey
from kvcache.cached_blocks import StoreBelow
from kvcache.store.kv_store import Fetched
from loans.borrower import Announced
from loans.reads.block_reads import LocalRank, RankRead, ReadProgress, RemoteRank
from loans.sources import LoanSource, RankCopies, RankQuiet, WriteBlock

FETCHES_AHEAD = 3


class StoreSource(LoanSource):
    """Blocks of a store.

    Objects are whole blocks. The engine process fetches them, and each rank copies its part out of them. Block ids are
    indices into the run of blocks that the loan is for.
    """

    def __init__(
        self,
        below: StoreBelow,
        keys: Sequence[BlockKey],
        first: int,
        write_block: WriteBlock,
        own: LocalRank | None,
        others: Sequence[RemoteRank],
        progress: ReadProgress,
    ) -> None:
        """Create the source of chain blocks from `first` on, named `keys`; `progress` covers all copies."""
        self.below = below
        self.is_local = below.store.is_local
        self.name = "the local store" if self.is_local else "the shared store"
        self._store = below.store
        self._keys = keys
        self._first = first
        self._write_block = write_block
        self._copies = RankCopies(own, others, progress)
        self._progress = progress
        self._on_fetched: Callable[[int, Fetched], object] = lambda first, fetched: None
        self._end = 0
        self._next_fetch = self._next_announced = 0
        self._fetched: dict[int, Fetched] = {}
        """Fetches that arrived and are not given back, by their first block."""
        self._unread: dict[int, int] = {}
        """Announced blocks that are not in the pool yet, by the first block of their fetch."""
        self._closed = False
        self.shortened: tuple[int, str] | None = None
        """Chain index from which the store has nothing, and why; None while it has all."""

    def open(self, on_fetched: Callable[[int, Fetched], object]) -> None:
        """Begin; the callback comes on any thread, with the first chain index of each fetch."""
        self._on_fetched = on_fetched

    def look_up(self, on_found: Callable[[int], object]) -> None:
        """Ask the store how many leading blocks it has; the callback comes on any thread."""
        self._store.find(self._keys, on_found)

    def start(self, num_blocks: int) -> None:
        """Fetch the first `num_blocks`."""
        self._end = num_blocks
        self._fetch_ahead()

    def arrived(self, first: int, fetched: Fetched) -> Iterator[Announced]:
        """Take a fetch in; yield what to announce next, in order."""
        if self._closed:
            self._store.give_back(fetched)
            return
        self._fetched[first - self._first] = fetched
        while (batch := self._fetched.get(self._next_announced)) is not None and self.shortened is None:
            at, count = self._next_announced, len(batch.contents)
            self._next_announced = min(at + self._store.blocks_per_fetch, self._end)
            if batch.failure:
                self.shortened = self._first + at + count, batch.failure
            if count:
                self._unread[at] = count
                yield Announced(self._first + at, tuple(range(at, at + count)), batch.fingerprints)

    def start_read(self, block_ids: Sequence[int], blocks: Sequence[int], on_quiet: RankQuiet) -> list[RankRead]:
        def read(block_ids: Sequence[int], blocks: Sequence[int]) -> "list[Future[None]]":
            contents = [self._content(index) for index in block_ids]
            copying = self._store.run(partial(_copy, self._write_block, blocks, contents))
            self._progress.follow(copying)
            return [copying]

        return self._copies.start(read, self._content, block_ids, blocks, on_quiet)

    def release(self, first: int, count: int) -> None:
        """Give fetches back whose blocks are all in the pool, and fetch what follows."""
        for index in range(first - self._first, first - self._first + count):
            at = self._fetch_of(index)
            self._unread[at] -= 1
            if not self._unread[at]:
                del self._unread[at]
                self._store.give_back(self._fetched.pop(at))
        self._fetch_ahead()

    def spoiled(self, key: BlockKey) -> None:
        self._store.refuse(key)

    def close(self) -> None:
        self._closed = True
        fetched, self._fetched = self._fetched, {}
        for each in fetched.values():
            self._store.give_back(each)

    def _fetch_ahead(self) -> None:
        width = self._store.blocks_per_fetch
        while self._next_fetch < min(self._end, self._next_announced + FETCHES_AHEAD * width):
            at = self._next_fetch
            self._next_fetch = min(at + width, self._end)
            on_fetched = partial(self._on_fetched, self._first + at)
            self._store.fetch(self._keys[at : self._next_fetch], on_fetched)

    def _fetch_of(self, index: int) -> int:
        """Return the first block of the fetch with block `index`."""
        return index - index % self._store.blocks_per_fetch

    def _content(self, index: int) -> NDArray[np.uint8]:
        at = self._fetch_of(index)
        return self._fetched[at].contents[index - at]


def _copy(write_block: WriteBlock, blocks: Sequence[int], contents: Sequence[NDArray[np.uint8]]) -> None:
    for block, content in zip(blocks, contents, strict=True):
        write_block(block, content)
