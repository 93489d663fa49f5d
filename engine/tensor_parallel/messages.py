"""What rank 0's main thread and that of a follower say to each other. Steps go another way, see `steps.py`."""

from dataclasses import dataclass

HEARTBEAT_S = 0.2

# ------------------------------------------------------------------------------------------ to a follower


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Read this rank's part of the `block_ids` behind `endpoint` into `blocks`; answered by Landed, once."""

    number: int
    endpoint: bytes
    block_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    flow: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel what can be of a landing. Answered by the blocks that are still being written."""

    number: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Make block `target` equal to `source`. Answered when it is done."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The worker of this endpoint has departed."""

    endpoint: bytes


ToFollower = ReadBlocks | Withdraw | Copy | Drop

# ---------------------------------------------------------------------------------------- from a follower


@dataclass(frozen=True, slots=True)
class Joined:
    """The shard is loaded and its pool is registered: `endpoint` is this rank's."""

    endpoint: bytes


@dataclass(frozen=True, slots=True)
class NotJoined:
    """It could not start: `field` of the settings is at fault."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """All reads of a landing are quiet. `fingerprints` of this rank's heads, one entry per block, or None."""

    number: int
    fingerprints: tuple[bytes, ...] | None
    peer_gone: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """To Withdraw or Copy; they are answered in order."""

    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The follower's main thread turns: said every HEARTBEAT_S."""

    stuck_s: dict[int, float]
    """Landings, by number, for which nothing has come for a while, and for how long."""


FromFollower = Joined | NotJoined | BlocksRead | Answer | Heartbeat
