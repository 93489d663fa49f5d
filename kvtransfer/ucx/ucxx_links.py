"""The two kinds of `ucxx` link, each with a control connection and a UCX worker; all on one thread.

    BorrowLink:  IDLE ──a read──▶ GREETING ──Welcome──▶ READY      ──failed, dropped, closed──▶ IDLE
    LendLink:    GREETING ──Hello──▶ READY                         ──failed, closed──▶ over

Any failure ends the link: its worker is destroyed, which makes its posted read quiet, and only then the read fails. A
BorrowLink connects again for the next read; the incarnation ensures that it finds the same process.

One end of a `ucxx` link: a UCX worker of its own, and its messages.

Each link has a worker, because destroying the worker surely ends its messages in flight. Both ends use UCX's error
handling: closing an endpoint by force then fails its messages, whatever the peer does. This rules out shared memory for
tagged messages, which would be several times faster on one host; but without error handling a lender killed in mid-read
crashed its borrower inside UCX.
"""

import contextlib
import ctypes
import os
import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvtransfer.errors import PeerGone, TransferError, TransportUnavailable
from kvtransfer.fair_queue import FairQueue
from kvtransfer.transport import AnyPool, DevicePool, Peer, Pool, Read, Span
from kvtransfer.ucx.lanes import LaneLog, StrictLanes
from kvtransfer.ucx.ucxx_wire import (
    INDEX_BITS,
    MAX_BODY_BYTES,
    MAX_GREETING_BYTES,
    Control,
    Kind,
    Malformed,
    ReadRequest,
    UcxxEndpoint,
    pack_greeting,
    start_connecting,
    unpack_greeting,
)

PROGRESS_ROUNDS = 64
"""Progress calls per turn of a worker; each moves up to 512 KiB."""
READ_BY_RECEIVER = {"RNDV_SCHEME": "get_zcopy"}
"""UCX options by which the receiver fetches large messages where possible, so that no other process writes its memory.
"""


class Ucx:
    """The library, with one context for this process."""

    def __init__(self) -> None:
        """Load the library.

        Raises TransportUnavailable.
        """
        environment = dict(os.environ)
        os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")  # ucxx sets this too, but too late for libucx
        try:
            # ucxx loads libucx only together with a GPU library that is not needed here.
            self._libraries: list[Any] = import_module("libucx").load_library()
            import_module("ucxx")
            self.api: Any = import_module("ucxx._lib.libucxx")
            self.array: Any = import_module("ucxx._lib.arr").Array
        except (ImportError, OSError) as error:
            raise TransportUnavailable(f"ucxx does not load: {error}") from error
        finally:
            _restore(environment)  # importing ucxx sets UCX options for every library and child of this process
        options = {key: value for key, value in READ_BY_RECEIVER.items() if f"UCX_{key}" not in os.environ}
        features = (self.api.Feature.TAG, self.api.Feature.WAKEUP)
        try:
            self.context: Any = self.api.UCXContext(options, features)
        except Exception as error:  # ucxx creates its exception types at run time
            raise TransportUnavailable(f"ucxx does not start: {error}") from error

    def destroy_worker(self, worker: Any) -> None:
        """Destroy a worker through UCX itself; ucxx would keep it while one of its requests is not completed."""
        # leaked on purpose (a few kilobytes), so that ucxx never destroys it a second time
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))
        os.close(worker.epoll_file_descriptor)
        (library,) = [library for library in self._libraries if "libucp.so" in library._name]
        library.ucp_worker_destroy(ctypes.c_void_p(worker.handle))

    def tag(self, value: int) -> Any:
        return self.api.UCXXTag(value)


class Memory:
    """A pool in ucxx's terms."""

    def __init__(self, ucx: Ucx, pool: AnyPool) -> None:
        """Wrap the pool.

        Raises TransportUnavailable for GPU memory where UCX has no CUDA.
        """
        self._ucx = ucx
        self._pool = pool
        if isinstance(pool, DevicePool) and not ucx.context.cuda_support:
            raise TransportUnavailable("ucxx has no CUDA here, and the pool is on a GPU")

    def piece(self, offset: int, length: int) -> Any:
        """Return ucxx's array of `length` bytes at `offset`."""
        if isinstance(self._pool, Pool):
            return self._ucx.array(self._pool.memory.reshape(-1)[offset : offset + length])
        return self._ucx.array(_OnGpu(self._pool.address + offset, length))


