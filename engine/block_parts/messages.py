"""Messages between an engine process and the process of a rank that holds a part of every block.

Steps use vLLM's own way.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import KvLayout
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
