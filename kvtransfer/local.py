"""The `local` transport between pools of one process, for tests and simulation.

A read is a copy.

Reads run when `step` is called, or at once with `eager=True`, so a test decides when bytes arrive.
"""

from collections.abc import Hashable, Sequence
from threading import Lock

from kvtransfer.errors import EndpointMismatch, PeerGone, TransferError, TransportUnavailable
from kvtransfer.fair_queue import FairQueue
from kvtransfer.fingerprint import Folding
from kvtransfer.transport import AnyPool, Peer, Pool, Read, Span, Transport, check_spans

PREFIX = b"tandem-local:"


class LocalNetwork:
    """Set of transports that can reach each other."""

    def __init__(self) -> None:
        self.transports: dict[bytes, LocalTransport] = {}


class LocalPeer(Peer):
    def __init__(self, name: str, endpoint: bytes, num_bytes: int) -> None:
        self.name = name
        self.endpoint = endpoint
        self.num_bytes = num_bytes
        self.dropped = False

    @property
    def lanes(self) -> tuple[str, ...]:
        return ("local/memory",)


class LocalTransport(Transport):
    name = "local"

    def __init__(self, network: LocalNetwork, name: str, eager: bool = True) -> None:
        """Create a transport.

        `name` must be new to the network, because peers remember names for good.
        """
        self.network = network
        self._endpoint = PREFIX + name.encode()
        self._eager = eager
        self._peers: dict[bytes, LocalPeer] = {}
        self._queue: FairQueue[tuple[LocalPeer, tuple[Span, ...], Read]] = FairQueue()
        self._closing = Lock()  # orders `read` before or after `close` and `drop`
        self._closed = False
        self.pool: Pool | None = None

    def register(self, pool: AnyPool) -> bytes:
        assert self.pool is None
        if not isinstance(pool, Pool):
            raise TransportUnavailable("the local transport copies between pools in main memory only")
        self.pool = pool
        self.network.transports[self._endpoint] = self
        return self._endpoint

    def connect(self, endpoint: bytes) -> LocalPeer:
        if not endpoint.startswith(PREFIX):
            raise EndpointMismatch("the endpoint is not one of the local transport")
        if self._closed:
            raise TransferError("the transport was closed")
        remote = self.network.transports.get(endpoint)
        if remote is None or remote.pool is None:
            raise PeerGone(f"no pool is registered at {endpoint!r}")
        name = endpoint.removeprefix(PREFIX).decode()
        return self._peers.setdefault(endpoint, LocalPeer(name, endpoint, remote.pool.num_bytes))

    def read(self, peer: Peer, spans: Sequence[Span], flow: Hashable = None, folding: Folding | None = None) -> Read:
        assert isinstance(peer, LocalPeer)
        assert self.pool is not None
        check_spans(spans, self.pool.num_bytes, peer.num_bytes, self.max_posted_bytes)
        future = Read()
        with self._closing:
            if self._closed:
                future.set_exception(TransferError("the transport was closed"))
                return future
            if peer.dropped:
                future.set_exception(PeerGone(f"{peer.name} was dropped"))
                return future
            self._queue.put((peer.endpoint, flow), (peer, tuple(spans), future))
        if self._eager:
            self.step()
        return future

    def step(self) -> bool:
        """Perform the next queued read; return False when there is none."""
        while True:
            with self._closing:
                if not self._queue:
                    return False
                peer, spans, future = self._queue.pop()
            if future.set_running_or_notify_cancel():
                self._copy(peer, spans, future)
                return True

    def drop(self, peer: Peer) -> None:
        assert isinstance(peer, LocalPeer)
        with self._closing:
            if peer.dropped:
                return
            peer.dropped = True
            self._peers.pop(peer.endpoint, None)
            withdrawn = self._queue.remove(lambda read: read[0] is peer)
        for _, _, future in withdrawn:
            future.cancel()

    def close(self) -> None:
        with self._closing:
            self._closed = True
            withdrawn = self._queue.remove(lambda _: True)
        self.network.transports.pop(self._endpoint, None)
        for _, _, future in withdrawn:
            future.cancel()

    def _copy(self, peer: LocalPeer, spans: tuple[Span, ...], future: Read) -> None:
        remote = self.network.transports.get(peer.endpoint)
        if remote is None or remote.pool is None or self.pool is None:
            future.set_exception(PeerGone(f"{peer.name} has ended"))
            return
        target, source = self.pool.memory.reshape(-1), remote.pool.memory.reshape(-1)
        for span in spans:
            target[span.local_offset :][: span.length] = source[span.remote_offset :][: span.length]
        future.set_result(None)