class _OnGpu:
    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class UcxEnd:
    """UCX worker of one link.

    Used by one thread. After `destroy` nothing it received into is written any more.
    """

    def __init__(self, ucx: Ucx) -> None:
        """Create the worker.

        Raises TransferError where UCX fails, as do all methods.
        """
        self._ucx = ucx
        with _typed("start"):
            self._worker: Any = ucx.api.UCXWorker(ucx.context)
            self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None
        self._pending: deque[tuple[int, Any]] = deque()  # by tag; ucxx cancels a request that no object refers to
        self.armed = False
        """Whether nothing needs progress until `fileno` is readable."""

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    @property
    def address(self) -> bytes:
        return bytes(self._worker.address)

    def connect(self, address: bytes) -> None:
        """Connect for sending to the worker at `address`, which must be genuine."""
        with _typed("connect"):
            genuine = self._ucx.api.UCXAddress.create_from_buffer(address)
            self._endpoint = self._worker.create_endpoint_from_worker_address(genuine, True)
        self.armed = False

    def send(self, piece: Any, tag: int) -> None:
        """Send a piece.

        Its memory must stay unchanged until nothing is pending.
        """
        with _typed("send"):
            self._pending.append((tag, self._endpoint.tag_send(piece, self._ucx.tag(tag))))
        self.armed = False

    def receive(self, piece: Any, tag: int) -> None:
        """Receive into a piece, whose memory is UCX's until nothing is pending."""
        with _typed("receive"):
            self._pending.append((tag, self._worker.tag_recv(piece, self._ucx.tag(tag))))
        self.armed = False

    def progress(self) -> None:
        """Progress until there is nothing to do, or other links should have their turn."""
        with _typed("progress"):
            for _ in range(PROGRESS_ROUNDS):
                if not self._worker.progress_once() and self._worker.arm():
                    self.armed = True
                    break
            while self._pending and self._pending[0][1].completed:
                self._pending[0][1].check_error()
                self._pending.popleft()

    @property
    def oldest_pending(self) -> int | None:
        """Return the tag of the oldest message not known to be done."""
        return self._pending[0][0] if self._pending else None

    def destroy(self) -> None:
        """Destroy the worker: unfinished messages never complete, whatever the peer does.

        Takes milliseconds.
        """
        if self._endpoint is not None:
            self._endpoint.close_blocking()  # by force, so it does not wait for the peer
        self._worker.cancel_inflight_requests()
        for _ in range(PROGRESS_ROUNDS):
            self._worker.progress_once()
        halfway = any(not request.completed for _, request in self._pending)
        self._pending.clear()
        if halfway:  # messages that UCX has begun to receive cannot be cancelled
            self._ucx.destroy_worker(self._worker)
        self._endpoint = None
        self._worker = None


