"""Messages between an engine process and the process of a rank that holds a part of every block.

Steps use vLLM's own way.

Whole blocks, put together from the parts that the ranks of an engine have of them.

Tiers and the shared store hold whole blocks, so their files and objects are the same for any number of ranks. A block
leaves the pool when every rank has copied its part into a row of shared memory; only then is it put anywhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import Allocate, KvLayout
from kvtransfer.ranks import BlockPart

HEARTBEAT_S = 0.2

# ------------------------------------------------------------------------------------------ to a rank


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Read this rank's part of `block_ids` at `endpoint` into `blocks`; answered by BlocksRead, once."""

    number: int
    endpoint: bytes
    block_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    flow: str


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy this rank's part of whole blocks into `blocks`; answered by BlocksRead, once."""

    number: int
    sources: tuple[int | bytes, ...]
    """Offsets of the blocks in shared memory; a rank on another node gets its parts themselves."""
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """Copy this rank's parts of `blocks` into rows of shared memory from `offset` on. Answered when they are there.

    Without an offset the answer has the parts themselves, since the rank is on another node.
    """

    blocks: tuple[int, ...]
    offset: int | None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel what can be cancelled of a block read.

    Answered by the blocks that are still being written.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the departed worker at this endpoint."""

    endpoint: bytes


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Flip a bit in this rank's part of the next `num_blocks` blocks that it reads, for a drill."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Compute fingerprints of this rank's part of `blocks`, which no step writes; answered by Fingerprinted, once."""

    number: int
    blocks: tuple[int, ...]


ToFollower = ReadBlocks | CopyBlocks | Gather | Withdraw | Drop | Corrupt | Fingerprint

# ---------------------------------------------------------------------------------------- from a rank


@dataclass(frozen=True, slots=True)
class Joined:
    """The model is loaded and its pool is registered at `endpoint`."""

    endpoint: bytes
    transport: str
    """Name of its transport."""
    layout: KvLayout | None = None
    """Layout of whole blocks, where the engine process has no KV memory to read it off."""
    num_blocks: int = 0
    """Blocks of its pool, in the same case."""
    part: BlockPart | None = None
    """Its part of each block, in the same case."""


@dataclass(frozen=True, slots=True)
class NotJoined:
    """The rank could not start: `field` of the settings is at fault."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """All reads of a block read are quiet.

    `fingerprints` are of this rank's heads, one entry per block, or None.
    """

    number: int
    fingerprints: tuple[bytes, ...] | None
    peer_gone: bool
    lanes: tuple[str, ...] = ()
    """Lanes that reads from this worker have used so far."""


@dataclass(frozen=True, slots=True)
class Fingerprinted:
    """Answer to Fingerprint."""

    number: int
    fingerprints: NDArray[np.uint64]
    """Fingerprints of this rank's heads, [blocks, its KV heads]."""


@dataclass(frozen=True, slots=True)
class RankReply:
    """Answer to Withdraw or Gather, in the order of the questions."""

    blocks: tuple[int, ...] = ()
    contents: tuple[bytes, ...] = ()
    """Parts of the gathered blocks."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of the rank's main thread, sent every HEARTBEAT_S."""

    stuck_s: dict[int, float]
    """Block reads without recent progress, by number, and for how many seconds."""


FromFollower = Joined | NotJoined | BlocksRead | Fingerprinted | RankReply | Heartbeat


ReadPart = Callable[[Sequence[int]], Iterable[NDArray[np.uint8]]]
"""Function that returns a rank's part of blocks."""
GATHER_BYTES = 8 << 20
"""Shared memory for blocks that are being gathered, if a block is smaller."""


class GatheringRank(ABC):
    """A follower rank that copies its parts of blocks into shared memory.

    Its methods belong to the main thread, and raise RankLost when it is gone.
    """

    @abstractmethod
    def begin_gather(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy this rank's parts of `blocks` into `rows`, [len(blocks), block_bytes], from now on."""

    @abstractmethod
    def end_gather(self) -> None:
        """Wait until the parts are there."""


class FingerprintingRank(GatheringRank):
    """A rank that fingerprints its part of blocks on request.

    Both methods may be called on any thread.
    """

    @abstractmethod
    def begin_fingerprints(self, blocks: Sequence[int]) -> "Future[NDArray[np.uint64]]":
        """Start computing fingerprints of the rank's part of blocks that no step writes, [blocks, its KV heads]."""

    @abstractmethod
    def end_fingerprints(self, begun: "Future[NDArray[np.uint64]]") -> NDArray[np.uint64]:
        """Wait for fingerprints.

        Raises RankLost.
        """


class GatheredBlocks:
    """The engine process's reader of whole blocks."""

    def __init__(
        self,
        block_bytes: int,
        followers: Sequence[GatheringRank],
        allocate: Allocate,
        own: tuple[BlockPart, ReadPart] | None = None,
    ) -> None:
        """Create the reader of blocks of `block_bytes`.

        `own` is the part of this process and its reader; None where the followers have all parts. `allocate` returns
        memory that all ranks map.
        """
        self._own = own
        self._followers = followers
        self._rows = allocate(max(1, GATHER_BYTES // block_bytes), block_bytes)

    def read(self, blocks: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of blocks that no step writes, each valid until the next one is asked for.

        Raises RankLost.
        """
        for start in range(0, len(blocks), len(self._rows)):
            run = blocks[start : start + len(self._rows)]
            rows = self._rows[: len(run)]
            for follower in self._followers:
                follower.begin_gather(run, rows)
            if self._own is not None:
                part, read_part = self._own
                for row, content in zip(rows, read_part(run), strict=True):
                    part.put(content, row)
            for follower in self._followers:
                follower.end_gather()
            yield from rows
