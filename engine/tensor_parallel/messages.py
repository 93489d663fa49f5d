"""Messages between rank 0's main thread and a follower's.

Steps use another socket, see `steps.py`.
"""

from dataclasses import dataclass
from pathlib import Path

from engine.tensor_parallel.shared_memory import SharedPlace

HEARTBEAT_S = 0.2

# ------------------------------------------------------------------------------------------ to a follower


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
    """Copy this rank's part of whole blocks at `places` into `blocks`; answered by BlocksRead, once."""

    number: int
    places: tuple[SharedPlace, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """Copy this rank's parts of `blocks` into rows of shared memory from `offset` on. Answered when they are there."""

    blocks: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class OpenDisk:
    """Open the disk tier's file for reading. Rank 0 has locked it."""

    path: Path


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel what can be cancelled of a block read.

    Answered by the blocks that are still being written.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Make block `target` equal to `source`. Answered when it is done."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the departed worker at this endpoint."""

    endpoint: bytes


ToFollower = ReadBlocks | CopyBlocks | Gather | OpenDisk | Withdraw | Copy | Drop

# ---------------------------------------------------------------------------------------- from a follower


@dataclass(frozen=True, slots=True)
class Joined:
    """The shard is loaded and its pool is registered at `endpoint`."""

    endpoint: bytes


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


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to Withdraw, Copy or Gather, in the order of the questions."""

    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of the follower's main thread, sent every HEARTBEAT_S."""

    stuck_s: dict[int, float]
    """Block reads without recent progress, by number, and for how many seconds."""


FromFollower = Joined | NotJoined | BlocksRead | Answer | Heartbeat
