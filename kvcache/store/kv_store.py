"""Interface of a store below the pool as an engine's loop sees it; the simulator has a store in virtual time.

An engine has at most two: a *local* one in main memory or on a disk of its host, whose blocks count as this worker's,
and the *shared* one of all workers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import BlockKey
from kvcache.pool import CacheEvent


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blocks that a fetch brought: a leading part of those wanted."""

    fingerprints: tuple[bytes, ...]
    """Stored fingerprints, one per block; the bytes are not compared with them yet."""
    contents: tuple[NDArray[np.uint8], ...]
    """Bytes of the blocks, [block_bytes] each, until the fetch is given back."""
    failure: str
    """Why the next block did not come; empty when all came."""
    buffer: NDArray[np.uint8] | None = None
    """Memory behind `contents`."""


class PlaceUse(NamedTuple):
    """Use of one place of a store, in blocks."""

    name: str
    capacity: int
    used: int
    hits: int
    """Blocks read from it since the start."""


class KvStore(ABC):
    """Blocks that left a pool.

    Methods belong to the engine's loop thread and never wait; callbacks come on any thread, once each.
    """

    identity: str
    """Name that is equal for workers that use the same store."""
    is_local: bool = False
    """Whether it belongs to this host, so that its blocks count as this worker's."""
    has_other_writers: bool = False
    """Whether other processes may write to a local store, so that it may have more than this engine knows."""
    writes_at_once: bool = False
    """Whether blocks are put as soon as they are computed, not only when the pool evicts them."""
    blocks_per_fetch: int
    """Largest number of blocks of one fetch."""

    @property
    @abstractmethod
    def answers(self) -> bool:
        """Whether the store is worth asking now; False for a while after it fell silent."""

    @property
    @abstractmethod
    def num_writable(self) -> int:
        """Number of blocks for which `put` has memory now."""

    @abstractmethod
    def lacks(self, key: BlockKey) -> bool:
        """Return whether the block should be written: it is not known to be stored, or being written."""

    @abstractmethod
    def num_known(self, keys: Iterable[BlockKey]) -> int:
        """Return how many leading keys this engine knows to be stored."""

    @abstractmethod
    def known_keys(self) -> list[BlockKey]:
        """Return the keys that this engine knows to be stored."""

    @abstractmethod
    def put(self, parent: BlockKey, key: BlockKey, content: NDArray[np.uint8], fingerprint: bytes) -> None:
        """Keep a copy of a block, uint8 [block_bytes], that the store `lacks` and has memory for."""

    @abstractmethod
    def drop(self, count: int) -> None:
        """Count blocks that are not put for lack of memory."""

    @abstractmethod
    def find(self, keys: Sequence[BlockKey], on_found: Callable[[int], object]) -> None:
        """Call `on_found` with the number of leading keys that the store seems to hold."""

    @abstractmethod
    def fetch(self, keys: Sequence[BlockKey], on_fetched: Callable[[Fetched], object]) -> None:
        """Read at most `blocks_per_fetch` blocks; each fetch must be given back, whatever it brought."""

    @abstractmethod
    def give_back(self, fetched: Fetched) -> None:
        """Return the memory of a fetch.

        A copy of it may still run if its loan is over: it writes into quarantined blocks, whatever it reads.
        """

    @abstractmethod
    def run(self, copy: Callable[[], None]) -> "Future[None]":
        """Run `copy`, which copies fetched blocks into the pool, beside the loop."""

    @abstractmethod
    def refuse(self, key: BlockKey) -> None:
        """Remove a block whose bytes differ from its fingerprint."""

    keeps_objects: str = ""
    """Why objects cannot be removed; empty where these can."""

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey], on_removed: Callable[[int, str], object]) -> None:
        """Remove blocks, then call `on_removed` with the number of those that were there, and with a failure if any."""

    @abstractmethod
    def fell_silent(self) -> None:
        """Process that a loan gave the store up."""

    @abstractmethod
    def take_events(self) -> list[CacheEvent]:
        """Return what this engine learned since the last call of the store's contents."""

    @abstractmethod
    def snapshot(self) -> list[CacheEvent]:
        """Return all that this engine knows of the store's contents."""

    def outcomes(self) -> tuple[tuple[str, int], ...]:
        """Return numbers of blocks since the start, by what became of them."""
        return ()

    def places(self) -> list[PlaceUse]:
        """Return the use of each place of a local store."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Write what is queued, within bounds, and release the store."""
