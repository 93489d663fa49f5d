"""The `ucxx` transport: tagged messages by UCXX, which has no one-sided calls.

The lender's side answers requests.

One thread does everything: it takes reads from `read`, asks lenders over each link's control connection, answers
borrowers, and progresses UCX. It sleeps until one of its sockets or UCX workers has an event. `ucxx_links.py` says why
each link has a UCX worker of its own.
"""

import ipaddress
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future

from kvtransfer.errors import PeerGone, TransferError, TransportUnavailable
from kvtransfer.fingerprint import Folding
from kvtransfer.registry import TransportOptions
from kvtransfer.transport import AnyPool, DevicePool, Peer, Read, Span, Transport, check_spans
from kvtransfer.ucx.lanes import StrictLanes, process_lane_log
from kvtransfer.ucx.ucxx_links import BorrowLink, Job, LendLink, Link, Memory, Ucx, UcxxPeer
from kvtransfer.ucx.ucxx_wire import (
    ID_BYTES,
    MAC_BYTES,
    MAX_GREETING_BYTES,
    MAX_SPANS,
    Control,
    UcxxEndpoint,
    open_listener,
)

CLOSED = "the transport was closed"
LANES_OF = "ucp_tag_send"
MAX_LEND_LINKS = 4096


def open_ucxx(options: TransportOptions) -> "UcxxTransport":
    """Open the transport; the entry point `ucxx` names this function.

    Raises TransportUnavailable or TransportRefused.
    """
    return UcxxTransport(options.host, options.strict)


