"""Peers of the `nixl` transport, their jobs, and the order of those.

No NIXL here.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.cross_memory import Attached
from kvtransfer.fair_queue import FairQueue
from kvtransfer.fingerprint import Folding
from kvtransfer.transport import Found, Peer, Read, Span
from kvtransfer.ucx.lanes import LaneLog
from kvtransfer.ucx.nixl_agent import Memory


class NixlPeer(Peer):
    def __init__(
        self, name: str, endpoint: bytes, memory: Memory, log: LaneLog, attached: Attached | None = None
    ) -> None:
        """Create a peer.

        With `attached`, reads need no NIXL.
        """
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
    """Spans, whose offsets are addresses where the peer is attached."""
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
    """A read posted by its caller, which the thread must finish."""

    job: Job

    @property
    def peer(self) -> NixlPeer:
        return self.job.peer


@dataclass(slots=True)
class Lane:
    """Queue of one peer, and its posted reads."""

    max_posted_bytes: int
    queued: FairQueue[Job] = field(default_factory=FairQueue)
    posted: list[Job] = field(default_factory=list)
    posted_bytes: int = 0
    seen: bool = False
    """Whether its first read arrived over permitted lanes."""
    dropped: bool = False
    """Whether to forget the peer once it is idle."""

    @property
    def idle(self) -> bool:
        return not self.posted and not self.queued

    @property
    def has_room(self) -> bool:
        """Whether the next queued read fits beside the posted ones."""
        if not self.queued:
            return False
        return self.posted_bytes + self.queued.peek().num_bytes <= self.max_posted_bytes

    def add(self, job: Job) -> None:
        """Count a job as posted."""
        self.posted.append(job)
        self.posted_bytes += job.num_bytes

    def remove(self, job: Job) -> None:
        """Count a posted job as over."""
        self.posted.remove(job)
        self.posted_bytes -= job.num_bytes

    def withdraw(self, peer: NixlPeer | None = None) -> None:
        """Cancel queued jobs of one peer, or of all peers that share the agent."""
        for job in self.queued.remove(lambda job: peer is None or job.peer is peer):
            job.future.cancel()