@contextmanager
def _typed(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ucxx creates its exception types at run time
        raise TransferError(f"UCX fails to {what}: {error}") from error


def _restore(environment: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("UCX_") and name not in environment]:
        del os.environ[name]


GREETING_S = 10.0
"""Seconds for a peer to greet. Afterwards it is given up: its host drops packets, or the process is stopped."""
MAX_UNFINISHED = 4
"""Reads that a lender accepts while earlier ones are not over on its side. A borrower asks for one at a time, but sees
the end of a read before the lender does."""


class UcxxPeer(Peer):
    def __init__(self, endpoint: UcxxEndpoint, packed: bytes, log: LaneLog) -> None:
        self.packed = packed
        self.name = f"{endpoint.incarnation.hex()[:8]}@{endpoint.host}:{endpoint.port}"
        self.endpoint = endpoint
        self.dropped = False
        self._log = log

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._log.lanes()


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One read."""

    peer: UcxxPeer
    spans: tuple[Span, ...]
    flow: Hashable
    future: Read


class Link:
    """Common part of both kinds of link."""

    def __init__(self) -> None:
        self.control: Control | None = None
        self.end: UcxEnd | None = None
        self.give_up_at: float | None = None

    def receive(self) -> None:
        """Handle a control connection that is readable or writable."""
        assert self.control is not None
        self.control.flush()
        for kind, body in self.control.receive():
            self._on_message(kind, body)
        if self.control is not None:
            self.control.flush()

    def progress(self) -> None:
        """Progress messages in flight."""
        if self.end is not None and not self.end.armed:
            self.end.progress()
            self._progressed(self.end)

    def disconnect(self) -> None:
        """Stop touching memory for good."""
        end, control, self.end, self.control, self.give_up_at = self.end, self.control, None, None, None
        if end is not None:
            end.destroy()
        if control is not None:
            control.close()

    def give_up(self) -> None:
        """Handle the end of the time to greet.

        Raises PeerGone.
        """
        raise PeerGone(f"no greeting within {GREETING_S:g} s")

    def fail(self, error: TransferError) -> None:
        raise NotImplementedError

    def _on_message(self, kind: Kind, body: bytes) -> None:
        raise NotImplementedError

    def _progressed(self, end: UcxEnd) -> None:
        raise NotImplementedError


class BorrowLink(Link):
    """Link to one lender; at most one read is posted."""

    def __init__(self, ucx: Ucx, memory: Memory, peer: UcxxPeer, strict: StrictLanes) -> None:
        super().__init__()
        self._ucx = ucx
        self._memory = memory
        self._peer = peer
        self._strict = strict
        self._seen = False  # whether its first read arrived over permitted lanes
        self._queued: FairQueue[Job] = FairQueue()
        self._posted: Job | None = None
        self._number = 0
        self._ready = False

    def put(self, job: Job) -> None:
        self._queued.put(job.flow, job)

    def advance(self) -> None:
        """Connect, or post the next queued read.

        Raises TransferError.
        """
        if not self._queued:
            return
        if self.control is None:
            self.greet()
        elif self._ready and self._posted is None:
            self._post()

    def greet(self) -> None:
        endpoint = self._peer.endpoint
        self.control = Control(start_connecting(endpoint.host, endpoint.port), MAX_BODY_BYTES)
        self.end = UcxEnd(self._ucx)
        self.control.send(Kind.HELLO, pack_greeting(endpoint, self.end.address))
        self.give_up_at = time.monotonic() + GREETING_S
        self._number = 0

    def fail(self, error: TransferError) -> None:
        """End the link, then fail the posted read, then the queued ones."""
        if self._strict and not self._ready and not isinstance(error, PeerGone):
            error = self._strict.unavailable(error)
        posted = self.quiet()
        if posted is not None:
            posted.future.set_exception(error)
        while self._queued:
            job = self._queued.pop()
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)

    def quiet(self) -> Job | None:
        """End the link and return its posted read, whose destination is now safe to reuse."""
        self.disconnect()
        posted, self._posted, self._ready = self._posted, None, False
        return posted

    def withdraw(self) -> None:
        """Cancel queued reads."""
        while self._queued:
            self._queued.pop().future.cancel()

    def _post(self) -> None:
        assert self.end is not None
        assert self.control is not None
        job = self._queued.pop()
        if not job.future.set_running_or_notify_cancel():
            return
        self._number += 1
        request = ReadRequest(self._number, tuple((span.remote_offset, span.length) for span in job.spans))
        self._posted = job
        for span, tag in zip(job.spans, request.tags(), strict=True):
            self.end.receive(self._memory.piece(span.local_offset, span.length), tag)
        self.control.send(Kind.READ, request.pack())
        self.control.flush()

    def _progressed(self, end: UcxEnd) -> None:
        if self._posted is None or end.oldest_pending is not None:
            return
        job, self._posted = self._posted, None
        try:
            if not self._seen:
                self._strict.check(self._peer.lanes)
        except TransferError as refusal:
            job.future.set_exception(refusal)
            return
        self._seen = True
        job.future.set_result(None)

    def _on_message(self, kind: Kind, body: bytes) -> None:
        if kind == Kind.WELCOME and not self._ready and self.end is not None:
            self.end.connect(unpack_greeting(body, self._peer.endpoint.incarnation, self._peer.endpoint.secret))
            self._ready, self.give_up_at = True, None
        elif kind == Kind.REFUSED:
            raise TransferError(f"{self._peer.name} refused: {body[:1000].decode(errors='replace')}")
        else:
            raise Malformed(f"{self._peer.name} sent an unexpected message {kind.name}")


class LendLink(Link):
    """Link from one borrower, which is trusted only with its signed address."""

    def __init__(self, ucx: Ucx, memory: Memory, control: Control, endpoint: UcxxEndpoint) -> None:
        """Accept a connection; `endpoint` is this side's own."""
        super().__init__()
        self.control = control
        self._ucx = ucx
        self._memory = memory
        self._endpoint = endpoint
        self._number = 0
        control.reader.max_body_bytes = MAX_GREETING_BYTES
        self.give_up_at = time.monotonic() + GREETING_S

    def fail(self, error: TransferError) -> None:
        """End the link and send the reason to a borrower that still listens."""
        if self.control is not None and not isinstance(error, PeerGone):
            self.control.send(Kind.REFUSED, str(error).encode())
            with contextlib.suppress(PeerGone):  # then the borrower is gone
                self.control.flush()
        self.disconnect()

    def _on_message(self, kind: Kind, body: bytes) -> None:
        if kind == Kind.HELLO and self.end is None:
            self._welcome(unpack_greeting(body, self._endpoint.incarnation, self._endpoint.secret))
        elif kind == Kind.READ and self.end is not None:
            self._send(ReadRequest.unpack(body, self._endpoint.num_bytes), self.end)
        else:
            raise Malformed(f"unexpected message {kind.name}")

    def _welcome(self, address: bytes) -> None:
        assert self.control is not None
        self.end = UcxEnd(self._ucx)
        self.end.connect(address)
        self.control.reader.max_body_bytes = MAX_BODY_BYTES
        self.control.send(Kind.WELCOME, pack_greeting(self._endpoint, self.end.address))
        self.give_up_at = None

    def _send(self, request: ReadRequest, end: UcxEnd) -> None:
        self._number += 1
        if request.number != self._number:
            raise Malformed(f"unexpected read number {request.number}, expected {self._number}")
        oldest = self._number if end.oldest_pending is None else end.oldest_pending >> INDEX_BITS
        if self._number - oldest >= MAX_UNFINISHED:
            raise Malformed(f"more than {MAX_UNFINISHED} reads at a time")
        for (offset, length), tag in zip(request.pieces, request.tags(), strict=True):
            end.send(self._memory.piece(offset, length), tag)

    def _progressed(self, end: UcxEnd) -> None:
        pass
