"""Peers of the `nixl` transport, what was asked of them, and whose turn it is. No NIXL here."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.cross_memory import Attached
from kvtransfer.fair_queue import FairQueue
from kvtransfer.fingerprint import Folding
from kvtransfer.nixl_agent import Memory
from kvtransfer.transport import MAX_POSTED_BYTES, Found, Peer, Read, Span
from kvtransfer.ucx_lanes import LaneLog


class NixlPeer(Peer):
    def __init__(
        self, name: str, endpoint: bytes, memory: Memory, log: LaneLog, attached: Attached | None = None
    ) -> None:
        """`attached`: reads need no NIXL."""
        self.name = name
        self.endpoint = endpoint
        self.memory = memory
        self.dropped = False
        self.attached = attached
        self._log = log

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._log.lanes() if self.attached is None else self.attached.lanes


@dataclass(slots=True)
class Job:
    peer: NixlPeer
    spans: tuple[Span, ...]
    """Offsets are addresses."""
    num_bytes: int
    flow: Hashable
    folding: Folding | None
    future: Read
    found: Found = None
    handle: Any = None
    posted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Drop:
    peer: NixlPeer


@dataclass(frozen=True, slots=True)
class Posted:
    """By who asked for it; the thread is to see to its end."""

    job: Job

    @property
    def peer(self) -> NixlPeer:
        return self.job.peer


@dataclass(slots=True)
class Lane:
    """The queue of one peer, and its reads that are posted: MAX_POSTED_BYTES at most."""

    queued: FairQueue[Job] = field(default_factory=FairQueue)
    posted: list[Job] = field(default_factory=list)
    posted_bytes: int = 0
    seen: bool = False
    """Its first read has arrived, over lanes that were demanded."""
    dropped: bool = False
    """To be forgotten once it is idle."""

    @property
    def idle(self) -> bool:
        return not self.posted and not self.queued

    @property
    def has_room(self) -> bool:
        """The next read in line may be posted beside those that are."""
        if not self.queued:
            return False
        return self.posted_bytes + self.queued.peek().num_bytes <= MAX_POSTED_BYTES

    def add(self, job: Job) -> None:
        """It is posted."""
        self.posted.append(job)
        self.posted_bytes += job.num_bytes

    def remove(self, job: Job) -> None:
        """It is over."""
        self.posted.remove(job)
        self.posted_bytes -= job.num_bytes

    def withdraw(self, peer: NixlPeer | None = None) -> None:
        """Cancel what is queued, of one peer or of all that share the agent."""
        for job in self.queued.remove(lambda job: peer is None or job.peer is peer):
            job.future.cancel()
