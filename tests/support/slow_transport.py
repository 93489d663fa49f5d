"""A transport that keeps the contract to the letter and no further, moved by hand."""

import random
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtransfer.errors import PeerGone, TransferError
from kvtransfer.fingerprint import Folding
from kvtransfer.transport import DevicePool, Found, Peer, Pool, Read, Span, Transport, check_spans
from support.sim_model import LAYOUT


@dataclass(eq=False)
class SlowRead:
    peer: "SlowPeer"
    spans: tuple[Span, ...]
    future: Read
    flow: Hashable
    folding: Folding | None

    def blocks(self) -> list[int]:
        """The own blocks it writes into."""
        return [
            block
            for span in self.spans
            for block in range(
                span.local_offset // LAYOUT.block_bytes,
                (span.local_offset + span.length) // LAYOUT.block_bytes,
            )
        ]


class SlowPeer(Peer):
    def __init__(self, name: str, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes

    @property
    def lanes(self) -> tuple[str, ...]:
        return ("slow/memory",)


class SlowTransport(Transport):
    """A posted read may write until the very moment it is done."""

    name = "slow"

    def __init__(self, network: dict[bytes, Pool], name: str) -> None:
        self._network = network
        self._endpoint = name.encode()
        self._peers: dict[bytes, SlowPeer] = {}
        self.queued: dict[str, deque[SlowRead]] = {}
        self.posted: dict[str, SlowRead] = {}
        self.stalled_until: dict[str, int] = {}
        """By peer: the move of the trial before which its read does not end."""
        self.pool: Pool | None = None
        self._looks = False
        """Every other read says the fingerprints of what it brought: the contract leaves it open."""

    def register(self, pool: Pool | DevicePool) -> bytes:
        assert isinstance(pool, Pool)
        self.pool = pool
        self._network[self._endpoint] = pool
        return self._endpoint

    def connect(self, endpoint: bytes) -> SlowPeer:
        if endpoint not in self._network:
            raise PeerGone(f"no pool is registered at {endpoint!r}")
        return self._peers.setdefault(endpoint, SlowPeer(endpoint.decode(), self._network[endpoint].num_bytes))

    def read(self, peer: Peer, spans: Sequence[Span], flow: Hashable = None, folding: Folding | None = None) -> Read:
        assert isinstance(peer, SlowPeer)
        assert self.pool is not None
        check_spans(spans, self.pool.num_bytes, peer.num_bytes, self.max_posted_bytes)
        read = SlowRead(peer, tuple(spans), Read(), flow, folding)
        self.queued.setdefault(peer.name, deque()).append(read)
        return read.future

    def drop(self, peer: Peer) -> None:
        assert isinstance(peer, SlowPeer)
        for read in self.queued.pop(peer.name, ()):
            read.future.cancel()

    def close(self) -> None:
        """The process is gone: nobody reads from it any more."""
        self._network.pop(self._endpoint, None)

    def post(self, peer: str) -> None:
        """Post the oldest read of a peer that was not withdrawn."""
        assert peer not in self.posted
        queue = self.queued[peer]
        while queue and peer not in self.posted:
            read = queue.popleft()
            if read.future.set_running_or_notify_cancel():
                self.posted[peer] = read

    def step(self) -> bool:
        """Some read is posted and done; False when there is none."""
        for peer in [*self.posted, *self.busy()]:
            if peer not in self.posted:
                self.post(peer)
            if peer in self.posted:
                self.land(peer)
                return True
        return False

    def scribble(self, peer: str, rng: random.Random) -> None:
        """Some bytes of a posted read are written: anything may stand there until it is done."""
        span = rng.choice(self.posted[peer].spans)
        offset = span.local_offset + rng.randrange(span.length)
        self._bytes()[offset] = rng.randrange(256)

    def land(self, peer: str) -> None:
        """The posted read is done, or fails when the peer's process is gone."""
        read = self.posted.pop(peer)
        remote = self._network.get(peer.encode())
        if remote is None:
            read.future.set_exception(PeerGone(peer))
            return
        source = remote.memory.reshape(-1)
        for span in read.spans:
            self._bytes()[span.local_offset :][: span.length] = source[span.remote_offset :][: span.length]
        self._looks = not self._looks
        read.future.set_result(self._found(read) if self._looks else None)

    def land_corrupted(self, peer: str, rng: random.Random) -> None:
        """As `land`, with one bit wrong."""
        read = self.posted[peer]
        span = rng.choice(read.spans)
        remote = self._network.get(peer.encode())
        if remote is None:
            self.land(peer)
            return
        source, offset = remote.memory.reshape(-1), rng.randrange(span.length)
        source[span.remote_offset + offset] ^= 1
        self.land(peer)
        source[span.remote_offset + offset] ^= 1

    def fail(self, peer: str) -> None:
        self.posted.pop(peer).future.set_exception(TransferError("the link went down"))

    def busy(self) -> list[str]:
        """Peers with a read that could be posted."""
        return [peer for peer, queue in self.queued.items() if queue and peer not in self.posted]

    def _found(self, read: SlowRead) -> Found:
        if read.folding is None:
            return None
        brought = [self._bytes()[span.local_offset :][: span.length] for span in read.spans]
        return read.folding.of(np.concatenate(brought).view(np.uint64).reshape(-1, read.folding.num_words))

    def _bytes(self) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        assert self.pool is not None
        return self.pool.memory.reshape(-1)