class UcxxTransport(Transport):
    name = "ucxx"

    def __init__(self, host: str = "127.0.0.1", strict: StrictLanes | None = None) -> None:
        """Start the transport.

        `host` is the name or address at which peers reach this process.

        Raises TransportUnavailable when ucxx is missing or does not start, TransportRefused when it does not start over
        the lanes that `strict` demands.
        """
        self._strict = strict or StrictLanes()
        self._strict.narrow_ucx()
        self._log = process_lane_log(LANES_OF)
        self._address = _resolve(host)
        try:
            self._ucx = Ucx()
        except TransportUnavailable as error:
            raise (self._strict.unavailable(error) if self._strict else error) from error
        self._lock = threading.Lock()  # orders `read`, `drop` and `connect` before or after `close`
        self._closed = False
        self._peers: dict[bytes, UcxxPeer] = {}
        self._pool: AnyPool | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ucxx-links", daemon=True)
        # Fields from here on belong to the thread.
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Link, list[tuple[int, int]]] = {}
        self.borrows: dict[UcxxPeer, BorrowLink] = {}
        self.lends: set[LendLink] = set()

    def register(self, pool: AnyPool) -> bytes:
        """Register a pool in main memory or, where UCX has its CUDA modules, on a GPU."""
        assert self._pool is None
        self._memory = Memory(self._ucx, pool)
        self._pool = pool
        self.on_gpu = isinstance(pool, DevicePool)
        try:
            self._listener = open_listener(_bind_address(self._address))
        except OSError as error:
            raise TransportUnavailable(f"cannot listen on {self._address}: {error.strerror}") from error
        port: int = self._listener.getsockname()[1]
        incarnation, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(MAC_BYTES)
        self._endpoint = UcxxEndpoint(self._address, port, pool.num_bytes, incarnation, secret)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self._endpoint.pack()

    def connect(self, endpoint: bytes) -> UcxxPeer:
        with self._lock:
            if (known := self._peers.get(endpoint)) is not None:
                return known
            peer = UcxxPeer(UcxxEndpoint.unpack(endpoint), endpoint, self._log)
            if self._closed:
                raise TransferError(CLOSED)
            self._peers[endpoint] = peer
        return peer

    def read(self, peer: Peer, spans: Sequence[Span], flow: Hashable = None, folding: Folding | None = None) -> Read:
        """Queue one read, as in the contract.

        Raises ValueError also for more than 65536 spans.
        """
        assert isinstance(peer, UcxxPeer)
        assert self._pool is not None
        check_spans(spans, self._pool.num_bytes, peer.endpoint.num_bytes, self.max_posted_bytes)
        if len(spans) > MAX_SPANS:
            raise ValueError(f"a read of ucxx carries at most {MAX_SPANS} spans, not {len(spans)}")
        job = Job(peer, tuple(spans), flow, Future())
        with self._lock:
            if self._closed:
                job.future.set_exception(TransferError(CLOSED))
            elif peer.dropped:
                job.future.set_exception(PeerGone(f"{peer.name} was dropped"))
            else:
                self.do(lambda: self._put(job))
        return job.future

    def drop(self, peer: Peer) -> None:
        """Make posted reads quiet and fail them, then forget the peer."""
        assert isinstance(peer, UcxxPeer)
        with self._lock:
            if self._closed or peer.dropped:
                return
            peer.dropped = True
            del self._peers[peer.packed]
            self.do(lambda: self._forget(peer))

    def close(self) -> None:
        with self._lock:
            started = self._thread.is_alive()
            if not self._closed:
                self._closed = True
                if started:
                    self.do(self._stop)
                else:
                    os.close(self._wake_fd)
        if started:
            self._thread.join()

    def do(self, what: Callable[[], None]) -> None:
        """Run an action on the thread.

        The lock is held, so no action follows `_stop`.
        """
        self._inbox.put(what)
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._poll_once()
        finally:
            self._end()

    def _poll_once(self) -> None:
        for key, _ in self._selector.select(self._pause()):
            if key.fileobj == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._readable(*key.data)
        while not self._inbox.empty():
            self._inbox.get()()
        if self._stopping:
            return
        for link in list(self._watched):
            self._guarded(link, link.progress)
        for borrow in list(self.borrows.values()):
            self._guarded(borrow, borrow.advance)
        now = time.monotonic()
        for link in list(self._watched):
            if link.give_up_at is not None and now >= link.give_up_at:
                self._guarded(link, link.give_up)

    def _pause(self) -> float | None:
        """Return how many seconds the thread may sleep; None: until an event."""
        if any(link.end is not None and not link.end.armed for link in self._watched):
            return 0.0
        deadlines = [link.give_up_at for link in self._watched if link.give_up_at is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _readable(self, link: Link, is_end: bool) -> None:
        if is_end and link.end is not None:
            link.end.armed = False
        elif not is_end and link.control is not None:
            self._guarded(link, link.receive)

    def _guarded(self, link: Link, action: Callable[[], None]) -> None:
        """Run an action; its failure ends that link only."""
        try:
            action()
        except TransferError as error:
            self._unwatch(link)
            link.fail(error)
            if isinstance(link, LendLink):
                self.lends.discard(link)
        self._watch(link)

    def _watch(self, link: Link) -> None:
        """Wake the thread for the link's present file descriptors."""
        wanted: list[tuple[int, int]] = []
        if link.control is not None:
            writing = selectors.EVENT_WRITE if link.control.has_unsent else 0
            wanted.append((link.control.fileno(), selectors.EVENT_READ | writing))
        if link.end is not None:
            wanted.append((link.end.fileno(), selectors.EVENT_READ))
        if wanted == self._watched.get(link, []):
            return
        self._unwatch(link)
        for number, (fd, events) in enumerate(wanted):
            self._selector.register(fd, events, (link, number == 1))
        if wanted:
            self._watched[link] = wanted

    def _unwatch(self, link: Link) -> None:
        """Stop watching a socket before it is closed, since its number may be reused at once."""
        for fd, _ in self._watched.pop(link, []):
            self._selector.unregister(fd)

    def _put(self, job: Job) -> None:
        link = self.borrows.get(job.peer)
        if link is None:
            link = self.borrows[job.peer] = BorrowLink(self._ucx, self._memory, job.peer, self._strict)
        link.put(job)

    def _forget(self, peer: UcxxPeer) -> None:
        link = self.borrows.pop(peer, None)
        if link is not None:
            self._unwatch(link)
            link.withdraw()
            link.fail(PeerGone(f"{peer.name} was dropped"))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client went away before it was accepted, or too many files are open for now
            return
        if len(self.lends) >= MAX_LEND_LINKS:
            connection.close()
            return
        link = LendLink(self._ucx, self._memory, Control(connection, MAX_GREETING_BYTES), self._endpoint)
        self.lends.add(link)
        self._watch(link)

    def _stop(self) -> None:
        self._stopping = True

    def _end(self) -> None:
        """Make everything quiet first, then fail the reads."""
        with self._lock:
            self._closed = True
        for link in list(self._watched):
            self._unwatch(link)
            link.disconnect()
        for borrow in self.borrows.values():
            borrow.withdraw()
            borrow.fail(TransferError(CLOSED))
        self.borrows.clear()
        self.lends.clear()
        self._selector.close()
        self._listener.close()
        os.close(self._wake_fd)


def _resolve(host: str) -> str:
    """Resolve a host name.

    Raises TransportUnavailable.
    """
    try:
        address: str = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
    except OSError as error:
        raise TransportUnavailable(f"host {host!r} has no address: {error}") from error
    if ipaddress.ip_address(address).is_unspecified:
        raise TransportUnavailable(f"other hosts cannot reach this process at {host!r}: set advertise_host")
    return address


def _bind_address(address: str) -> str:
    """Return the address to listen on: every interface, unless the process serves its own host only.

    An advertised address may belong to another device, such as a load balancer.
    """
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback:
        return address
    return "::" if parsed.version == 6 else "0.0.0.0"
