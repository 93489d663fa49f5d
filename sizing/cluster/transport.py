"""Transport that moves no bytes and takes the time a link would take."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvtransfer.errors import EndpointMismatch, PeerGone, TransferError
from kvtransfer.fair_queue import FairQueue
from kvtransfer.fingerprint import Folding
from kvtransfer.transport import AnyPool, Peer, Read, Span, Transport
from loans.borrower_manager import BLOCK_READ_BYTES
from sizing.cluster.clock import VirtualClock
from sizing.cluster.links import Links

PREFIX = b"tandem-virtual:"


@dataclass(slots=True)
class _Queued:
    num_bytes: int
    future: Read


class VirtualPeer(Peer):
    def __init__(self, name: str) -> None:
        self.name = name
        self.reads: FairQueue[_Queued] = FairQueue()
        self.reading: _Queued | None = None
        """The read being posted; one at a time, which equals the windows of real transports."""
        self.dropped = False

    @property
    def lanes(self) -> tuple[str, ...]:
        return ("virtual",)


class VirtualTransport(Transport):
    """Transport of one worker.

    Reads of one peer follow each other; peers share the NICs (`links.py`).
    """

    name = "virtual"

    def __init__(self, clock: VirtualClock, links: Links, worker_id: str, latency_s: float) -> None:
        self._clock = clock
        self._links = links
        self._worker_id = worker_id
        self._latency_s = latency_s
        self._peers: dict[str, VirtualPeer] = {}
        self._closed = False

    def blocks_per_read(self, block_bytes: int, peer: Peer | None = None) -> int:
        """Return one read for all blocks, since nothing is copied."""
        return max(1, BLOCK_READ_BYTES // block_bytes)

    def register(self, pool: AnyPool) -> bytes:
        return PREFIX + self._worker_id.encode()

    def connect(self, endpoint: bytes) -> VirtualPeer:
        if not endpoint.startswith(PREFIX):
            raise EndpointMismatch("the endpoint is not one of the virtual transport")
        if self._closed:
            raise TransferError("the transport was closed")
        name = endpoint.removeprefix(PREFIX).decode()
        return self._peers.setdefault(name, VirtualPeer(name))

    def read(self, peer: Peer, spans: Sequence[Span], flow: Hashable = None, folding: Folding | None = None) -> Read:
        assert isinstance(peer, VirtualPeer)
        future = Read()
        if self._closed or peer.dropped:
            future.set_exception(PeerGone(f"{peer.name} was dropped"))
            return future
        peer.reads.put((peer.name, flow), _Queued(sum(span.length for span in spans), future))
        self._post(peer)
        return future

    def drop(self, peer: Peer) -> None:
        assert isinstance(peer, VirtualPeer)
        peer.dropped = True
        self._peers.pop(peer.name, None)
        for read in peer.reads.remove(lambda _: True):
            read.future.cancel()

    def close(self) -> None:
        self._closed = True
        for peer in list(self._peers.values()):
            self.drop(peer)

    def _post(self, peer: VirtualPeer) -> None:
        while peer.reading is None and peer.reads:
            read = peer.reads.pop()
            if read.future.set_running_or_notify_cancel():
                peer.reading = read
                self._clock.after(self._latency_s, self._start, peer, read)

    def _start(self, peer: VirtualPeer, read: _Queued) -> None:
        self._links.transfer(peer.name, self._worker_id, read.num_bytes, lambda whole: self._over(peer, read, whole))

    def _over(self, peer: VirtualPeer, read: _Queued, whole: bool) -> None:
        peer.reading = None
        if whole:
            read.future.set_result(None)
        else:
            read.future.set_exception(PeerGone(f"{peer.name} has ended"))
        if not self._closed:
            self._post(peer)
